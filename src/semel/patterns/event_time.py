"""Functions for `semel.process` with state that go by event time, the timestamps of records: deduplication, windows and
joins.

    semel.process("orders", "orders.once", semel.deduplicate(by=order_id, within_ms=3_600_000), state="seen", ...)

Each returns a function of (record, state) for a state of bytes (the default). Time is that of a partition: the largest
timestamp that was seen in it, kept in the state. Nothing depends on the wall clock, so a replay gives the same output.
What is older than `within_ms` or a window's grace is late: `LateRecordError`, hence a dead letter where the loop has a
topic for these, or dropped and counted with late="drop". State that can be of no more use is removed as time goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord
from semel.patterns.process_output import Output, rows_of
from semel.patterns.state import State

CLOCK = b"c"  # + topic: the time of the partition
INDEX = b"t"  # + slot + what to look at when the slot is over
STEPS = 8  # what is remembered is looked through so often within the time that it is remembered
LATE = ("raise", "drop")
EMPTY_KEY = 1 << 63  # in the start of a window, which is less: its key is empty. Without it, no key is no key
_TIME = struct.Struct(">Q")

StateFunctionOfRecord = Callable[[ConsumerRecord, State], Any]


class LateRecordError(ValueError):
    """A record that is older than what is still remembered."""


class EventTime:
    """What the functions share: the time of a partition, and what to do with records that are late."""

    def __init__(self, late: str, **times_ms: int) -> None:
        if late not in LATE:
            raise ConfigError(f"late is {late!r}; it must be one of {', '.join(LATE)}")
        for name, value in times_ms.items():
            if not isinstance(value, int) or value < (0 if name == "grace_ms" else 1):
                raise ConfigError(f"{name} is {value!r}; expected milliseconds")
        self._late = late
        self.late_records = 0  # dropped by this instance; again after an abort

    def _advance(self, record: ConsumerRecord, state: State) -> tuple[int, int]:
        """The time of the partition before this record, and with it."""
        if record.timestamp < 0:
            raise LateRecordError("the record has no timestamp")
        before = _time_in(state.get(CLOCK))
        now = max(before, record.timestamp)
        if now != before:
            state.put(CLOCK, _TIME.pack(now))
        return before, now

    def _refuse(self, record: ConsumerRecord, now_ms: int, limit_ms: int) -> None:
        if self._late == "raise":
            raise LateRecordError(
                f"the record's time is {record.timestamp}, {now_ms - record.timestamp} ms before the time of its "
                f"partition ({now_ms}); {limit_ms} ms are allowed"
            )
        self.late_records += 1


def _time_in(raw: bytes | None) -> int:
    return 0 if raw is None else _TIME.unpack(raw)[0]


def _passed(state: State, slot_ms: int, before_ms: int, limit_ms: int) -> Iterator[bytes]:
    """Takes out of the index what belongs to slots that are over; asked when time has passed into another slot."""
    last = limit_ms // slot_ms
    if last > before_ms // slot_ms:
        for key, _ in list(state.scan(INDEX, INDEX + _TIME.pack(max(0, last)))):
            state.delete(key)
            yield key[len(INDEX) + _TIME.size :]


def _note(state: State, slot_ms: int, at_ms: int, what: bytes) -> None:
    state.put(INDEX + _TIME.pack(at_ms // slot_ms) + what, b"")


# --- deduplication ---
class _Deduplicate(EventTime):
    def __init__(self, by: Callable[[ConsumerRecord], Any], within_ms: int, late: str) -> None:
        super().__init__(late, within_ms=within_ms)
        self._by, self._within_ms = by, within_ms
        self._slot_ms = max(1, within_ms // STEPS)

    def __call__(self, record: ConsumerRecord, state: State) -> ConsumerRecord | None:
        id_ = self._by(record)
        data = id_.encode() if isinstance(id_, str) else id_
        if not isinstance(data, bytes):
            raise TypeError(f"the id of a record is {type(id_).__name__}; expected bytes or str")
        before_ms, now_ms = self._advance(record, state)
        for old in _passed(state, self._slot_ms, before_ms - self._within_ms, now_ms - self._within_ms):
            state.delete(b"i" + old)
        if record.timestamp < now_ms - self._within_ms:
            self._refuse(record, now_ms, self._within_ms)
            return None
        if state.get(b"i" + data) is not None:
            return None
        state.put(b"i" + data, _TIME.pack(record.timestamp))
        _note(state, self._slot_ms, record.timestamp, data)
        return record


def deduplicate(*, by: Callable[[ConsumerRecord], Any], within_ms: int, late: str = "raise") -> StateFunctionOfRecord:
    """Passes the first record of each id on. `by(record)` is its id; an id is remembered for `within_ms` of event time
    after its first record, and up to an eighth longer."""
    return _Deduplicate(by, within_ms, late)


# --- windows ---
class _Windowed(EventTime):
    def __init__(self, size_ms: int, grace_ms: int, add: Callable[[Any, ConsumerRecord], Any], late: str) -> None:
        super().__init__(late, size_ms=size_ms, grace_ms=grace_ms)
        self._size_ms, self._grace_ms, self._add = size_ms, grace_ms, add

    def __call__(self, record: ConsumerRecord, state: State) -> list[Output]:
        before_ms, now_ms = self._advance(record, state)
        closed = _passed(state, self._size_ms, before_ms - self._grace_ms, now_ms - self._grace_ms)
        outputs = [self._closed(key, state) for key in closed]
        start_ms = record.timestamp - record.timestamp % self._size_ms
        if start_ms + self._size_ms + self._grace_ms <= now_ms:
            self._refuse(record, now_ms, self._grace_ms)
            return outputs
        mark = EMPTY_KEY if record.key == b"" else 0
        key = _TIME.pack(start_ms | mark) + (record.key or b"")
        before = state.get(b"w" + key)
        if before is None:
            _note(state, self._size_ms, start_ms, key)
        result = self._add(None if before is None else msgspec.json.decode(before), record)
        state.put(b"w" + key, msgspec.json.encode(result))
        return outputs

    def _closed(self, key: bytes, state: State) -> Output:
        marked = _time_in(key[: _TIME.size])
        start_ms = marked & ~EMPTY_KEY
        value = state.get(b"w" + key)
        state.delete(b"w" + key)
        headers = [("window.start", b"%d" % start_ms), ("window.end", b"%d" % (start_ms + self._size_ms))]
        of = key[_TIME.size :] or (b"" if marked & EMPTY_KEY else None)
        return Output(value, of, timestamp=start_ms + self._size_ms - 1, headers=headers)


def windowed(
    *, size_ms: int, add: Callable[[Any, ConsumerRecord], Any], grace_ms: int = 0, late: str = "raise"
) -> StateFunctionOfRecord:
    """Tumbling windows by event time and key: `add(so_far, record)` returns the new result (None at first), which is
    kept as JSON. A window is written once, when the time of its partition is `grace_ms` past its end."""
    return _Windowed(size_ms, grace_ms, add, late)


# --- joins ---
class _JoinTable:
    def __init__(self, table: str, join: Callable[[ConsumerRecord, bytes | None], Any]) -> None:
        self._table, self._join = table, join

    def __call__(self, record: ConsumerRecord, state: State) -> Any:
        if record.key is None:
            raise ValueError(f"a record without a key cannot be joined with {self._table!r}")
        if record.topic != self._table:
            return self._join(record, state.get(b"j" + record.key))
        if record.value is None:
            state.delete(b"j" + record.key)
        else:
            state.put(b"j" + record.key, record.value)
        return None


def join_table(*, table: str, join: Callable[[ConsumerRecord, bytes | None], Any]) -> StateFunctionOfRecord:
    """Joins the other source with the last value of its key in the topic `table`: `join(record, value)` returns what a
    function of the loop may; the value is None where the table has none at that moment."""
    return _JoinTable(table, join)


class _Buffered(msgspec.Struct, array_like=True):
    """A record of a side that others may still be joined with."""

    timestamp: int
    offset: int
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    topic: str = ""


_decode_buffered = msgspec.msgpack.Decoder(list[_Buffered]).decode


class _JoinWithin(EventTime):
    def __init__(
        self, left: str, within_ms: int, grace_ms: int, join: Callable[[ConsumerRecord, ConsumerRecord], Any], late: str
    ) -> None:
        super().__init__(late, within_ms=within_ms, grace_ms=grace_ms)
        self._left, self._within_ms, self._join = left, within_ms, join
        self._kept_ms = within_ms + grace_ms
        self._slot_ms = max(1, self._kept_ms // STEPS)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = _decode_buffered

    def __call__(self, record: ConsumerRecord, state: State) -> list[Output]:
        if record.key is None:
            raise ValueError("a record without a key cannot be joined")
        before_ms, now_ms = self._advance(record, state)
        for name in _passed(state, self._slot_ms, before_ms - self._kept_ms, now_ms - self._kept_ms):
            self._prune(name, state, now_ms)
        if record.timestamp < now_ms - self._kept_ms:
            self._refuse(record, now_ms, self._kept_ms)
            return []
        is_left = record.topic == self._left
        mine, other = (b"l", b"r") if is_left else (b"r", b"l")
        outputs = []
        for match in self._of(other + record.key, state):
            if abs(match.timestamp - record.timestamp) <= self._within_ms:
                place = (match.topic, record.partition, match.offset, match.timestamp)
                found = ConsumerRecord(*place, record.key, match.value, tuple(match.headers))
                pair = (record, found) if is_left else (found, record)
                outputs += rows_of(self._join(*pair), record)
        kept = [each for each in self._of(mine + record.key, state) if each.timestamp >= now_ms - self._kept_ms]
        kept.append(_Buffered(record.timestamp, record.offset, record.value, list(record.headers or ()), record.topic))
        state.put(mine + record.key, self._encode(kept))
        _note(state, self._slot_ms, record.timestamp, mine + record.key)
        return outputs

    def _of(self, name: bytes, state: State) -> list[_Buffered]:
        raw = state.get(name)
        return [] if raw is None else self._decode(raw)

    def _prune(self, name: bytes, state: State, now_ms: int) -> None:
        kept = [each for each in self._of(name, state) if each.timestamp >= now_ms - self._kept_ms]
        if kept:
            state.put(name, self._encode(kept))
        else:
            state.delete(name)


def join_within(
    *,
    left: str,
    within_ms: int,
    join: Callable[[ConsumerRecord, ConsumerRecord], Any],
    grace_ms: int = 0,
    late: str = "raise",
) -> StateFunctionOfRecord:
    """Joins two sources by key and time: `join(left, right)` is called for each pair of records of a key whose
    timestamps differ by at most `within_ms`, when the second of them comes. `left` is a topic, the other source the
    right side. A record waits for others for `within_ms` + `grace_ms` of event time."""
    return _JoinWithin(left, within_ms, grace_ms, join, late)
