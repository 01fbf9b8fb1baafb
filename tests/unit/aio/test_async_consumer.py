"""`AsyncConsumer`: every record once and in order, whatever is cancelled, frozen, closed or called from elsewhere."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import semel
from semel.aio import AsyncConsumer
from semel.client.consumer import Consumer
from semel.client.errors import ClosedError, ConcurrentUseError, ConfigError, IllegalStateError, TimedOutError
from semel.client.producer import Producer
from semel.client.types import DeserializationError, RebalanceError, TopicPartition
from semel.local.brokers import SemelBroker
from semel.protocol.messages.groups import HEARTBEAT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.event_loop import in_loop, in_other_thread
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S

PATIENCE_MS = PATIENCE_S * 1000
COUNT, PARTITIONS = 300, 3
_numbers = count(1)


@pytest.fixture
def broker(shared_semel_broker: SemelBroker) -> str:
    return shared_semel_broker.bootstrap


@pytest.fixture
def topic(broker: str) -> str:
    name = create_topic(broker, f"aio-consumer-{next(_numbers)}", partitions=PARTITIONS)
    fill(broker, name)
    return name


def fill(broker: str, topic: str, numbers: range = range(COUNT)) -> None:
    with Producer(bootstrap_servers=broker) as producer:
        for number in numbers:
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)


def reading(broker: str, topic: str, **options: Any) -> AsyncConsumer:
    """Reads all of a topic from its begin, without a group unless there is a group_id."""
    consumer = AsyncConsumer(bootstrap_servers=broker, auto_offset_reset="earliest", **options)
    consumer.assign([(topic, number) for number in range(PARTITIONS)])
    return consumer


async def read(consumer: AsyncConsumer, wanted: int = COUNT) -> list[int]:
    found: list[int] = []
    while len(found) < wanted:
        records = await consumer.poll(PATIENCE_MS)
        assert records, f"nothing came any more after {len(found)} records"
        found += [int(record.value) for record in records]
    return found


def assert_once_and_in_order(found: list[int]) -> None:
    assert sorted(found) == list(range(COUNT))
    for partition in range(PARTITIONS):
        of_it = [number for number in found if number % PARTITIONS == partition]
        assert of_it == sorted(of_it)


def test_every_call_of_the_consumer_is_there_with_the_same_parameters() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(function).parameters)
            for name, function in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    by_cancelling = {"end_calls"}  # the task that waits
    assert calls(AsyncConsumer) == {name: call for name, call in calls(Consumer).items() if name not in by_cancelling}
    assert semel.AsyncConsumer is AsyncConsumer


def test_it_reads_positions_and_offsets_as_the_blocking_one(broker: str, topic: str) -> None:
    async def main() -> None:
        async with reading(broker, topic, max_poll_records=50) as consumer:
            places = sorted(consumer.assignment())
            assert_once_and_in_order(await read(consumer))
            assert await consumer.poll(0) == []
            assert [await consumer.position(place) for place in places] == [COUNT // PARTITIONS] * PARTITIONS
            assert set((await consumer.lag()).values()) == {0}
            assert set((await consumer.beginning_offsets(places)).values()) == {0}
            assert set((await consumer.end_offsets(places)).values()) == {COUNT // PARTITIONS}
            found = await consumer.offsets_for_times(dict.fromkeys(places, 0))
            assert [at is not None and at.offset for at in found.values()] == [0] * PARTITIONS
            assert await consumer.partitions_for(topic) == set(range(PARTITIONS))
            consumer.seek(places[0], 98)
            consumer.pause(places[1])
            assert [record.offset for record in await consumer.poll(PATIENCE_MS)] == [98, 99]
            consumer.seek_to_beginning()
            consumer.resume()
            assert_once_and_in_order(await read(consumer))
            assert consumer.metrics().records_consumed_total == 2 * COUNT + 2
        with pytest.raises(ClosedError):
            await consumer.poll(0)
        await consumer.close()

    in_loop(main())


def test_tables_and_deserializers(broker: str, topic: str) -> None:
    async def main() -> None:
        async with reading(broker, topic) as consumer:
            table = await consumer.poll_table(PATIENCE_MS, max_records=10)
            while table.num_rows < COUNT:
                table = pa.concat_tables([table, await consumer.poll_table(PATIENCE_MS)])
            assert_once_and_in_order([int(value.as_py()) for value in table["value"]])
            assert (await consumer.poll_table(0, headers=True)).num_rows == 0
        async with reading(broker, topic, value_deserializer=int) as consumer:
            assert all(isinstance(record.value, int) for record in await consumer.poll(PATIENCE_MS))
        async with reading(broker, topic, value_deserializer=lambda _: 1 / 0) as consumer:
            with pytest.raises(DeserializationError):
                await consumer.poll(PATIENCE_MS)

    in_loop(main())


def test_a_wakeup_is_never_lost(broker: str, topic: str) -> None:
    async def main() -> None:
        async with reading(broker, topic) as consumer:
            await read(consumer)
            consumer.wakeup()  # before the poll
            assert await consumer.poll(PATIENCE_MS) == []
            for wake in (consumer.wakeup, lambda: threading.Thread(target=consumer.wakeup).start()):
                polling = asyncio.create_task(consumer.poll(PATIENCE_MS))
                await asyncio.sleep(0.01)
                wake()  # type: ignore[no-untyped-call]
                assert await polling == []
            consumer.wakeup()
            assert [record async for record in consumer] == []
            fill(broker, topic, range(1))
            assert len(await consumer.poll(PATIENCE_MS)) == 1, "a wakeup ends one poll"

    in_loop(main())


# --- tasks ---
def test_a_second_task_that_polls_is_refused_and_others_may_do_the_rest(broker: str, topic: str) -> None:
    async def main() -> None:
        async with reading(broker, topic, group_id=topic) as consumer:
            await read(consumer)
            polling = asyncio.create_task(consumer.poll(PATIENCE_MS), name="the poller")
            await asyncio.sleep(0.01)
            refused: dict[str, Callable[[], Awaitable[Any]]] = {
                "poll": lambda: consumer.poll(0),
                "poll_table": lambda: consumer.poll_table(0),
                "position": lambda: consumer.position((topic, 0)),
                "unsubscribe": consumer.unsubscribe,
                "close": consumer.close,
            }
            for name, call in refused.items():
                with pytest.raises(ConcurrentUseError, match=r"poll\(\) in task 'the poller'.*wakeup\(\) first"):
                    await call()
                assert not polling.done(), name
            with pytest.raises(ConcurrentUseError):
                consumer.assign([])
            with pytest.raises(ConcurrentUseError):
                _ = [record async for record in consumer]
            await consumer.commit({(topic, 0): 5})
            assert (await consumer.committed())[TopicPartition(topic, 0)].offset == 5
            consumer.pause((topic, 1))
            consumer.seek((topic, 2), 99)
            assert [record.offset for record in await polling] == [99]

    in_loop(main())


def test_whatever_poll_is_cancelled_every_record_comes_once(broker: str, topic: str) -> None:
    random, cancelled = Random(7), 0

    async def main() -> list[int]:
        nonlocal cancelled
        found: list[int] = []
        async with reading(broker, topic, max_poll_records=7, fetch_max_bytes=300) as consumer:
            while len(found) < COUNT:
                limit_s = random.choice([0, 0.0005, 0.002, PATIENCE_S])
                try:
                    async with asyncio.timeout(limit_s):
                        if limit_s == PATIENCE_S or random.random() < 0.5:
                            found += [int(record.value) for record in await consumer.poll(PATIENCE_MS)]
                        else:
                            async for record in consumer:
                                found.append(int(record.value))
                                if random.random() < 0.1:
                                    await asyncio.sleep(random.random() / 500)
                                if len(found) == COUNT:
                                    break
                except TimeoutError:
                    cancelled += 1
        return found

    assert_once_and_in_order(in_loop(main()))
    assert cancelled > 10


def test_a_cancelled_commit_leaves_the_consumer_usable(broker: str, topic: str) -> None:
    async def main() -> None:
        async with reading(broker, topic, group_id=topic) as consumer:
            for number in range(1, 30):
                committing = asyncio.create_task(consumer.commit({(topic, 0): number}))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                committing.cancel()
                await asyncio.wait([committing])
            await consumer.commit({(topic, 0): 50})
            assert (await consumer.committed())[TopicPartition(topic, 0)].offset == 50

    in_loop(main())


def test_automatic_commits_cover_only_what_an_iteration_processed(broker: str, topic: str) -> None:
    async def main() -> None:
        found: list[tuple[int, int]] = []

        async def process() -> None:
            async with reading(broker, topic, group_id=topic) as consumer:
                async for record in consumer:
                    found.append((record.partition, record.offset))
                    if len(found) == 3:
                        raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await process()
        async with reading(broker, topic, group_id=topic) as consumer:
            committed = await consumer.committed()
            assert sum(at.offset for at in committed.values()) == 2
            consumer.commit_async({(topic, 0): 9})
            await consumer.commit({(topic, 1): 9})
            assert (await consumer.committed())[TopicPartition(topic, 0)].offset == 9

    in_loop(main())


# --- groups ---
class Notes(semel.client.RebalanceListener):
    """Notes what happened, after a while; `then` is awaited in each call."""

    def __init__(self, then: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0.01)) -> None:
        self.assigned: list[TopicPartition] = []
        self.calls: list[str] = []
        self._then = then

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.calls.append("assigned")
        await self._then()
        self.assigned = partitions

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.calls.append("revoked")
        await self._then()

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.calls.append("lost")


def test_coroutines_of_a_listener_are_awaited_and_may_call_the_consumer(broker: str, topic: str) -> None:
    async def main() -> None:
        group = {"group_id": topic, "auto_offset_reset": "earliest", "enable_auto_commit": False}
        async with AsyncConsumer(bootstrap_servers=broker, **group) as first:

            async def commit_in_a_task() -> None:
                if first.assignment():
                    await asyncio.wait_for(first.position(min(first.assignment())), PATIENCE_S)
                    await asyncio.wait_for(first.commit(), PATIENCE_S)

            notes = Notes(commit_in_a_task)
            first.subscribe([topic], notes)
            assert len(await read(first)) == COUNT
            assert notes.calls == ["assigned"]
            async with AsyncConsumer(bootstrap_servers=broker, **group) as second:
                second.subscribe([topic])
                while not (first.assignment() and second.assignment()):
                    await asyncio.gather(first.poll(50), second.poll(50))
                assert notes.calls[:3] == ["assigned", "revoked", "assigned"]
                assert first.assignment() | second.assignment() == {TopicPartition(topic, n) for n in range(3)}
                assert sum(at.offset for at in (await second.committed([(topic, n) for n in range(3)])).values()) == 300

    in_loop(main())


def test_a_cancelled_listener_leaves_the_partitions_where_they_belong(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncConsumer(bootstrap_servers=broker, group_id=topic, auto_offset_reset="earliest") as consumer:
            inside = asyncio.Event()

            async def hang() -> None:
                if not inside.is_set():
                    inside.set()
                    await asyncio.Event().wait()

            notes = Notes(hang)
            consumer.subscribe([topic], notes)
            polling = asyncio.create_task(consumer.poll(PATIENCE_MS))
            await inside.wait()
            polling.cancel()
            await asyncio.wait([polling])
            assert_once_and_in_order(await read(consumer))

    in_loop(main())


def test_a_listener_that_raises_raises_out_of_poll(broker: str, topic: str) -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ZeroDivisionError

        async with AsyncConsumer(bootstrap_servers=broker, group_id=topic, auto_offset_reset="earliest") as consumer:
            consumer.subscribe([topic], Notes(fail))
            with pytest.raises(ZeroDivisionError):
                await consumer.poll(PATIENCE_MS)
            assert_once_and_in_order(await read(consumer))
            with pytest.raises(ZeroDivisionError):
                await consumer.unsubscribe()

    in_loop(main())


def test_heartbeats_go_on_while_the_program_works(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            beats = proxy.add(Rule(HEARTBEAT, Effect.PASS, nth=4))
            options = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 100, "auto_offset_reset": "earliest"}
            async with AsyncConsumer(bootstrap_servers=proxy.bootstrap, group_id=topic, **options) as consumer:
                notes = Notes()
                consumer.subscribe([topic], notes)
                await read(consumer)
                assert await asyncio.to_thread(beats.fired.wait, PATIENCE_S), "the program does not poll"
                await consumer.commit()
                assert notes.calls == ["assigned"]

    in_loop(main())


def test_a_program_that_does_not_poll_loses_its_partitions(broker: str, topic: str) -> None:
    async def main() -> None:
        options = {"max_poll_interval_ms": 6100, "session_timeout_ms": 6000, "heartbeat_interval_ms": 100}
        async with AsyncConsumer(bootstrap_servers=broker, group_id=topic, **options) as consumer:
            notes = Notes()
            consumer.subscribe([topic], notes)
            while not consumer.assignment():
                await consumer.poll(100)
            member = consumer._engine.member
            assert member is not None
            while not member.wants_to_join:
                await asyncio.sleep(0.1)
            with pytest.raises(semel.client.CommitFailedError):
                await consumer.commit({(topic, 0): 1})
            while notes.calls[-2:] != ["lost", "assigned"]:
                await consumer.poll(100)

    in_loop(main())


def test_closing_gives_the_partitions_to_others_at_once(broker: str, topic: str) -> None:
    async def main() -> None:
        options = {"group_id": topic, "auto_offset_reset": "earliest", "session_timeout_ms": int(PATIENCE_MS)}
        async with AsyncConsumer(bootstrap_servers=broker, **options) as first:
            first.subscribe([topic])
            assert len(await read(first)) == COUNT
        async with AsyncConsumer(bootstrap_servers=broker, **options) as second:
            second.subscribe([topic])
            while not second.assignment():
                await second.poll(100)
            assert sum([await second.position(place) for place in second.assignment()]) == COUNT

    in_loop(main(), timeout_s=PATIENCE_S / 2)


def test_calls_that_need_a_group_say_so(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncConsumer(bootstrap_servers=broker) as alone:
            with pytest.raises(ConfigError, match=r"group\.id"):
                alone.subscribe([topic])
            with pytest.raises(IllegalStateError, match="nothing to read"):
                await alone.poll(0)
        async with AsyncConsumer(bootstrap_servers=broker, group_id=topic) as consumer:
            consumer.subscribe([topic])
            with pytest.raises(RebalanceError):
                consumer.group_metadata()

    in_loop(main())


# --- loops, processes, brokers that do not respond ---
def test_another_loop_thread_or_process_is_refused(broker: str, topic: str) -> None:
    consumers: list[AsyncConsumer] = []

    async def first() -> None:
        consumer = reading(broker, topic)
        await consumer.poll(PATIENCE_MS)
        consumers.append(consumer)
        with pytest.raises(IllegalStateError, match="another event loop, which runs elsewhere"):
            await asyncio.to_thread(in_other_thread, consumer.poll(0))
        with pytest.raises(IllegalStateError, match="in a coroutine"):
            await asyncio.to_thread(consumer.seek, (topic, 0), 0)
        child = os.fork()
        if not child:
            try:
                consumer.seek((topic, 0), 0)
            except IllegalStateError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        await read(consumer, COUNT - consumer.metrics().records_consumed_total)

    async def second() -> None:
        with pytest.raises(IllegalStateError, match="another event loop, which is closed"):
            await consumers[0].poll(0)
        await consumers[0].close()  # nothing is left to do

    asyncio.run(first())
    asyncio.run(second())


def test_a_loop_that_is_closed_while_requests_are_out(broker: str, topic: str) -> None:
    loop = asyncio.new_event_loop()
    consumer: AsyncConsumer | None = None

    async def start() -> None:
        nonlocal consumer
        consumer = AsyncConsumer(bootstrap_servers=broker, group_id=topic)
        consumer.subscribe([topic])
        await consumer.poll(50)
        loop.create_task(consumer.poll(PATIENCE_MS))  # noqa: RUF006
        await asyncio.sleep(0.05)

    loop.run_until_complete(start())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    assert consumer is not None
    consumer.wakeup()
    in_loop(consumer.close())


def test_every_call_keeps_its_timeout_on_a_frozen_broker(semel_broker: SemelBroker) -> None:
    bootstrap = semel_broker.bootstrap
    topic = create_topic(bootstrap, "aio-frozen", partitions=PARTITIONS)
    place = (topic, 0)

    async def main() -> None:
        async with reading(bootstrap, topic, group_id="frozen", enable_auto_commit=False) as consumer:
            await consumer.poll(100)
            await consumer.commit({place: 1})
            semel_broker.pause()
            try:
                began_s = time.monotonic()
                assert await consumer.poll(200) == []
                calls: list[Callable[[], Awaitable[object]]] = [
                    lambda: consumer.commit({place: 2}, timeout_ms=200),
                    lambda: consumer.committed([place], timeout_ms=200),
                    lambda: consumer.end_offsets([place], timeout_ms=200),
                    lambda: consumer.offsets_for_times({place: 0}, timeout_ms=200),
                    lambda: consumer.lag(timeout_ms=200),
                ]
                for call in calls:
                    with pytest.raises(TimedOutError):
                        await call()
                consumer.seek_to_end(place)
                with pytest.raises(TimedOutError):
                    await consumer.position(place, timeout_ms=200)
                await consumer.close(timeout_ms=500)
                assert time.monotonic() - began_s < PATIENCE_S / 4
            finally:
                semel_broker.resume()

    in_loop(main())


def test_a_consumer_that_is_dropped_is_collected_and_its_connections_are_closed(broker: str, topic: str) -> None:
    async def main() -> None:
        consumer = AsyncConsumer(bootstrap_servers=broker, group_id=topic)
        consumer.subscribe([topic])
        while not consumer.assignment():
            await consumer.poll(100)
        await consumer.poll(100)
        calls, dropped = consumer._engine.calls, weakref.ref(consumer)
        del consumer
        gc.collect()
        assert dropped() is None
        while not calls.closed or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.05)

    in_loop(main())
