"""Transactions on both brokers, in both generations of the protocol, with the network failing at every step.

Outcomes are read back by confluent-kafka.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FencedError,
    IllegalStateError,
    KafkaError,
    TimedOutError,
)
from semel.client.immediate import run
from semel.client.producer import Producer
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.types import GroupMetadata, OffsetAndMetadata
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import FIND_COORDINATOR
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
)
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import committed_offset, create_topic, read_topic
from tests.support.waiting import PATIENCE_S, STALL_S, eventually, until

EFFECTS = [Effect.DROP_REQUEST, Effect.DROP_RESPONSE, Effect.TRUNCATE_REQUEST, Effect.TRUNCATE_RESPONSE]


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("transactional"), partitions=3)


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.bootstrap) as proxy:
        yield proxy


@pytest.fixture(params=[1, 2], ids=["TV1", "TV2"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def make(cluster: Cluster, version: int) -> Iterator[Callable[..., Producer]]:
    """Makes producers with one transactional id, ready for transactions."""
    made: list[Producer] = []
    name = cluster.unique("owner")

    def make(bootstrap: str | None = None, **options: object) -> Producer:
        defaults: dict[str, object] = {
            "bootstrap_servers": bootstrap or cluster.bootstrap,
            "transactional_id": name,
            "transaction_version_max": version,
            "linger_ms": 0,
            "retry_backoff_ms": 10,
        }
        producer = Producer({**defaults, **options})
        made.append(producer)
        producer.init_transactions(timeout_ms=30_000)
        assert producer._transactional().transaction.generation == version
        return producer

    yield make
    for producer in made:
        producer.close(timeout_ms=5000)


def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return sorted(row.value for row in read_topic(cluster.bootstrap, topic))


# --- what a transaction promises ---


def test_all_partitions_and_offsets_become_visible_together(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    producer, group = make(), cluster.unique("group")
    for number in range(3):
        producer.begin_transaction()
        for partition in range(3):
            producer.send(topic, b"%d-%d" % (number, partition), partition=partition).result(
                timeout_ms=PATIENCE_S * 1000
            )
        producer.send_offsets_to_transaction({(topic, 0): OffsetAndMetadata(number + 1, "note")}, group)
        assert values(cluster, topic) == [b"%d-%d" % (n, p) for n in range(number) for p in range(3)]
        producer.commit_transaction(timeout_ms=30_000)
        assert _settled(cluster, topic, 3 * (number + 1))
        assert committed_offset(cluster.bootstrap, group, topic) == number + 1


def _settled(cluster: Cluster, topic: str, count: int) -> bool:
    """The commit is decided when it is answered; its markers arrive a moment later."""
    eventually(lambda: values(cluster, topic), lambda found: len(found) == count, otherwise=f"{count} should be there")
    return True


def test_an_aborted_transaction_leaves_nothing_and_the_producer_goes_on(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    producer, group = make(), cluster.unique("group")
    producer.begin_transaction()
    producer.send(topic, b"aborted", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    producer.send_offsets_to_transaction({(topic, 0): 7}, GroupMetadata(group))
    producer.send(topic, b"aborted, too", partition=1)
    producer.abort_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(topic, b"kept", partition=0)
    assert _settled(cluster, topic, 1)
    assert values(cluster, topic) == [b"kept"]
    assert committed_offset(cluster.bootstrap, group, topic) < 0


def test_the_with_block_commits_on_success_and_aborts_on_error(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    producer = make()

    def failing() -> None:
        with producer.transaction() as txn:
            txn.send(topic, b"lost")
            raise KeyError("the program's own error")

    for number in range(4):
        with producer.transaction() as txn:
            txn.send(topic, b"%d" % number)
        with pytest.raises(KeyError, match="the program's own error"):
            failing()
        assert producer._transactional().state is ProducerTxnState.READY
    with producer.transaction():
        pass  # an empty one is fine
    assert _settled(cluster, topic, 4)


def test_a_new_owner_aborts_what_the_old_one_left_and_the_old_one_is_told(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    zombie = make()
    zombie.begin_transaction()
    zombie.send(topic, b"zombie", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    owner = make()
    with pytest.raises(FencedError):
        zombie.commit_transaction(timeout_ms=30_000)
    with pytest.raises(FencedError, match="close it"):
        zombie.begin_transaction()
    with owner.transaction() as txn:
        txn.send(topic, b"owner", partition=0)
    assert _settled(cluster, topic, 1)
    assert values(cluster, topic) == [b"owner"]


def test_a_zombie_that_writes_is_fenced(cluster: Cluster, topic: str, make: Callable[..., Producer]) -> None:
    zombie = make()
    zombie.begin_transaction()
    zombie.send(topic, b"zombie", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    make()
    with pytest.raises(KafkaError) as caught:
        zombie.send(topic, b"zombie again", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    assert caught.value.code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
    with pytest.raises(FencedError):
        zombie.send(topic, b"and again")
    with pytest.raises(FencedError):
        zombie.abort_transaction(timeout_ms=30_000)
    assert values(cluster, topic) == []


def test_a_member_of_an_old_generation_cannot_commit_offsets(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    producer = make()
    producer.begin_transaction()
    producer.send(topic, b"output", partition=0)
    stale = GroupMetadata(cluster.unique("group"), generation_id=3, member_id="nobody")
    with pytest.raises(AbortableError, match="abort"):
        producer.send_offsets_to_transaction({(topic, 0): 5}, stale)
    with pytest.raises(AbortableError, match="abort_transaction"):
        producer.commit_transaction()
    producer.abort_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(topic, b"next", partition=0)
    assert _settled(cluster, topic, 1)


def test_a_failed_write_fails_the_transaction_and_an_abort_mends_it(
    cluster: Cluster, make: Callable[..., Producer]
) -> None:
    narrow = create_topic(cluster.bootstrap, cluster.unique("narrow"), max_message_bytes="2000")
    producer = make()
    producer.begin_transaction()
    producer.send(narrow, b"fits").result(timeout_ms=PATIENCE_S * 1000)
    failed = producer.send(narrow, b"x" * 5000)
    with pytest.raises(AbortableError, match=r"MESSAGE_TOO_LARGE.*abort_transaction"):
        producer.commit_transaction(timeout_ms=30_000)
    assert failed.exception(timeout_ms=PATIENCE_S * 1000) is not None
    with pytest.raises(AbortableError):
        producer.send(narrow, b"more")
    producer.abort_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(narrow, b"again")
    assert _settled(cluster, narrow, 1)
    assert values(cluster, narrow) == [b"again"]


# --- the network fails at a step ---

STEPS = {
    "init": INIT_PRODUCER_ID,
    "coordinator": FIND_COORDINATOR,
    "add partitions": ADD_PARTITIONS_TO_TXN,
    "produce": PRODUCE,
    "add offsets": ADD_OFFSETS_TO_TXN,
    "commit offsets": TXN_OFFSET_COMMIT,
    "end": END_TXN,
}


@pytest.mark.parametrize("step", STEPS)
def test_faults_at_any_step_change_nothing_for_the_user(
    cluster: Cluster, topic: str, version: int, make: Callable[..., Producer], proxy: Proxy, step: str
) -> None:
    """The connection is cut before the request, after its answer, and in the middle of either."""
    if version == 2 and step in ("add partitions", "add offsets"):
        pytest.skip("TV2 has no such step")
    group = cluster.unique("group")
    faults = [proxy.add(Rule(STEPS[step], effect)) for effect in EFFECTS]  # one after the other: retries meet them, too
    producer = make(proxy.bootstrap)
    for number in range(4):
        with producer.transaction() as txn:
            for i in range(10):
                txn.send(topic, b"%d-%d" % (number, i), partition=i % 3)
            txn.send_offsets({(topic, 0): number + 1}, group)
    for fault in faults:
        fault.assert_fired()
    assert _settled(cluster, topic, 40)
    assert values(cluster, topic) == sorted(b"%d-%d" % (n, i) for n in range(4) for i in range(10))
    assert committed_offset(cluster.bootstrap, group, topic) == 4


def test_transactions_under_random_faults_are_all_or_nothing(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    always = [PRODUCE, END_TXN, TXN_OFFSET_COMMIT]  # what both generations send in every transaction
    apis = [*always, ADD_PARTITIONS_TO_TXN, INIT_PRODUCER_ID]
    chosen = [*(rng.choice(always) for _ in range(10)), *(rng.choice(apis) for _ in range(10))]
    faults = [proxy.add(Rule(api, rng.choice(EFFECTS), nth=rng.randrange(2, 9))) for api in chosen]
    producer = make(proxy.bootstrap)
    expected = []
    for number in range(30):
        block = [b"%d-%d" % (number, i) for i in range(20)]
        producer.begin_transaction()
        for i, value in enumerate(block):
            producer.send(topic, value, partition=i % 3)
        if number % 4 == 3:
            producer.abort_transaction(timeout_ms=30_000)
            continue
        producer.send_offsets_to_transaction({(topic, 1): number}, "random-group")
        producer.commit_transaction(timeout_ms=30_000)
        expected += block
    assert sum(fault.hits for fault in faults) >= 8
    assert _settled(cluster, topic, len(expected))
    assert values(cluster, topic) == sorted(expected)


# --- a commit without an answer ---


def _commit_as_often_as_it_could_not_be_sent(producer: Producer, timeout_s: float) -> None:
    """A machine that stalls for the whole timeout may keep the request from being sent at all."""
    while True:
        try:
            return producer.commit_transaction(timeout_ms=timeout_s * 1000)
        except TimedOutError as error:
            if "nothing was committed" not in str(error):
                raise


def test_a_commit_in_doubt_is_settled_by_the_same_call(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make(proxy.bootstrap, request_timeout_ms=300)
    producer.begin_transaction()
    producer.send(topic, b"in doubt").result(timeout_ms=PATIENCE_S * 1000)
    fault = proxy.add(Rule(END_TXN, Effect.SILENCE_RESPONSE, times=100))
    with pytest.raises(CommitUncertainError, match=r"commit_transaction\(\) again"):
        _commit_as_often_as_it_could_not_be_sent(producer, timeout_s=0.8)
    fault.assert_fired()
    with pytest.raises(IllegalStateError, match="may have happened"):
        producer.abort_transaction()
    with pytest.raises(IllegalStateError):
        producer.send(topic, b"x")
    proxy.clear()
    producer.commit_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(topic, b"next")
    assert _settled(cluster, topic, 2)


def test_a_commit_that_was_never_sent_can_be_aborted(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make(proxy.bootstrap, request_timeout_ms=300)
    producer.begin_transaction()
    producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
    fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=100))
    producer.send(topic, b"not acknowledged")
    with pytest.raises(TimedOutError, match="nothing was committed"):
        producer.commit_transaction(timeout_ms=500)
    fault.assert_fired()
    proxy.clear()
    producer.abort_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(topic, b"next")
    assert _settled(cluster, topic, 1)
    assert values(cluster, topic) == [b"next"]


def test_fenced_after_a_lost_response_the_log_says_that_it_was_committed(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make(proxy.bootstrap)
    producer.begin_transaction()
    producer.send(topic, b"committed").result(timeout_ms=PATIENCE_S * 1000)
    fault = proxy.add(
        Rule(END_TXN, Effect.DROP_RESPONSE, then=make)
    )  # another one takes over before the outcome is requested again
    producer.commit_transaction(timeout_ms=30_000)
    fault.assert_fired()
    with pytest.raises(FencedError):
        producer.begin_transaction()
    assert _settled(cluster, topic, 1)


def test_fenced_after_a_lost_request_the_log_says_that_it_was_aborted(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make(proxy.bootstrap)
    producer.begin_transaction()
    producer.send(topic, b"aborted").result(timeout_ms=PATIENCE_S * 1000)
    fault = proxy.add(Rule(END_TXN, Effect.DROP_REQUEST, then=make))
    with pytest.raises(FencedError, match="aborted, not committed"):
        producer.commit_transaction(timeout_ms=30_000)
    fault.assert_fired()
    assert values(cluster, topic) == []


def test_an_end_that_arrives_late_cannot_end_the_next_transaction(
    cluster: Cluster, topic: str, make: Callable[..., Producer], proxy: Proxy
) -> None:
    """After a repeated end the next transaction has a new epoch, so a copy that is still on its way is refused."""
    producer = make(proxy.bootstrap)
    transaction, coordinator = producer._transactional().transaction, producer._transactional().coordinator
    producer.begin_transaction()
    producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
    before = transaction._identity
    fault = proxy.add(Rule(END_TXN, Effect.DROP_REQUEST))
    producer.commit_transaction(timeout_ms=30_000)
    fault.assert_fired()
    producer.begin_transaction()
    assert transaction._identity is not None
    assert before is not None
    assert transaction._identity.epoch > before.epoch
    producer.send(topic, b"second").result(timeout_ms=PATIENCE_S * 1000)
    with pytest.raises(FencedError):
        run(coordinator.end(before, True, transaction.generation, coordinator.cluster.deadline(PATIENCE_S)))
    producer.commit_transaction(timeout_ms=30_000)
    assert _settled(cluster, topic, 2)


@pytest.mark.full
def test_a_transaction_that_took_too_long_is_aborted_and_its_producer_told(
    cluster: Cluster, topic: str, make: Callable[..., Producer]
) -> None:
    producer = make(transaction_timeout_ms=1000)
    producer.begin_transaction()
    producer.send(topic, b"late", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    until(lambda: read_topic(cluster.bootstrap, topic, "read_uncommitted") and _stable(cluster, topic))
    with pytest.raises((FencedError, AbortableError), match=r"timed out|transaction\.timeout\.ms") as told:
        producer.commit_transaction(timeout_ms=30_000)
    if isinstance(told.value, FencedError):
        producer = make()
    else:  # TV2 can tell a transaction that timed out from one that somebody else took over
        producer.abort_transaction(timeout_ms=30_000)
    with producer.transaction() as txn:
        txn.send(topic, b"again", partition=0)
    eventually(lambda: values(cluster, topic), lambda found: b"again" in found)
    assert b"late" not in values(cluster, topic)


def _stable(cluster: Cluster, topic: str) -> bool:
    """Nothing is open in the topic: what is written now is visible at once."""
    with Producer(bootstrap_servers=cluster.bootstrap) as plain:
        place = plain.send(topic, b"probe", partition=0).result(timeout_ms=PATIENCE_S * 1000)
    return any(row.offset == place.offset for row in read_topic(cluster.bootstrap, topic))


# --- calls in the wrong order ---


def test_calls_in_the_wrong_order_say_what_comes_first(cluster: Cluster, topic: str) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("order")) as producer:
        for call in (producer.begin_transaction, producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(IllegalStateError, match=r"init_transactions\(\) first"):
                call()
        with pytest.raises(IllegalStateError, match=r"begin_transaction\(\) first"):
            producer.send(topic, b"x")
        producer.init_transactions()
        with pytest.raises(IllegalStateError):
            producer.init_transactions()
        with pytest.raises(IllegalStateError, match=r"begin_transaction\(\) first"):
            producer.commit_transaction()
        with pytest.raises(IllegalStateError, match=r"begin_transaction\(\) first"):
            producer.send_offsets_to_transaction({(topic, 0): 1}, "g")
        producer.begin_transaction()
        with pytest.raises(IllegalStateError, match="commit or abort it first"):
            producer.begin_transaction()
        producer.abort_transaction()


def test_an_unreachable_coordinator_is_named_within_the_timeout(cluster: Cluster, proxy: Proxy) -> None:
    fault = proxy.add(Rule(INIT_PRODUCER_ID, Effect.SILENCE_RESPONSE, times=100))
    options = {"transactional_id": cluster.unique("late"), "request_timeout_ms": 1_000}
    with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
        started_s = time.monotonic()
        with pytest.raises(TimedOutError, match="InitProducerId to coordinator of transactional id"):
            producer.init_transactions(timeout_ms=5_000)  # time enough to find the coordinator
        assert time.monotonic() - started_s < STALL_S
        fault.assert_fired()
        proxy.clear()
        producer.init_transactions(timeout_ms=30_000)  # the same call again


def test_a_timeout_that_the_broker_does_not_allow_is_explained(cluster: Cluster) -> None:
    options = {"transactional_id": cluster.unique("long"), "transaction_timeout_ms": 2**31 - 1}
    with (
        Producer(bootstrap_servers=cluster.bootstrap, **options) as producer,
        pytest.raises(KafkaError, match=r"transaction\.max\.timeout\.ms"),
    ):
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
