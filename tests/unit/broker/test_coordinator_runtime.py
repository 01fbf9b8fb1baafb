"""The runtime of the coordinators: what is durable is replayed, in the order of the log; nothing else changes state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import pytest

from semel.broker import coordinator_runtime
from semel.broker.coordinator_runtime import CoordinatorRuntime, Outcome, client_error
from semel.protocol.batch import BatchHeader, read_header
from semel.protocol.errors import ErrorCode as E
from semel.protocol.rows import Record, decode_batch, encode_batch
from semel.storage import StorageError
from tests.support.waiting import PATIENCE_S

KeyValue = tuple[bytes | None, bytes | None]
BROKEN = StorageError(E.KAFKA_STORAGE_ERROR, "the disk of the test is broken")


class Topic:
    """Logs of record batches in memory. What is appended becomes durable, or fails, when the test says so."""

    name = "__test"
    partition_count = 2

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.refuse: StorageError | None = None
        self.unreadable = 0  # so many reads fail
        self.batches: list[list[bytes]] = [[], []]
        self.durable = [0, 0]  # batches
        self.waiting: list[tuple[int, int, Outcome]] = []

    def append(
        self, partition: int, records: list[KeyValue], producer: tuple[int, int] | None = None
    ) -> tuple[int, bool]:
        if self.refuse is not None:
            raise self.refuse
        base_offset = self._add(partition, records, producer, control=False)
        if self.at_once:
            self.durable[partition] = len(self.batches[partition])
        return base_offset, self.at_once

    def mark(self, partition: int, producer_id: int, *, commit: bool) -> None:
        key = b"\0\0\0\1" if commit else b"\0\0\0\0"
        self._add(partition, [(key, bytes(6))], (producer_id, 0), control=True)
        self.durable[partition] = len(self.batches[partition])

    def _add(self, partition: int, records: list[KeyValue], producer: tuple[int, int] | None, *, control: bool) -> int:
        batches = self.batches[partition]
        base = read_header(batches[-1]).next_offset if batches else 0
        producer_id, epoch = producer or (-1, -1)
        rows = [Record(base + number, 1, key, value) for number, (key, value) in enumerate(records)]
        batches.append(
            bytes(
                encode_batch(
                    rows,
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    transactional=producer is not None,
                    control=control,
                )
            )
        )
        return base

    def when_durable(self, partition: int, end_offset: int, on_outcome: Outcome) -> None:
        self.waiting.append((partition, len(self.batches[partition]), on_outcome))
        if self.at_once:
            self.end(-1)

    def end(self, number: int, error: StorageError | None = None) -> None:
        """The outcome of one of the appends that wait. After a failure the log is cut back to what is durable."""
        partition, count, on_outcome = self.waiting.pop(number)
        if error is None:
            self.durable[partition] = max(self.durable[partition], count)
        on_outcome(error)

    def cut(self, partition: int) -> None:
        del self.batches[partition][self.durable[partition] :]

    def read(self, partition: int) -> Iterator[tuple[BatchHeader, list[Record]]]:
        if self.unreadable:
            self.unreadable -= 1
            raise BROKEN
        for batch in list(self.batches[partition][: self.durable[partition]]):
            yield decode_batch(batch)


class Put(NamedTuple):
    key: str
    value: str | None


class State:
    """A map, and the history of its changes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.pending: dict[tuple[int, int], list[Put]] = {}
        self.history: list[Put] = []
        self.fail_once: BaseException | None = None

    def encode(self, record: Put) -> KeyValue:
        return record.key.encode(), None if record.value is None else record.value.encode()

    def decode(self, offset: int, key: bytes, value: bytes | None) -> Put | None:
        return None if key.startswith(b"#") else Put(key.decode(), None if value is None else value.decode())

    def replay(self, partition: int, offset: int, record: Put, producer_id: int | None) -> None:
        if self.fail_once is not None:
            error, self.fail_once = self.fail_once, None
            raise error
        if producer_id is not None:
            self.pending.setdefault((partition, producer_id), []).append(record)
            return
        self.history.append(record)
        if record.value is None:
            self.values.pop(record.key, None)
        else:
            self.values[record.key] = record.value

    def end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        for record in self.pending.pop((partition, producer_id), []):
            if commit:
                self.replay(partition, -1, record, None)

    def clear(self, partition: int, has: Callable[[str], bool]) -> None:
        self.values = {key: value for key, value in self.values.items() if not has(key)}
        self.pending = {who: held for who, held in self.pending.items() if who[0] != partition}


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def made(topic: Topic) -> tuple[CoordinatorRuntime[Put], State]:
    state = State()
    return CoordinatorRuntime(topic, state), state  # type: ignore[arg-type]


def loaded(topic: Topic) -> State:
    """What a restart finds."""
    runtime, state = made(topic)
    runtime.load()
    return state


def put(key: str, value: str | None = "1") -> list[Put]:
    return [Put(key, value)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_runtime, "RETRY_S", 0.001)


def test_records_that_are_durable_at_once_are_replayed_at_once_and_nobody_waits() -> None:
    async def body() -> None:
        runtime, state = made(Topic(at_once=True))
        assert runtime.write(0, [Put("a", "1"), Put("b", "2")]) is None
        assert state.values == {"a": "1", "b": "2"}
        assert await runtime.commit(0, put("a", None)) is E.NONE
        assert state.values == {"b": "2"}

    in_loop(body())


def test_nothing_changes_before_it_is_durable() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        written = runtime.write(0, put("a"))
        await asyncio.sleep(0)
        assert written is not None
        assert (written.done(), state.values, loaded(topic).values) == (False, {}, {})
        topic.end(0)
        assert await written is None
        assert state.values == loaded(topic).values == {"a": "1"}

    in_loop(body())


def test_concurrent_writes_are_replayed_in_the_order_of_the_log_however_they_become_durable() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        writes = [runtime.write(0, put("a", str(number))) for number in range(4)]
        other = runtime.write(1, put("other"))
        for number in (2, 1, -1):  # of what is left: the third, the second, the one of the other partition
            topic.end(number)
        assert other is not None
        assert await other is None  # partitions do not wait for each other
        assert state.values == {"other": "1"}
        assert not any(write.done() for write in writes if write is not None)
        topic.end(0)
        assert state.history[1:] == [Put("a", "0"), Put("a", "1"), Put("a", "2")]
        topic.end(0)
        assert state.values == {"other": "1", "a": "3"}
        await runtime.finish_writes()
        assert loaded(topic).values == state.values

    in_loop(body())


def test_a_write_behind_one_that_waits_is_not_replayed_before_it() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        runtime.write(0, put("a", "first"))
        topic.at_once = True
        second = runtime.write(0, put("a", "second"))
        assert second is not None
        assert state.values == {}
        settled = asyncio.ensure_future(runtime.settled(0))
        await asyncio.sleep(0)
        assert not settled.done()
        topic.end(0)
        await settled
        assert state.values == {"a": "second"}
        await runtime.settled(0)  # nothing to wait for

    in_loop(body())


def test_a_caller_that_goes_away_does_not_stop_its_write() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        request = asyncio.ensure_future(runtime.commit(0, put("a")))
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        topic.end(0)
        assert state.values == {"a": "1"}

    in_loop(body())


def test_a_refused_append_changes_nothing_and_the_next_one_works() -> None:
    async def body() -> None:
        topic = Topic(at_once=True)
        runtime, state = made(topic)
        topic.refuse = StorageError(E.KAFKA_STORAGE_ERROR, "refused by the test")
        with pytest.raises(StorageError):
            runtime.write(0, put("a"))
        assert await runtime.commit(0, put("a")) is E.NOT_COORDINATOR
        assert state.history == []
        assert runtime.rebuilds.get(0) is None
        topic.refuse = None
        assert await runtime.commit(0, put("a")) is E.NONE
        assert state.values == loaded(topic).values == {"a": "1"}

    in_loop(body())


def test_after_a_failed_fsync_the_partition_takes_no_writes_until_its_state_is_rebuilt() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        assert [runtime.partition_for(key) for key in "bxzy"] == [0, 0, 0, 1]
        runtime.write(0, put("b", "kept"))
        topic.end(0)
        lost = [runtime.write(0, put("b", "lost")), runtime.write(0, put("x", "lost"))]
        topic.unreadable = 3
        for _ in lost:
            topic.end(0, BROKEN)
        assert [await write for write in lost if write is not None] == [BROKEN, BROKEN]
        rebuild = runtime.rebuilds.get(0)
        assert rebuild is not None
        with pytest.raises(StorageError, match="try again"):
            runtime.write(0, put("x"))
        assert await runtime.commit(0, put("x")) is E.NOT_COORDINATOR
        runtime.write(1, put("y"))
        topic.end(0)
        assert state.values == {"b": "kept", "y": "1"}  # the other partition goes on
        topic.cut(0)
        state.values.update(b="changed", z="not in the log")  # shows that the state comes from the log
        await rebuild
        assert topic.unreadable == 0, "the fault did not fire"
        assert state.values == {"b": "kept", "y": "1"}
        assert runtime.rebuilds.get(0) is None
        topic.at_once = True
        assert await runtime.commit(0, put("x", "new")) is E.NONE
        assert state.values == loaded(topic).values == {"b": "kept", "x": "new", "y": "1"}

    in_loop(body())


def test_a_stop_gives_up_a_rebuild_that_cannot_end() -> None:
    async def body() -> None:
        topic = Topic()
        runtime, _ = made(topic)
        topic.unreadable = 10**9
        runtime.write(0, put("a"))
        topic.end(0, BROKEN)
        while topic.unreadable == 10**9:
            await asyncio.sleep(0)
        await runtime.stop()
        assert topic.unreadable < 10**9, "the fault did not fire"

    in_loop(body())


def test_records_that_cannot_be_replayed_are_replayed_again_from_the_log() -> None:
    async def body() -> None:
        topic = Topic(at_once=True)
        runtime, state = made(topic)
        runtime.write(0, put("a"))
        state.fail_once = RuntimeError("a bug of the test")
        runtime.write(0, put("b"))
        assert state.fail_once is None, "the fault did not fire"
        rebuild = runtime.rebuilds.get(0)
        assert rebuild is not None
        await rebuild
        assert {"a", "b"} <= state.values.keys()

    in_loop(body())


@pytest.mark.parametrize("crash_after", range(7))
def test_a_crash_at_any_boundary_leaves_what_was_durable(crash_after: int) -> None:
    """Between any two of: append, durable, append in a transaction, durable, marker, end of the transaction."""

    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        steps: list[Callable[[], object]] = [
            lambda: runtime.write(0, put("a", "plain")),
            lambda: topic.end(0),
            lambda: runtime.write(0, [Put("a", "in transaction"), Put("b", "1")], producer=(7, 0)),
            lambda: topic.end(0),
            lambda: topic.mark(0, 7, commit=True),
            lambda: runtime.end_transaction(0, 7, True),
        ]
        for step in steps[:crash_after]:
            step()
        topic.cut(0)
        after = loaded(topic)
        if crash_after == 5:  # the marker is durable and the running coordinator does not know it yet
            state.end_transaction(0, 7, True)
        assert after.values == state.values
        assert after.pending == state.pending

    in_loop(body())


@pytest.mark.parametrize("commit", [True, False])
def test_the_end_of_a_transaction_waits_for_the_writes_before_it(commit: bool) -> None:
    async def body() -> None:
        topic = Topic()
        runtime, state = made(topic)
        runtime.write(0, put("a", "pending"), producer=(7, 0))
        topic.end(0)
        runtime.write(0, put("b"))
        topic.mark(0, 7, commit=commit)
        runtime.end_transaction(0, 7, commit)
        assert state.pending
        topic.end(0)
        assert not state.pending
        expected = {"b": "1", "a": "pending"} if commit else {"b": "1"}
        assert state.values == loaded(topic).values == expected

    in_loop(body())


def test_of_many_records_of_a_key_the_last_one_is_loaded() -> None:
    async def body() -> None:
        topic = Topic(at_once=True)
        runtime, _ = made(topic)
        for number in range(5):
            runtime.write(0, [Put("a", str(number)), Put("gone", str(number)), Put("#not ours", "1")])
        runtime.write(0, put("held"), producer=(7, 0))
        runtime.write(0, [Put("gone", None), Put("held", None)])
        topic.mark(0, 7, commit=True)  # a deleted key is not brought back by a transaction that began before
        state = loaded(topic)
        assert state.history == [Put("a", "4")]

    in_loop(body())


def test_errors_of_the_log_are_retriable_ones_of_coordinators() -> None:
    assert client_error(BROKEN) is E.NOT_COORDINATOR
    assert client_error(StorageError(E.UNKNOWN_TOPIC_OR_PARTITION, "")) is E.COORDINATOR_NOT_AVAILABLE
    assert client_error(StorageError(E.MESSAGE_TOO_LARGE, "")) is E.UNKNOWN_SERVER_ERROR
    assert client_error(StorageError(E.INVALID_PRODUCER_EPOCH, "")) is E.INVALID_PRODUCER_EPOCH
