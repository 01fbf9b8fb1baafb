"""Transactions of an `AsyncProducer`: all or nothing, whatever is cancelled, lost or killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from random import Random

import pyarrow as pa
import pytest

from semel.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FencedError,
    IllegalStateError,
    KafkaError,
    RetriableError,
)
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.types import RebalanceError, TopicPartition
from semel.local.brokers import SemelBroker
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN, TXN_OFFSET_COMMIT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.event_loop import in_loop
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually

PATIENCE_MS = PATIENCE_S * 1000
HELD_MS = 5_000  # a response that must not come before a task is cancelled, on a busy machine
_numbers = count(1)


@pytest.fixture
def broker(shared_semel_broker: SemelBroker) -> str:
    return shared_semel_broker.bootstrap


@pytest.fixture
def topic(broker: str) -> str:
    return create_topic(broker, f"aio-transactions-{next(_numbers)}")


@pytest.fixture(params=[1, 2], ids=["TV1", "TV2"])
def generation(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def committed(broker: str, topic: str, *values: bytes) -> None:
    eventually(lambda: [row.value for row in read_topic(broker, topic)], lambda found: found == [*values])


def transactional(broker: str, topic: str, generation: int = 2, **options: object) -> AsyncProducer:
    return AsyncProducer(
        bootstrap_servers=broker, transactional_id=topic, transaction_version_max=generation, linger_ms=0, **options
    )


def test_a_block_commits_and_one_that_raises_aborts(broker: str, topic: str, generation: int) -> None:
    async def fail(producer: AsyncProducer) -> None:
        async with producer.transaction() as txn:
            await txn.send(topic, b"aborted")
            await (await txn.send(topic, b"aborted, too"))
            await txn.send(topic, b"aborted before it was sent")
            raise ZeroDivisionError

    async def main() -> None:
        async with transactional(broker, topic, generation) as producer:
            await producer.init_transactions()
            for number in range(3):
                async with producer.transaction() as txn:
                    await txn.send(topic, f"{number}a")
                    await txn.send(topic, f"{number}b")
                assert producer.metrics().transaction_open_ms is None
                with pytest.raises(ZeroDivisionError):
                    await fail(producer)
            with pytest.raises(IllegalStateError, match="begin_transaction"):
                await producer.send(topic, b"outside")

    in_loop(main())
    committed(broker, topic, *(f"{number}{part}".encode() for number in range(3) for part in "ab"))


def test_a_record_that_waited_does_not_get_into_the_next_transaction(broker: str, topic: str, generation: int) -> None:
    async def main() -> None:
        waiting: list[asyncio.Task[object]] = []

        async def attempt(producer: AsyncProducer) -> None:
            async with producer.transaction() as txn:
                waiting.append(asyncio.create_task(txn.send(topic, b"of the aborted one")))
                waiting.append(asyncio.create_task(txn.send_table(topic, pa.table({"value": [b"of the aborted one"]}))))
                await asyncio.sleep(0)  # both look the topic up
                raise ZeroDivisionError

        async with transactional(broker, topic, generation) as producer:
            await producer.init_transactions()
            with pytest.raises(ZeroDivisionError):
                await attempt(producer)
            async with producer.transaction() as txn:
                await txn.send(topic, b"committed")
                for task in waiting:
                    with pytest.raises(IllegalStateError, match="has ended"):
                        await task

    in_loop(main())
    committed(broker, topic, b"committed")


def test_a_transaction_cannot_be_used_after_its_block(broker: str, topic: str) -> None:
    async def main() -> None:
        async with transactional(broker, topic) as producer:
            await producer.init_transactions()
            async with producer.transaction() as first:
                await first.send(topic, b"1")
            async with producer.transaction() as second:
                with pytest.raises(IllegalStateError, match="has ended"):
                    await first.send(topic, b"late")
                with pytest.raises(IllegalStateError, match="has ended"):
                    await first.send_table(topic, pa.table({"value": [b"late"]}))
                with pytest.raises(IllegalStateError, match="has ended"):
                    await first.send_offsets({TopicPartition(topic, 0): 1}, "late")
                await second.send(topic, b"2")

    in_loop(main())
    committed(broker, topic, b"1", b"2")


def test_offsets_are_committed_with_the_transaction(broker: str, topic: str, generation: int) -> None:
    place = TopicPartition(topic, 0)

    async def main() -> None:
        async with transactional(broker, topic, generation) as producer, AsyncAdmin(bootstrap_servers=broker) as admin:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send_offsets_to_transaction({place: 7}, f"group of {topic}")
            await producer.abort_transaction()
            assert await admin.group_offsets(f"group of {topic}") == {}
            async with producer.transaction() as txn:
                await txn.send(topic, b"x")
                await txn.send_offsets({place: 8}, f"group of {topic}")
        async with AsyncAdmin(bootstrap_servers=broker) as admin:
            while (await admin.group_offsets(f"group of {topic}")).get(place) is None:
                await asyncio.sleep(0.01)
            assert (await admin.group_offsets(f"group of {topic}"))[place].offset == 8

    in_loop(main())
    committed(broker, topic, b"x")


def test_a_second_producer_with_the_same_id_fences_the_first(broker: str, topic: str) -> None:
    async def main() -> None:
        async with transactional(broker, topic) as first, transactional(broker, topic) as second:
            await first.init_transactions()
            await first.begin_transaction()
            await (await first.send(topic, b"of the first"))
            await second.init_transactions()
            with pytest.raises(FencedError):
                await first.commit_transaction()
            async with second.transaction() as txn:
                await txn.send(topic, b"of the second")

    in_loop(main())
    committed(broker, topic, b"of the second")


@pytest.mark.parametrize("moment", ["between the records", "between records and commit", "before the end"])
def test_a_broker_that_is_killed_in_the_middle_of_a_transaction(semel_broker: SemelBroker, moment: str) -> None:
    topic = create_topic(semel_broker.bootstrap, "aio-killed")

    async def restart() -> None:
        await asyncio.to_thread(semel_broker.kill)
        await asyncio.to_thread(semel_broker.start)

    async def main() -> None:
        async with transactional(semel_broker.bootstrap, topic) as producer:
            await producer.init_transactions(timeout_ms=PATIENCE_MS)
            await producer.begin_transaction()
            deliveries = [await producer.send(topic, b"0")]
            if moment == "between the records":
                await deliveries[0]
                await asyncio.to_thread(semel_broker.kill)
            deliveries += [await producer.send(topic, str(number)) for number in range(1, 10)]
            if moment == "between the records":
                await asyncio.to_thread(semel_broker.start)
            if moment == "between records and commit":
                await deliveries[-1]
                await restart()
            commit = asyncio.create_task(producer.commit_transaction(timeout_ms=PATIENCE_MS))
            if moment == "before the end":
                while producer._transactions.state is not ProducerTxnState.COMMITTING:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                await restart()
            await commit
            assert [(await delivery).offset for delivery in deliveries] == list(range(10))
            async with producer.transaction() as txn:
                await txn.send(topic, b"next")

    in_loop(main())
    committed(semel_broker.bootstrap, topic, *(str(number).encode() for number in range(10)), b"next")


@pytest.mark.parametrize("effect", [Effect.DROP_RESPONSE, Effect.DROP_REQUEST])
def test_a_commit_whose_response_is_lost_is_settled(broker: str, topic: str, effect: Effect, generation: int) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with transactional(proxy.bootstrap, topic, generation) as producer:
                await producer.init_transactions()
                fault = proxy.add(Rule(END_TXN, effect))
                for value in (b"first", b"second"):
                    async with producer.transaction() as txn:
                        await txn.send(topic, value)
                fault.assert_fired()

    in_loop(main())
    committed(broker, topic, b"first", b"second")


# --- cancellation ---
def test_a_block_that_is_cancelled_aborts(broker: str, topic: str) -> None:
    async def main() -> None:
        async with transactional(broker, topic) as producer:
            await producer.init_transactions()

            async def write() -> None:
                async with producer.transaction() as txn:
                    await (await txn.send(topic, b"cancelled"))
                    await asyncio.Event().wait()

            writing = asyncio.create_task(write())
            while not producer.metrics().record_send_total:
                await asyncio.sleep(0.001)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            async with producer.transaction() as txn:
                await txn.send(topic, b"next")

    in_loop(main())
    committed(broker, topic, b"next")


def test_a_commit_that_is_cancelled_before_its_records_are_stored_commits_nothing(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with transactional(proxy.bootstrap, topic) as producer:
                await producer.init_transactions()
                fault = proxy.add(Rule(PRODUCE, Effect.DELAY_RESPONSE, delay_ms=HELD_MS))
                await producer.begin_transaction()
                await producer.send(topic, b"x")
                commit = asyncio.create_task(producer.commit_transaction())
                await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
                commit.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await commit
                assert END_TXN.key not in proxy.seen
                await producer.send(topic, b"y")  # the transaction goes on
                await producer.commit_transaction()

    in_loop(main())
    committed(broker, topic, b"x", b"y")


def test_a_commit_that_is_cancelled_when_it_may_have_happened_is_settled_by_the_next_one(
    broker: str, topic: str, generation: int
) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with transactional(proxy.bootstrap, topic, generation) as producer:
                await producer.init_transactions()
                fault = proxy.add(Rule(END_TXN, Effect.DELAY_RESPONSE, delay_ms=HELD_MS))

                async def write() -> None:
                    async with producer.transaction() as txn:
                        await txn.send(topic, b"x")

                writing = asyncio.create_task(write())
                await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing
                assert producer._transactions.state is ProducerTxnState.COMMITTING  # type: ignore[union-attr]
                await producer.commit_transaction()
                async with producer.transaction() as txn:
                    await txn.send(topic, b"next")

    in_loop(main())
    committed(broker, topic, b"x", b"next")


def test_a_commit_without_a_response_in_time_can_be_called_again(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with transactional(proxy.bootstrap, topic, request_timeout_ms=300) as producer:
                await producer.init_transactions(timeout_ms=PATIENCE_MS)
                fault = proxy.add(Rule(END_TXN, Effect.SILENCE_RESPONSE, times=1000))
                await producer.begin_transaction()
                await (await producer.send(topic, b"x"))
                with pytest.raises(CommitUncertainError):
                    await producer.commit_transaction(timeout_ms=1000)
                fault.assert_fired()
                proxy.clear()
                await producer.commit_transaction(timeout_ms=PATIENCE_MS)

    in_loop(main())
    committed(broker, topic, b"x")


def test_the_end_of_a_transaction_waits_for_offsets_whose_caller_was_cancelled(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with transactional(proxy.bootstrap, topic) as producer:
                await producer.init_transactions()
                fault = proxy.add(Rule(TXN_OFFSET_COMMIT, Effect.DELAY_REQUEST, delay_ms=HELD_MS))
                await producer.begin_transaction()
                adding = asyncio.create_task(producer.send_offsets_to_transaction({(topic, 0): 5}, f"g-{topic}"))
                await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
                adding.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await adding
                await producer.commit_transaction()
        async with AsyncAdmin(bootstrap_servers=broker) as admin:
            while (await admin.group_offsets(f"g-{topic}")).get(TopicPartition(topic, 0)) is None:
                await asyncio.sleep(0.01)

    in_loop(main())


def test_init_transactions_that_is_cancelled_can_be_called_again(broker: str, topic: str) -> None:
    async def main() -> None:
        async with transactional(broker, topic) as producer:
            steps = 0
            while True:  # wherever it is, until it is over before it can be cancelled
                steps += 1 + steps // 8
                init = asyncio.create_task(producer.init_transactions())
                for _ in range(steps):
                    await asyncio.sleep(0)
                init.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await init
                if not init.cancelled():
                    break
            assert steps > 3, "it was never cancelled while a request was out"
            async with producer.transaction() as txn:
                await txn.send(topic, b"x")

    in_loop(main())
    committed(broker, topic, b"x")


def test_a_record_that_fails_fails_its_transaction(broker: str) -> None:
    topic = create_topic(broker, f"aio-transactions-{next(_numbers)}", max_message_bytes="1000")

    async def main() -> None:
        async with transactional(broker, topic) as producer:
            await producer.init_transactions()
            with pytest.raises(AbortableError):
                async with producer.transaction() as txn:
                    await txn.send(topic, b"x" * 5000)
            async with producer.transaction() as txn:
                await txn.send(topic, b"small")

    in_loop(main())
    committed(broker, topic, b"small")


def test_close_aborts_an_open_transaction(broker: str, topic: str) -> None:
    async def main() -> None:
        async with transactional(broker, topic) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(topic, b"left open"))
        async with transactional(broker, topic) as producer:
            await producer.init_transactions()
            async with producer.transaction() as txn:
                await txn.send(topic, b"next")

    in_loop(main())
    committed(broker, topic, b"next")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_cancellation_hits_each_transaction_is_there_once_or_not_at_all(
    broker: str, topic: str, generation: int, seed: int
) -> None:
    """A writer is cancelled at random moments, then does what the documentation says: commit again if the commit may
    have been sent, else abort."""
    random = Random(seed)
    expected: list[bytes] = []

    async def write(producer: AsyncProducer, number: int) -> None:
        await producer.begin_transaction()
        await producer.send(topic, f"{number}a")
        await (await producer.send(topic, f"{number}b"))
        await producer.send_offsets_to_transaction({(topic, 0): number}, f"cancelled-{topic}")
        await producer.send(topic, f"{number}c")
        await producer.commit_transaction()

    async def settled(producer: AsyncProducer) -> bool:
        """Whether the transaction was committed."""
        state = producer._transactions.state  # type: ignore[union-attr]
        if state is ProducerTxnState.COMMITTING:
            await producer.commit_transaction()
            return True
        if state is not ProducerTxnState.READY:
            await producer.abort_transaction()
        return False

    async def main() -> int:
        cancelled = 0
        async with transactional(broker, topic, generation) as producer:
            await producer.init_transactions()
            for number in range(40):
                writing = asyncio.create_task(write(producer, number))
                await asyncio.wait([writing], timeout=random.random() * 0.03)
                writing.cancel()
                try:
                    await writing
                    is_committed = True
                except asyncio.CancelledError:
                    cancelled += 1
                    is_committed = await settled(producer)
                if is_committed:
                    expected.extend(f"{number}{part}".encode() for part in "abc")
        return cancelled

    assert in_loop(main()), "no task was cancelled"
    committed(broker, topic, *expected)


def test_consume_process_produce_is_exactly_once_though_the_broker_is_killed(
    semel_broker: SemelBroker, generation: int
) -> None:
    """`AsyncConsumer` and `AsyncProducer` in one loop; the broker is killed and started again at any moment of it."""
    bootstrap, count_, random = semel_broker.bootstrap, 1000, Random(generation)
    source = create_topic(bootstrap, "aio-source", partitions=2)
    output = create_topic(bootstrap, "aio-output", partitions=2)

    async def fill() -> None:
        async with AsyncProducer(bootstrap_servers=bootstrap) as producer:
            for number in range(count_):
                await producer.send(source, b"%d" % number, partition=number % 2)

    async def kill_now_and_then() -> None:
        while len(done_at_kills) < 4:
            await asyncio.sleep(0.1 + random.random() / 5)
            done_at_kills.append(done)
            await asyncio.to_thread(semel_broker.kill)
            await asyncio.to_thread(semel_broker.start)

    async def one_unit(consumer: AsyncConsumer, producer: AsyncProducer) -> None:
        nonlocal done
        records = await consumer.poll(PATIENCE_MS)
        async with producer.transaction() as txn:
            for record in records:
                await txn.send(output, record.value, partition=record.partition)
            await asyncio.sleep(random.random() / 50)
            await txn.send_offsets(consumer.consumed(), consumer.group_metadata())
        done += len(records)

    async def work() -> None:
        """A worker as a program would have it: after an error that it cannot go on from, it starts again."""
        while True:
            consumer = AsyncConsumer(
                bootstrap_servers=bootstrap,
                group_id="aio-loop",
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                max_poll_records=10,
                session_timeout_ms=6000,
            )
            async with consumer, transactional(bootstrap, "aio-loop", generation) as producer:
                consumer.subscribe([source])
                try:
                    await producer.init_transactions()
                    while True:
                        try:
                            await one_unit(consumer, producer)
                        except (AbortableError, RetriableError, RebalanceError):
                            consumer.seek_to_committed()
                except KafkaError:
                    continue

    done, done_at_kills = 0, list[int]()

    async def main() -> None:
        await fill()
        working = asyncio.create_task(work())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_now_and_then())
        while len(await asyncio.to_thread(read_topic, bootstrap, output)) < count_:
            assert not working.done()
            await asyncio.sleep(0.2)
        working.cancel()  # it waits for more
        await asyncio.wait([working])

    in_loop(main())
    assert done_at_kills[0] < count_ // 2, "the broker was to be killed in the middle of the work"
    assert sorted(int(row.value or b"") for row in read_topic(bootstrap, output)) == list(range(count_))
