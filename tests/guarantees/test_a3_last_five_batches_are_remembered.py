"""A3: the broker remembers the last 5 batches per producer and partition; order holds with up to 5 in flight."""

from __future__ import annotations

from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from tests.support.broker import Cluster
from tests.support.direct import PRODUCE, DirectClient, batch_of, produce_request
from tests.support.load import Load, violations
from tests.support.reading import read_values
from tests.support.waiting import eventually


def test_the_fifth_last_batch_is_known_and_the_sixth_last_is_not(cluster: Cluster) -> None:
    topic = cluster.unique("a3")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer()
        batches = [batch_of([b"%d" % n], pid=pid, epoch=epoch, sequence=n) for n in range(6)]
        for n, batch in enumerate(batches):
            assert client.produce(topic, batch) == (0, n)
        for n, batch in list(enumerate(batches))[1:]:
            assert client.produce(topic, batch) == (0, n)
        assert client.produce(topic, batches[0])[0] is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"%d" % n for n in range(6)]


def test_a_batch_that_overtakes_is_refused_so_that_order_holds(cluster: Cluster) -> None:
    """The fault: of five requests in flight the second never arrives. The others must not be stored before it."""
    topic = cluster.unique("a3")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer()
        batches = [batch_of([b"%d" % n], pid=pid, epoch=epoch, sequence=n) for n in range(5)]
        eventually(lambda: client.produce(topic, batches[0]), lambda answer: answer == (0, 0))
        for n in (2, 3, 4):
            client.send(PRODUCE, produce_request(topic, batches[n]), 11)
        codes = [client.receive(PRODUCE, 11).responses[0].partition_responses[0].error_code for _ in range(3)]
        assert codes == [45, 45, 45]
        assert [client.produce(topic, batches[n])[0] for n in (1, 2, 3, 4)] == [0, 0, 0, 0]
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"%d" % n for n in range(5)]


def test_order_holds_with_five_requests_in_flight_while_connections_break(semel_broker: SemelBroker) -> None:
    with DirectClient(semel_broker.bootstrap) as client:
        client.create_topic("a3", 1)
    options = {"max.in.flight.requests.per.connection": 5, "batch.num.messages": 10, "linger.ms": 0}
    with Load(semel_broker.bootstrap, "a3", 1, **options) as load:
        for _ in range(3):
            load.wait_for(200)
            semel_broker.kill()
            semel_broker.start()
        load.wait_for(200)
    assert load.failures == []
    assert violations(load, semel_broker.bootstrap) == []
