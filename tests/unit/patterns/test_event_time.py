"""Deduplication, windows and joins by event time, held against plain versions of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord
from semel.patterns.event_time import LateRecordError, deduplicate, join_table, join_within, windowed
from semel.patterns.process_output import Output, rows_of
from semel.patterns.state import KeyedState, State, StateStore, StoreIdentity


class Partition:
    """A partition of a loop without the loop: units of work of a few records, some of which are aborted."""

    def __init__(self, folder: Path, function: Callable[[Any, Any], Any], seed: int = 0) -> None:
        self._store = StateStore(folder / f"{seed}.sqlite", StoreIdentity("app", "s", 1, 0, "t"))
        self._state = State(KeyedState().codec(), 1 << 20)
        self._state.attach(0, self._store)
        self._function = function
        self._rng = random.Random(seed)
        self.late: list[ConsumerRecord] = []
        self.aborts = 0

    def run(self, records: Iterable[ConsumerRecord]) -> list[Output]:
        outputs: list[Output] = []
        left = list(records)
        while left:
            unit = left[: self._rng.randint(1, 5)]
            made, late = self._unit(unit)
            if self._rng.random() < 0.2:  # an abort: the same records come again
                self.aborts += 1
                self._state.discard()
                continue
            self._store.advance(dict(self._state.pending(0)), self._store.offset + 1)
            self._state.discard()
            left = left[len(unit) :]
            outputs += made
            self.late += late
        return outputs

    def _unit(self, unit: list[ConsumerRecord]) -> tuple[list[Output], list[ConsumerRecord]]:
        made: list[Output] = []
        late = []
        for record in unit:
            self._state.enter(0)
            try:
                made += rows_of(self._function(record, self._state), record)
            except LateRecordError:
                self._state.roll_back()
                late.append(record)
        return made, late

    def stored(self) -> list[bytes]:
        self._state.enter(0)
        return [key for key, _ in self._state.scan()]


def record(
    timestamp: int, key: bytes | None = b"k", value: bytes | None = b"", topic: str = "in", offset: int = 0
) -> ConsumerRecord:
    return ConsumerRecord(topic, 0, offset, timestamp, key, value, ())


def random_records(seed: int, count: int = 300, topics: tuple[str, ...] = ("in",)) -> list[ConsumerRecord]:
    """Time goes on by and by; most records are a little late, few are very late."""
    rng = random.Random(seed)
    return [
        record(
            1_000 + max(0, 10 * number - rng.choice([0, 0, 5, 60, 400])),
            b"k%d" % rng.randrange(4),
            b"%d" % rng.randrange(60),
            rng.choice(topics),
            number,
        )
        for number in range(count)
    ]


def by_value(each: ConsumerRecord) -> bytes | None:
    return each.value


@pytest.mark.parametrize("seed", range(5))
def test_deduplication_passes_the_first_of_an_id_and_forgets_in_time(tmp_path: Path, seed: int) -> None:
    partition = Partition(tmp_path, deduplicate(by=by_value, within_ms=200), seed)
    records = random_records(seed)
    passed = [output.value for output in partition.run(records)]
    assert partition.aborts > 5
    now, seen, expected, late = 0, dict[bytes | None, int](), list[bytes | None](), list[ConsumerRecord]()
    surely_forgotten = 0
    for each in records:
        now = max(now, each.timestamp)
        if each.timestamp < now - 200:
            late.append(each)
        elif each.value not in seen or seen[each.value] < now - 200 - 200 // 8:
            surely_forgotten += each.value in seen
            expected.append(each.value)
            seen[each.value] = each.timestamp
        elif seen[each.value] >= now - 200:
            pass  # a duplicate for certain
        else:  # between within_ms and an eighth more: either is right; take what was done
            if len(expected) < len(passed) and passed[len(expected)] == each.value:
                expected.append(each.value)
                seen[each.value] = each.timestamp
    assert (passed, partition.late) == (expected, late)
    assert surely_forgotten, "no id came again after it was forgotten"
    ids = [key for key in partition.stored() if key.startswith(b"i")]
    assert len(ids) <= 60
    assert all(seen[key[1:]] >= now - 200 - 200 // 8 for key in ids)


@pytest.mark.parametrize("grace_ms", [0, 70])
@pytest.mark.parametrize("seed", range(3))
def test_windows_are_written_once_and_whole(tmp_path: Path, seed: int, grace_ms: int) -> None:
    add = lambda so_far, each: [*(so_far or []), each.offset]  # noqa: E731
    partition = Partition(tmp_path, windowed(size_ms=100, grace_ms=grace_ms, add=add), seed)
    records = random_records(seed)
    outputs = partition.run([*records, record(1_000_000, b"end")])
    now, windows, late = 0, dict[tuple[int, bytes | None], list[int]](), list[ConsumerRecord]()
    for each in records:
        now = max(now, each.timestamp)
        start = each.timestamp // 100 * 100
        if start + 100 + grace_ms <= now:
            late.append(each)
        else:
            windows.setdefault((start, each.key), []).append(each.offset)
    found = {(int(dict(output.headers)["window.start"] or 0), output.key): output.value for output in outputs}
    assert len(found) == len(outputs), "a window was written twice"
    assert {place: json.loads(value or b"") for place, value in found.items()} == windows
    assert partition.late == late
    assert late or grace_ms
    assert len(partition.stored()) == 3, "the clock, the last window and its entry in the index are left"


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_of_a_key_within_the_time_is_joined_once(tmp_path: Path, seed: int) -> None:
    pair = lambda left, right: b"%d:%d" % (left.offset, right.offset)  # noqa: E731
    join = join_within(left="clicks", within_ms=80, grace_ms=100, join=pair)
    partition = Partition(tmp_path, join, seed)
    records = random_records(seed, topics=("clicks", "views"))
    found = [output.value for output in partition.run([*records, record(1_000_000, b"end", topic="views")])]
    now, taken, late = 0, list[ConsumerRecord](), list[ConsumerRecord]()
    for each in records:
        now = max(now, each.timestamp)
        (late if each.timestamp < now - 180 else taken).append(each)
    expected = {
        b"%d:%d" % (left.offset, right.offset)
        for left in taken
        for right in taken
        if left.topic == "clicks" and right.topic == "views" and left.key == right.key
        if abs(left.timestamp - right.timestamp) <= 80
    }
    assert len(found) == len(set(found)), "a pair was joined twice"
    assert set(found) == expected
    assert partition.late == late
    assert late
    assert len(partition.stored()) == 3, "the clock, the last record and its entry in the index are left"


def test_a_table_is_joined_as_of_the_moment(tmp_path: Path) -> None:
    partition = Partition(tmp_path, join_table(table="users", join=lambda each, user: user or b"nobody"))
    rows = [
        record(1, b"u1", b"click"),
        record(2, b"u1", b"Ada", "users"),
        record(3, b"u1", b"click"),
        record(4, b"u2", b"click"),
        record(5, b"u1", None, "users"),
        record(6, b"u1", b"click"),
    ]
    assert [output.value for output in partition.run(rows)] == [b"nobody", b"Ada", b"nobody", b"nobody"]


def test_late_records_are_dropped_and_counted_where_that_is_wanted(tmp_path: Path) -> None:
    function = windowed(size_ms=100, add=lambda so_far, each: 1, late="drop")
    state = Partition(tmp_path, function)
    state.run([record(1_000), record(2_000), record(1_000), record(1_999), record(2_001)])
    assert function.late_records >= 2  # type: ignore[attr-defined]
    assert state.late == []


def test_bad_options_and_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="late is 'sometimes'"):
        deduplicate(by=by_value, within_ms=10, late="sometimes")
    with pytest.raises(ConfigError, match="within_ms is 0"):
        deduplicate(by=by_value, within_ms=0)
    with pytest.raises(ConfigError, match="grace_ms is -1"):
        windowed(size_ms=1, grace_ms=-1, add=lambda so_far, each: 1)
    partition = Partition(tmp_path, deduplicate(by=lambda each: None, within_ms=10))
    with pytest.raises(TypeError, match="the id of a record is NoneType"):
        partition.run([record(1)])
    partition = Partition(tmp_path, deduplicate(by=by_value, within_ms=10), seed=1)
    partition.run([record(-1)])
    assert len(partition.late) == 1, "a record without a timestamp has no place in time"


def test_a_joined_record_is_of_its_topic_also_after_a_restart(tmp_path: Path) -> None:
    def join() -> Any:
        return join_within(left="clicks", within_ms=80, join=lambda left, right: f"{left.topic}, {right.topic}")

    partition = Partition(tmp_path, join())
    partition.run([record(10, topic="views")])
    partition._function = join()  # a new process, with the state of the old one
    (output,) = partition.run([record(20, topic="clicks")])
    assert output.value == "clicks, views"


def test_an_empty_key_has_a_window_of_its_own_beside_records_without_a_key(tmp_path: Path) -> None:
    """Both were counted together, and what came out had no key."""
    partition = Partition(tmp_path, windowed(size_ms=10, add=lambda count, _: (count or 0) + 1))
    records = [record(1_000, None), record(1_001, b""), record(1_002, b""), record(1_003, b"k"), record(1_010)]
    outputs = partition.run(records)
    assert sorted((output.key, output.value) for output in outputs if output.key is not None) == [
        (b"", b"2"),
        (b"k", b"1"),
    ]
    assert [output.value for output in outputs if output.key is None] == [b"1"]
    assert {output.timestamp for output in outputs} == {1_009}
    assert {tuple(output.headers) for output in outputs} == {(("window.start", b"1000"), ("window.end", b"1010"))}
