"""A2: a batch sent again (lost acknowledgement, broken connection, broker restart) is stored once and answered with the
offset of the first time."""

from __future__ import annotations

from semel.local.brokers import SEMEL, SemelBroker
from tests.support.broker import Cluster, faulty_semel
from tests.support.direct import PRODUCE, DirectClient, batch_of, produce_request
from tests.support.reading import read_values


def test_retried_batch_returns_original_offset(cluster: Cluster) -> None:
    topic = cluster.unique("a2")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer()
        first = batch_of([b"a", b"b"], pid=pid, epoch=epoch, sequence=0)
        second = batch_of([b"c"], pid=pid, epoch=epoch, sequence=2)
        assert client.produce(topic, first) == (0, 0)
        assert client.produce(topic, second) == (0, 2)
        assert client.produce(topic, first) == (0, 0)
        assert client.produce(topic, second) == (0, 2)
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"a", b"b", b"c"]


def test_connection_cut_before_the_answer_is_read(cluster: Cluster) -> None:
    topic = cluster.unique("a2")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer()
    batch = batch_of([b"once"], pid=pid, epoch=epoch, sequence=0)
    with DirectClient(cluster.bootstrap) as cut:
        cut.send(PRODUCE, produce_request(topic, batch), 11)
    with DirectClient(cluster.bootstrap) as client:
        assert client.produce(topic, batch) == (0, 0)
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"once"]


def test_batch_repeated_after_kill_9_is_stored_once(semel_broker: SemelBroker) -> None:
    with DirectClient(semel_broker.bootstrap) as client:
        client.create_topic("a2")
        pid, epoch = client.new_producer()
        batches = [batch_of([b"%d" % n], pid=pid, epoch=epoch, sequence=n) for n in range(8)]
        assert [client.produce("a2", batch) for batch in batches] == [(0, n) for n in range(8)]
    semel_broker.kill()
    semel_broker.start()
    with DirectClient(semel_broker.bootstrap) as client:
        assert [client.produce("a2", batch) for batch in batches[-5:]] == [(0, n) for n in range(3, 8)]
        assert client.produce("a2", batch_of([b"8"], pid=pid, epoch=epoch, sequence=8)) == (0, 8)
    assert [v for _, _, v in read_values(semel_broker.bootstrap, "a2")] == [b"%d" % n for n in range(9)]


def test_broker_that_dies_before_its_answer_stores_the_batch_once(tmp_path) -> None:
    with SemelBroker(tmp_path / "data", semel=faulty_semel("Produce.before_response:kill")) as broker:
        with DirectClient(broker.bootstrap) as client:
            client.create_topic("a2")
            pid, epoch = client.new_producer()
            batch = batch_of([b"once"], pid=pid, epoch=epoch, sequence=0)
            client.send(PRODUCE, produce_request("a2", batch), 11)
            broker.process.wait_for_line("fault fired: Produce.before_response")
            broker.process.wait()
        broker.semel = SEMEL
        broker.start()
        with DirectClient(broker.bootstrap) as client:
            assert client.produce("a2", batch) == (0, 0)
        assert [v for _, _, v in read_values(broker.bootstrap, "a2")] == [b"once"]
