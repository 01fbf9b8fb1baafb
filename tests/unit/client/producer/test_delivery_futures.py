"""Deliveries are futures: for asyncio, for concurrent.futures, and with callbacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest

from semel.client.errors import AbortableError, FatalError, KafkaError, TimedOutError
from semel.client.producer.batches import ProducerBatch
from semel.client.producer.deliveries import Delivery, DeliveryCondition, TableDelivery, TableShare
from semel.protocol.errors import ErrorCode

PATIENCE_S = 60


class Sending:
    """A sender's part in the life of batches: it finishes them under its lock and runs their callbacks without it."""

    def __init__(self) -> None:
        self.changed = DeliveryCondition()

    def batch(self, count: int = 1) -> ProducerBatch:
        batch = ProducerBatch("t", 0, 0.0, 0.0)
        batch.count = count
        return batch

    def delivery(self, batch: ProducerBatch, index: int = 0) -> Delivery:
        return Delivery(batch, index, 0, self.changed)

    def table(self, *batches: ProducerBatch) -> TableDelivery:
        shares = [TableShare(batch, 0, batch.count, range(batch.count)) for batch in batches]
        return TableDelivery(shares, sum(batch.count for batch in batches), self.changed)

    def finish(self, batch: ProducerBatch, offset: int = 7, error: KafkaError | None = None) -> None:
        with self.changed:
            batch.finish(offset, -1, error)
            self.changed.notify_all()
        callbacks, batch.callbacks = batch.callbacks, None
        for callback in callbacks or ():
            callback(batch)


@pytest.fixture
def sending() -> Sending:
    return Sending()


def test_a_record_that_the_broker_names_has_an_error_of_its_own(sending: Sending) -> None:
    """As with Kafka's producer. The others of its batch failed with it, and can be sent again."""
    whole, first, second = (sending.batch(count) for count in (3, 1, 2))
    whole.halves = [first, second]
    first.parent = second.parent = whole
    second.refused = {1: "no key"}
    sending.finish(first)
    sending.finish(second, error=AbortableError("writing 2 records", ErrorCode.INVALID_RECORD))
    deliveries = [sending.delivery(whole, index) for index in range(3)]
    assert [str(each.exception() or "") for each in deliveries] == [
        "",
        "writing 2 records",
        "writing a record to t-0: the broker returned INVALID_RECORD (no key)",
    ]
    assert [each.is_refused_alone for each in deliveries[1:]] == [False, True]
    with pytest.raises(AbortableError, match="no key"):
        deliveries[2].result()


def in_a_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_wait_returns_when_all_are_done(sending: Sending) -> None:
    first, second = sending.batch(2), sending.batch()
    deliveries = [
        sending.delivery(first, 0),
        sending.delivery(first, 1),
        sending.delivery(second),
        sending.table(second),
    ]
    assert not futures.wait(deliveries, timeout=0).done
    in_a_thread(lambda: [sending.finish(first), sending.finish(second, 9)])
    done, pending = futures.wait(deliveries, timeout=PATIENCE_S)
    assert (done, pending) == (set(deliveries), set())
    assert [delivery.result().offset for delivery in deliveries[:3]] == [7, 8, 9]
    assert futures.wait(deliveries).done == done


def test_wait_ends_with_the_first_that_is_done_or_fails(sending: Sending) -> None:
    batches = [sending.batch() for _ in range(3)]
    deliveries = [sending.delivery(batch) for batch in batches]
    in_a_thread(lambda: sending.finish(batches[1]))
    done, _ = futures.wait(deliveries, PATIENCE_S, futures.FIRST_COMPLETED)
    assert done == {deliveries[1]}
    in_a_thread(lambda: sending.finish(batches[2], -1, FatalError("no")))
    done, pending = futures.wait(deliveries, PATIENCE_S, futures.FIRST_EXCEPTION)
    assert (done, pending) == ({deliveries[1], deliveries[2]}, {deliveries[0]})


def test_as_completed_yields_each_once_in_the_order_of_their_ends(sending: Sending) -> None:
    batches = [sending.batch() for _ in range(4)]
    deliveries = [sending.delivery(batch) for batch in batches]
    sending.finish(batches[3])
    ended = futures.as_completed(deliveries, PATIENCE_S)
    assert next(ended) is deliveries[3]
    for number in (1, 0, 2):
        in_a_thread(lambda number=number: sending.finish(batches[number]))  # type: ignore[misc]
        assert next(ended) is deliveries[number]
    assert list(ended) == []


def test_deliveries_and_other_futures_are_waited_for_together(sending: Sending) -> None:
    batch = sending.batch()
    with futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(sending.finish, batch)
        mixed: list[Any] = [sending.delivery(batch), other]
        assert futures.wait(mixed, PATIENCE_S).done == set(mixed)


def test_threads_that_wait_for_the_deliveries_of_two_producers_do_not_block_each_other() -> None:
    for _ in range(20):
        sendings = [Sending(), Sending()]
        batches = [[one.batch() for _ in range(20)] for one in sendings]
        deliveries = [one.delivery(batch) for one, row in zip(sendings, batches, strict=True) for batch in row]
        found: list[int] = []
        waits = [
            in_a_thread(lambda: found.append(len(futures.wait(deliveries, PATIENCE_S).done)))  # noqa: B023
            for _ in range(4)
        ]
        ends = [
            in_a_thread(lambda one=one, row=row: [one.finish(batch) for batch in row])  # type: ignore[misc]
            for one, row in zip(sendings, batches, strict=True)
        ]
        for thread in [*ends, *waits]:
            thread.join(PATIENCE_S)
        assert found == [40] * 4


def test_cancelling_takes_nothing_back(sending: Sending) -> None:
    batch = sending.batch()
    delivery = sending.delivery(batch)
    assert not delivery.cancel()
    assert not delivery.cancelled()
    assert delivery.running()
    sending.finish(batch)
    assert delivery.result().offset == 7
    assert not delivery.running()
    assert not delivery.cancel()


def test_await_returns_the_place_or_raises_without_blocking_the_loop(sending: Sending) -> None:
    good, bad, table = sending.batch(), sending.batch(), sending.batch(3)

    async def main() -> None:
        waiting = asyncio.gather(
            _awaited(sending.delivery(good)),
            _awaited(sending.delivery(bad)),
            _awaited(sending.table(table)),
            return_exceptions=True,
        )
        await asyncio.sleep(0)  # they wait now, and the loop goes on
        in_a_thread(lambda: [sending.finish(good), sending.finish(bad, -1, FatalError("no")), sending.finish(table, 1)])
        first, second, third = await asyncio.wait_for(waiting, PATIENCE_S)
        assert first.offset == 7
        assert isinstance(second, FatalError)
        assert third[0].record_count == 3
        assert (await sending.delivery(good)).offset == 7, "one that is done"

    asyncio.run(main())


async def _awaited(delivery: Any) -> Any:
    return await delivery


def test_two_loops_wait_for_one_delivery(sending: Sending) -> None:
    batch = sending.batch()
    delivery = sending.delivery(batch)
    found: list[int] = []
    both_wait = threading.Barrier(3)

    async def main() -> None:
        task = asyncio.ensure_future(_awaited(delivery))
        await asyncio.sleep(0)
        await asyncio.to_thread(both_wait.wait, PATIENCE_S)
        found.append((await task).offset)

    threads = [in_a_thread(lambda: asyncio.run(main())) for _ in range(2)]
    both_wait.wait(PATIENCE_S)
    sending.finish(batch)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [7, 7]


def test_a_cancelled_task_and_a_closed_loop_disturb_nobody(sending: Sending) -> None:
    batch = sending.batch()
    delivery = sending.delivery(batch)
    seen: list[Any] = []

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(delivery), 0.01)

    asyncio.run(main())
    delivery.add_done_callback(seen.append)
    sending.finish(batch)
    assert seen == [delivery]
    assert delivery.result().offset == 7


def test_the_callback_of_a_table_comes_once_after_its_last_batch(sending: Sending) -> None:
    first, second = sending.batch(), sending.batch(2)
    delivery = sending.table(first, second, second)
    seen: list[bool] = []
    delivery.add_done_callback(lambda given: seen.append(given.done()))
    sending.finish(second)
    assert seen == []
    sending.finish(first)
    assert seen == [True]
    delivery.add_done_callback(lambda given: seen.append(given.done()))
    assert seen == [True, True], "of one that is done, at once"
    sending.table().add_done_callback(lambda given: seen.append(given.done()))
    assert seen == [True, True, True], "of one without rows, too"


def test_a_table_of_many_batches_is_waited_for_no_longer_than_its_timeout(sending: Sending) -> None:
    """Each batch comes within the timeout; all of them together take much longer."""
    batches = [sending.batch() for _ in range(200)]
    table = sending.table(*batches)
    is_over = threading.Event()

    def finish_slowly() -> None:
        for batch in batches:
            if is_over.wait(0.25):
                return
            sending.finish(batch)

    sender = in_a_thread(finish_slowly)
    with pytest.raises(TimedOutError):
        table.result(timeout_ms=1000)
    done = sum(batch.done for batch in batches)
    is_over.set()
    sender.join(PATIENCE_S)
    assert done < len(batches)


def test_the_error_of_a_batch_does_not_collect_the_frames_of_all_who_got_it(sending: Sending) -> None:
    batch = sending.batch(100)
    sending.finish(batch, error=FatalError("refused"))
    lengths = set()
    for delivery in [*(sending.delivery(batch, index) for index in range(batch.count)), sending.table(batch)]:
        with pytest.raises(FatalError) as caught:
            delivery.result()
        lengths.add(len(caught.traceback))
    assert max(lengths) < 10
