"""KIP-939 from the client to the log: prepared transactions on semel's broker, and what Apache Kafka says to them.

Outcomes are read back by confluent-kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from semel.aio import AsyncProducer
from semel.cli import main
from semel.client.admin import Admin
from semel.client.errors import ConfigError, FencedError, IllegalStateError, UnsupportedByBrokerError
from semel.client.producer import PreparedTransaction, Producer
from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S

ENABLED = "transaction.two.phase.commit.enable=true"


@pytest.fixture(scope="module")
def broker() -> Iterator[SemelBroker]:
    with SemelBroker(None, "--set", ENABLED, "--fsync", "os") as broker:
        yield broker


@pytest.fixture
def cluster(broker: SemelBroker) -> Cluster:
    return Cluster("semel", broker)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("prepared"), partitions=2)


@pytest.fixture(params=[1, 2], ids=["TV1", "TV2"])
def make(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., Producer]]:
    """Makes producers with one transactional id."""
    made: list[Producer] = []
    name = cluster.unique("two-phase")

    def make(bootstrap: str = "") -> Producer:
        made.append(
            Producer(
                bootstrap_servers=bootstrap or cluster.bootstrap,
                transactional_id=name,
                two_phase_commit=True,
                transaction_version_max=request.param,
                retry_backoff_ms=10,
            )
        )
        return made[-1]

    yield make
    for producer in made:
        producer.close(timeout_ms=5000)


def prepared(producer: Producer, topic: str, *values: bytes) -> PreparedTransaction:
    producer.begin_transaction()
    for number, value in enumerate(values):
        producer.send(topic, value, partition=number % 2)
    return producer.prepare_transaction()


def values(bootstrap: str, topic: str) -> list[bytes]:
    return sorted(row.value for row in read_topic(bootstrap, topic) if row.value is not None)


@pytest.mark.parametrize("commits", [True, False], ids=["decided", "not decided"])
def test_the_next_owner_ends_a_prepared_transaction_as_it_was_decided(
    cluster: Cluster, topic: str, make: Callable[..., Producer], commits: bool
) -> None:
    first = make()
    assert first.init_transactions(keep_prepared=True) is None
    state = prepared(first, topic, b"a", b"b")
    assert values(cluster.bootstrap, topic) == []  # everything is in the log, nothing is visible
    assert len(read_topic(cluster.bootstrap, topic, isolation="read_uncommitted")) == 2
    first.close()  # a crash, as far as the broker can see: the transaction stays

    second = make()
    assert second.init_transactions(keep_prepared=True) == state
    assert PreparedTransaction.from_text(str(state)) == state
    with pytest.raises(IllegalStateError, match="prepared"):
        second.begin_transaction()
    with pytest.raises(IllegalStateError, match="nothing can be added"):
        second.send(topic, b"late")
    assert second.complete_transaction(state if commits else None) is commits
    with second.transaction() as txn:
        txn.send(topic, b"c")
    assert values(cluster.bootstrap, topic) == ([b"a", b"b", b"c"] if commits else [b"c"])


def test_an_owner_that_does_not_keep_it_aborts_it(cluster: Cluster, topic: str, make: Callable[..., Producer]) -> None:
    first, second = make(), make()
    first.init_transactions()
    state = prepared(first, topic, b"a")
    assert second.init_transactions() is None
    assert values(cluster.bootstrap, topic) == []
    with pytest.raises(FencedError):
        first.complete_transaction(state)
    with second.transaction() as txn:
        txn.send(topic, b"b")
    assert values(cluster.bootstrap, topic) == [b"b"]


def test_a_zombie_cannot_end_what_the_next_owner_keeps(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    first, second = make(), make()
    first.init_transactions()
    state = prepared(first, topic, b"a")
    assert second.init_transactions(keep_prepared=True) == state
    with pytest.raises(FencedError):
        first.abort_transaction()
    assert second.complete_transaction(state)
    assert values(cluster.bootstrap, topic) == [b"a"]


def test_the_command_aborts_a_prepared_transaction_by_force_only(
    cluster: Cluster, topic: str, make: Callable[..., Producer], capsys: pytest.CaptureFixture[str]
) -> None:
    owner = make()
    owner.init_transactions()
    state = prepared(owner, topic, b"a")
    name = owner.settings.transactional_id or ""
    command = ["txn", "abort", name, "--brokers", cluster.bootstrap]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert str(state) in said
    assert "--force" in said
    assert "loses its records" in said
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        assert admin.describe_transaction(name).state == "Ongoing", "it was aborted without --force"
        assert main([*command, "--force"]) == 0
        assert admin.describe_transaction(name).state == "Empty"
    with pytest.raises(FencedError):
        owner.complete_transaction(state)


@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE])
def test_a_lost_end_is_sent_again(cluster: Cluster, topic: str, make: Callable[..., Producer], effect: Effect) -> None:
    first = make()
    first.init_transactions()
    state = prepared(first, topic, b"a")
    with Proxy(cluster.bootstrap) as proxy:
        second = make(proxy.bootstrap)
        assert second.init_transactions(keep_prepared=True) == state
        fault = proxy.add(Rule(END_TXN, effect, times=2))
        assert second.complete_transaction(state)
        assert fault.fired
        second.close()
    assert values(cluster.bootstrap, topic) == [b"a"]


def test_sends_are_refused_after_prepare_and_everything_was_flushed(topic: str, make: Callable[..., Producer]) -> None:
    producer = make()
    producer.init_transactions()
    producer.begin_transaction()
    deliveries = [producer.send(topic, b"%d" % number) for number in range(100)]
    state = producer.prepare_transaction()
    assert all(delivery.done() for delivery in deliveries)
    for refused in (producer.begin_transaction, lambda: producer.send(topic, b"x"), producer.prepare_transaction):
        with pytest.raises(IllegalStateError, match="prepared"):
            refused()
    producer.commit_transaction()
    with pytest.raises(IllegalStateError, match="complete_transaction"):
        producer.complete_transaction(state)


def test_without_the_option_nothing_of_it_is_possible(cluster: Cluster) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("plain")) as producer:
        with pytest.raises(IllegalStateError, match=r"transaction\.two\.phase\.commit\.enable"):
            producer.init_transactions(keep_prepared=True)
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.raises(IllegalStateError, match=r"transaction\.two\.phase\.commit\.enable"):
            producer.prepare_transaction()
    with pytest.raises(ConfigError, match=r"transaction\.timeout\.ms"):
        Producer(bootstrap_servers="x:1", transactional_id="t", two_phase_commit=True, transaction_timeout_ms=5000)
    with pytest.raises(ConfigError, match=r"transactional\.id"):
        Producer(bootstrap_servers="x:1", two_phase_commit=True)


def test_it_survives_kill_9_of_the_broker_and_a_clock_of_days(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = ("--set", ENABLED, "--set", "transaction.abort.timed.out.transaction.cleanup.interval.ms=20")
    with SemelBroker(tmp_path_factory.mktemp("prepared"), *options) as broker:
        topic = create_topic(broker.bootstrap, "t", partitions=2)

        def owner() -> Producer:
            return Producer(bootstrap_servers=broker.bootstrap, transactional_id="id", two_phase_commit=True)

        with owner() as first:
            first.init_transactions()
            state = prepared(first, topic, b"a", b"b")
        for _ in range(2):  # before it is kept, and after
            broker.kill()
            broker.start()
            with owner() as second:
                assert second.init_transactions(keep_prepared=True) == state
        with Admin(bootstrap_servers=broker.bootstrap) as admin:
            assert admin.describe_transaction("id").is_two_phase
        with owner() as third:
            assert third.init_transactions(keep_prepared=True) == state
            assert third.complete_transaction(state)
        assert values(broker.bootstrap, topic) == [b"a", b"b"]


def test_the_asynchronous_producer_has_it_too(cluster: Cluster, topic: str) -> None:
    name = cluster.unique("two-phase")

    async def run() -> None:
        options = {"bootstrap.servers": cluster.bootstrap, "transactional.id": name, "two.phase.commit": True}
        async with AsyncProducer(options) as first:
            assert await first.init_transactions(keep_prepared=True) is None
            await first.begin_transaction()
            await first.send(topic, b"a")
            state = await first.prepare_transaction()
            with pytest.raises(IllegalStateError, match="nothing can be added"):
                await first.send(topic, b"late")
        async with AsyncProducer(options) as second:
            assert await second.init_transactions(keep_prepared=True) == state
            assert await second.complete_transaction(state)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert values(cluster.bootstrap, topic) == [b"a"]


def test_a_broker_without_it_is_named(shared_semel_broker: SemelBroker) -> None:
    options = {"bootstrap.servers": shared_semel_broker.bootstrap, "transactional.id": "t2"}
    producer = Producer({**options, "transaction.two.phase.commit.enable": "true"})
    with producer, pytest.raises(UnsupportedByBrokerError, match=r"transaction\.two\.phase\.commit\.enable=true"):
        producer.init_transactions()


def test_apache_kafka_does_not_have_it_yet(apache_kafka: ApacheKafka) -> None:
    producer = Producer(bootstrap_servers=apache_kafka.bootstrap, transactional_id="t2", two_phase_commit=True)
    with producer, pytest.raises(UnsupportedByBrokerError, match="KIP-939"):
        producer.init_transactions()
