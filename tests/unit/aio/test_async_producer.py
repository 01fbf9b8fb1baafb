"""`AsyncProducer`: what was sent is stored once, in order, whatever is cancelled, lost or closed."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
from itertools import count

import pyarrow as pa
import pytest

import semel
from semel.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from semel.client.errors import (
    BufferFullError,
    ClosedError,
    ConfigError,
    IllegalStateError,
    KafkaError,
    RecordTooLargeError,
    TimedOutError,
)
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from semel.protocol.messages.records import PRODUCE
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.event_loop import in_loop, in_other_thread
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, STALL_S, eventually

PATIENCE_MS = PATIENCE_S * 1000
MORE_THAN_SOCKETS_HOLD = 100_000_000  # bytes
_numbers = count(1)


@pytest.fixture
def broker(shared_semel_broker: SemelBroker) -> str:
    return shared_semel_broker.bootstrap


@pytest.fixture
def topic(broker: str) -> str:
    return create_topic(broker, f"aio-producer-{next(_numbers)}")


def values(broker: str, topic: str) -> list[bytes | None]:
    return [row.value for row in read_topic(broker, topic)]


def public_calls(kind: type) -> dict[str, list[str]]:
    """The parameters of each public method."""
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_call_of_the_producer_is_there_with_the_same_parameters() -> None:
    assert public_calls(AsyncProducer) == public_calls(Producer)
    assert semel.AsyncProducer is AsyncProducer


def test_a_delivery_has_the_place_of_its_record(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            first = await producer.send(topic, b"one", key=b"k", timestamp=1234, headers={"h": b"x"})
            assert not first.done()
            with pytest.raises(IllegalStateError, match="await it"):
                first.result()
            place = await first
            assert (place.topic, place.partition, place.offset, place.timestamp) == (topic, 0, 0, 1234)
            assert first.result() == await first
            assert (await (await producer.send(topic, "two"))).offset == 1
            assert await producer.partitions_for(topic) == 1
            assert producer.metrics().record_send_total == 2

    in_loop(main())
    rows = read_topic(broker, topic)
    assert [(row.key, row.value, row.headers) for row in rows] == [(b"k", b"one", [("h", b"x")]), (None, b"two", [])]


def test_keys_go_where_the_blocking_producer_sends_them(broker: str) -> None:
    topic = create_topic(broker, "aio-keys", partitions=5)
    keys = [f"key {number}" for number in range(40)]

    async def main() -> list[int]:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            deliveries = [await producer.send(topic, b"", key=key) for key in keys]
            return [(await delivery).partition for delivery in deliveries]

    with Producer(bootstrap_servers=broker) as producer:
        expected = [producer.send(topic, b"", key=key) for key in keys]
        assert in_loop(main()) == [delivery.result(timeout_ms=PATIENCE_MS).partition for delivery in expected]


def test_rows_of_many_tasks_stay_in_the_order_of_each_task(broker: str, topic: str) -> None:
    async def write(producer: AsyncProducer, task: int) -> None:
        for number in range(200):
            await producer.send(topic, f"{task}:{number}")

    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, batch_size=2000, linger_ms=1) as producer:
            await asyncio.gather(*(write(producer, task) for task in range(10)))
            await producer.flush(timeout_ms=PATIENCE_MS)
            assert producer.metrics().record_send_total == 2000

    in_loop(main())
    stored = [value.decode().split(":") for value in values(broker, topic) if value is not None]
    for task in range(10):
        assert [int(number) for of, number in stored if int(of) == task] == list(range(200))


@pytest.mark.parametrize("rows", [3, 20_000])
def test_a_table_is_sent_whole(broker: str, topic: str, rows: int) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            table = pa.table({"value": [f"{number:0100}" for number in range(rows)]})
            delivery = await producer.send_table(topic, table)
            runs = await delivery
            assert sum(run.record_count for run in runs) == rows
            assert sorted(delivery.places()[1]) == list(range(rows))

    in_loop(main())


def test_the_loop_goes_on_while_a_program_only_sends(broker: str, topic: str) -> None:
    async def main() -> None:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with AsyncProducer(bootstrap_servers=broker, batch_size=10_000) as producer:
            counting = asyncio.create_task(count_turns())
            for _ in range(20_000):
                await producer.send(topic, b"x" * 100)
            assert turns > 100
            assert producer.metrics().request_total > 0, "it sends while the program sends"
            counting.cancel()

    in_loop(main())


def test_a_full_memory_is_waited_for(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, buffer_memory=10_000, batch_size=2000) as producer:
            for number in range(1000):
                await producer.send(topic, f"{number:0100}")
                assert producer.metrics().buffer_used_bytes <= 10_000

    in_loop(main())
    assert values(broker, topic) == [f"{number:0100}".encode() for number in range(1000)]


def test_a_send_that_is_cancelled_while_memory_is_full_is_not_sent(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            fault = proxy.add(Rule(PRODUCE, Effect.DELAY_RESPONSE, delay_ms=3000))
            async with AsyncProducer(
                bootstrap_servers=proxy.bootstrap, buffer_memory=1000, linger_ms=0, max_block_ms=100
            ) as producer:
                await producer.partitions_for(topic, timeout_ms=PATIENCE_MS)  # not within max.block.ms
                delivery = await producer.send(topic, b"x" * 800)
                await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
                waiting = asyncio.create_task(producer.send(topic, b"y" * 800))
                await asyncio.sleep(0)  # it waits for memory, for less than max.block.ms
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                with pytest.raises(BufferFullError, match=r"buffer\.memory is full"):
                    await producer.send(topic, b"z" * 800)
                await delivery

    in_loop(main())
    assert values(broker, topic) == [b"x" * 800]


def test_cancelling_who_waits_for_a_delivery_does_not_take_the_record_back(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, linger_ms=100) as producer:
            delivery = await producer.send(topic, b"x")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await delivery
            assert (await delivery).offset == 0
            await producer.send(topic, b"y")
            with pytest.raises(TimedOutError):
                await producer.flush(timeout_ms=0)

    in_loop(main())
    assert values(broker, topic) == [b"x", b"y"]


@pytest.mark.parametrize("effect", [Effect.DROP_RESPONSE, Effect.DROP_REQUEST, Effect.TRUNCATE_RESPONSE])
def test_a_batch_whose_response_is_lost_is_stored_once(broker: str, topic: str, effect: Effect) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            async with AsyncProducer(bootstrap_servers=proxy.bootstrap, linger_ms=0) as producer:
                fault = proxy.add(Rule(PRODUCE, effect, nth=2))
                for number in range(10):
                    await (await producer.send(topic, str(number)))
                fault.assert_fired()

    in_loop(main())
    assert values(broker, topic) == [str(number).encode() for number in range(10)]


def test_without_acknowledgements_a_record_is_done_when_it_is_written(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, acks=0) as producer:
            assert (await (await producer.send(topic, b"x"))).offset == -1

    in_loop(main())
    eventually(lambda: values(broker, topic), lambda found: found == [b"x"])


def test_without_acknowledgements_nothing_is_lost_at_close_while_the_broker_does_not_read(
    semel_broker: SemelBroker,
) -> None:
    """What the transport of asyncio holds is not written yet."""
    bootstrap = semel_broker.bootstrap
    topic = create_topic(bootstrap, "aio-unacked")
    options = {"acks": 0, "buffer_memory": 2_000_000, "max_block_ms": 1000, "send_buffer_bytes": 65536}

    async def main() -> int:
        producer = AsyncProducer(bootstrap_servers=bootstrap, **options)
        await (await producer.send(topic, b"first"))
        semel_broker.pause()
        sent = 1 + await _fill(producer, topic)
        assert producer.metrics().buffer_used_bytes <= 2_000_000
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        assert not closing.done()
        semel_broker.resume()
        await closing
        return sent

    sent = in_loop(main())
    eventually(lambda: len(values(bootstrap, topic)), lambda found: found == sent)


async def _fill(producer: AsyncProducer, topic: str) -> int:
    """Sends until memory is full; how many records went in."""
    for sent in range(MORE_THAN_SOCKETS_HOLD // 10_000):
        try:
            await producer.send(topic, bytes(10_000))
        except BufferFullError:
            return sent
    raise AssertionError("buffer.memory was never full")


def test_a_broker_that_is_killed_and_started_again(semel_broker: SemelBroker) -> None:
    topic = create_topic(semel_broker.bootstrap, "aio-killed")

    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=semel_broker.bootstrap, linger_ms=0) as producer:
            deliveries = []
            for number in range(300):
                deliveries.append(await producer.send(topic, str(number)))
                if number == 100:
                    await deliveries[-1]
                    await asyncio.to_thread(semel_broker.kill)
                if number == 200:
                    await asyncio.to_thread(semel_broker.start)
            for delivery in deliveries:
                await delivery

    in_loop(main())
    assert values(semel_broker.bootstrap, topic) == [str(number).encode() for number in range(300)]


def test_what_can_never_be_sent_is_refused_at_once(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            with pytest.raises(RecordTooLargeError):
                await producer.send(topic, b"x" * 2_000_000)
            for partition in (7, -1, 0.0, "0"):
                with pytest.raises(ConfigError, match=f"has no partition {partition!r}; it has 0 to 0"):
                    await producer.send(topic, b"x", partition=partition)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="bytes, text or None"):
                await producer.send(topic, 1)
            with pytest.raises(IllegalStateError, match=r"transactional\.id"):
                producer.transaction()
            with pytest.raises(TypeError, match="timeout_ms=5000 instead of"):
                await producer.flush(5)  # type: ignore[call-arg]

    in_loop(main())


# --- the end ---
def test_close_sends_what_is_left_and_refuses_what_comes(broker: str, topic: str) -> None:
    async def main() -> None:
        producer = AsyncProducer(bootstrap_servers=broker, linger_ms=60_000)
        delivery = await producer.send(topic, b"x")
        await producer.close()
        await producer.close()
        assert delivery.result().offset == 0
        with pytest.raises(ClosedError):
            await producer.send(topic, b"y")

    in_loop(main())


def test_close_with_a_timeout_fails_what_has_no_response(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE))
            producer = AsyncProducer(bootstrap_servers=proxy.bootstrap, linger_ms=0)
            delivery = await producer.send(topic, b"x")
            waiting = asyncio.ensure_future(delivery)
            await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
            await producer.close(timeout_ms=100)
            with pytest.raises(ClosedError, match="before this record was acknowledged"):
                await waiting

    in_loop(main())


def test_a_producer_that_is_forgotten_sends_what_it_has_and_ends(broker: str, topic: str) -> None:
    async def main() -> None:
        producer = AsyncProducer(bootstrap_servers=broker, linger_ms=60_000)
        delivery = await producer.send(topic, b"x")
        task = producer._sender.task
        assert task is not None
        del producer
        gc.collect()
        assert (await delivery).offset == 0
        await task

    in_loop(main())


def test_a_loop_that_ends_with_an_open_producer_leaves_no_task_and_no_warning(
    broker: str, topic: str, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(producer: AsyncProducer) -> object:
        return await producer.send(topic, b"x" * 100)

    for end in ("run", "close"):
        producer = AsyncProducer(bootstrap_servers=broker, linger_ms=60_000)
        if end == "run":
            delivery = asyncio.run(main(producer))
            with pytest.raises(ClosedError):
                delivery.result()  # type: ignore[attr-defined]
        else:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(main(producer))
            loop.close()
        in_loop(producer.close())
        del producer
        gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
    assert "Task was destroyed" not in caplog.text
    assert "close the producer first" in caplog.text


def test_a_task_that_waits_for_memory_ends_when_the_producer_is_closed(broker: str, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker) as proxy:
            fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE))
            producer = AsyncProducer(bootstrap_servers=proxy.bootstrap, linger_ms=0, buffer_memory=1000)
            await producer.send(topic, b"x" * 800)
            await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
            waiting = asyncio.create_task(producer.send(topic, b"y" * 800))
            await producer.close(timeout_ms=50)
            with pytest.raises(ClosedError):
                await waiting

    in_loop(main())


def test_a_forked_child_is_refused_and_does_nothing_to_its_parent(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, linger_ms=0) as producer:
            await (await producer.send(topic, b"before"))
            child = os.fork()
            if child == 0:
                try:
                    with pytest.raises(IllegalStateError, match="before the process was forked"):
                        producer._check_open()
                    assert producer._guard.is_over
                    producer._cluster.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
            await (await producer.send(topic, b"after"))

    in_loop(main())
    assert values(broker, topic) == [b"before", b"after"]


# --- event loops ---
def test_another_event_loop_is_refused(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, linger_ms=60_000) as producer:  # nothing is delivered yet
            await producer.send(topic, b"x")
            for call in (producer.send(topic, b"y"), producer.flush(), producer.close()):
                with pytest.raises(IllegalStateError, match="another event loop, which runs elsewhere"):
                    await asyncio.to_thread(in_other_thread, call)
            delivery = await producer.send(topic, b"z", timestamp=1)

            async def wait() -> None:
                await delivery

            with pytest.raises(IllegalStateError, match="another event loop"):
                await asyncio.to_thread(in_other_thread, wait())

    in_loop(main())
    assert values(broker, topic) == [b"x", b"z"]


def test_two_event_loops_write_with_a_producer_each(broker: str, topic: str) -> None:
    async def write(value: str) -> None:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            for _ in range(100):
                await producer.send(topic, value)

    async def main() -> None:
        await asyncio.gather(write("here"), asyncio.to_thread(in_other_thread, write("there")))

    in_loop(main())
    assert sorted(values(broker, topic)) == [b"here"] * 100 + [b"there"] * 100  # type: ignore[type-var]


def test_asyncio_takes_deliveries_for_futures_of_its_own(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker) as producer:
            deliveries = [await producer.send(topic, b"%d" % number) for number in range(50)]
            tasks = len(asyncio.all_tasks())
            gathering = asyncio.gather(*deliveries)
            assert len(asyncio.all_tasks()) == tasks, "no task for each of them"
            assert [place.offset for place in await gathering] == list(range(50))
            done, pending = await asyncio.wait([await producer.send(topic, b"50"), deliveries[0]])
            assert (len(done), len(pending)) == (2, 0)
            assert (await asyncio.wait_for(await producer.send(topic, b"51"), PATIENCE_S)).offset == 51
            assert (await asyncio.shield(await producer.send(topic, b"52"))).offset == 52
            called: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            delivery = await producer.send(topic, b"53")
            delivery.add_done_callback(called.set_exception)
            assert delivery.remove_done_callback(called.set_exception) == 1
            delivery.add_done_callback(called.set_result)
            assert await called is delivery

    in_loop(main())


def test_what_waits_for_deliveries_can_be_cancelled_and_their_records_are_sent(
    semel_broker: SemelBroker,
) -> None:
    bootstrap = semel_broker.bootstrap
    topic = create_topic(bootstrap, "aio-gathered")

    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=bootstrap) as producer:
            await (await producer.send(topic, b"first"))
            semel_broker.pause()
            try:
                gathered, waited = await producer.send(topic, b"gathered"), await producer.send(topic, b"waited for")
                awaited = await producer.send(topic, b"awaited")
                gathering = asyncio.gather(gathered)
                asyncio.get_running_loop().call_later(0.05, gathering.cancel)
                with pytest.raises(asyncio.CancelledError):
                    await gathering
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(waited, 0.05)
                assert waited.cancelled() == (sys.version_info < (3, 12)), "wait_for cancels tasks only since then"
                for delivery in [gathered, waited] if waited.cancelled() else [gathered]:
                    assert delivery.cancelled()
                    with pytest.raises(asyncio.CancelledError):
                        delivery.result()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await awaited
            finally:
                semel_broker.resume()
            assert (await awaited).offset == 3, "only the task that waited was cancelled"
            assert not awaited.cancel()

    in_loop(main())
    assert values(bootstrap, topic) == [b"first", b"gathered", b"waited for", b"awaited"]


def test_a_callback_is_called_although_another_was_removed_before(broker: str, topic: str) -> None:
    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, linger_ms=60_000) as producer:
            delivery = await producer.send(topic, b"x")
            assert delivery.remove_done_callback(print) == 0
            called = asyncio.Event()
            delivery.add_done_callback(lambda _: called.set())
            await producer.flush()
            await called.wait()

    in_loop(main(), 30)


def test_many_sends_to_a_topic_that_is_not_there_wait_together(broker: str) -> None:
    """Each for max.block.ms, not one after the other."""
    options = {"max_block_ms": 1000, "allow_auto_create_topics": False}

    async def main() -> None:
        async with AsyncProducer(bootstrap_servers=broker, **options) as producer:
            sends = [asyncio.create_task(producer.send("aio-not-there", b"x")) for _ in range(100)]
            done, waiting = await asyncio.wait(sends, timeout=STALL_S)
            for each in waiting:
                each.cancel()
            assert not waiting
            assert {type(each.exception()) for each in done} == {TimedOutError}
            assert all("aio-not-there" in str(each.exception()) for each in done)

    in_loop(main())


def test_what_was_never_closed_leaves_no_connection(broker: str, topic: str) -> None:
    def connections() -> int:
        transports = [each for each in gc.get_objects() if isinstance(each, asyncio.Transport)]
        return sum(not transport.is_closing() for transport in transports)

    async def main() -> None:
        before = connections()
        await AsyncProducer(bootstrap_servers=broker).partitions_for(topic)
        await AsyncAdmin(bootstrap_servers=broker).list_topics()
        await AsyncConsumer(bootstrap_servers=broker).partitions_for(topic)
        async with asyncio.timeout(PATIENCE_S):
            while connections() > before:
                gc.collect()
                await asyncio.sleep(0.01)

    in_loop(main())


def test_what_asyncio_does_with_cancelled_and_failed_deliveries_ends(semel_broker: SemelBroker) -> None:
    """It reads private attributes of futures then; one that is missing leaves `gather` waiting for ever."""
    bootstrap, complaints = semel_broker.bootstrap, []
    topic = create_topic(bootstrap, "aio-failed")
    options = {"request_timeout_ms": 100, "delivery_timeout_ms": 300}

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["exception"]))
        async with AsyncProducer(bootstrap_servers=bootstrap, **options) as producer:
            await producer.partitions_for(topic)
            semel_broker.pause()
            try:
                failing, *cancelled = [await producer.send(topic, b"lost") for _ in range(3)]
                shielding = asyncio.shield(failing)
                gathering = asyncio.gather(*cancelled, return_exceptions=True)
                asyncio.get_running_loop().call_soon(gathering.cancel)
                with pytest.raises(asyncio.CancelledError):
                    async with asyncio.timeout(PATIENCE_S):
                        await gathering
                shielding.cancel()
                await asyncio.wait([failing])
                assert failing.exception() is not None
            finally:
                semel_broker.resume()

    in_loop(main())
    assert [type(error) for error in complaints if not isinstance(error, KafkaError)] == []
