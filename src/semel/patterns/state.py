"""Keyed state for functions of `semel.process`: what is configured, and what a function gets.

    def count(record, state):
        total = state.get(record.key, 0) + 1
        state.put(record.key, total)
        return b"%d" % total

    semel.process("views", "counts", count, application_id="counter", state=semel.KeyedState("totals", format="int64"))

State belongs to a partition of the source: a function sees what was put for records of the same partition. It reads
its own writes at once; all others see them when they are committed, together with the output and the offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from semel.client.errors import ConfigError
from semel.patterns.state_store import Changes, StateStore, Value

RESERVED = b"\x00semel\x00"  # keys of the changelog that semel writes itself
_LONG = struct.Struct(">q")
_NOTHING: Any = object()

Serialize = Callable[[Any], bytes]
Deserialize = Callable[[bytes], Any]


class Codec(NamedTuple):
    """Values to bytes and back: one by one, and as columns."""

    serialize: Serialize
    deserialize: Deserialize
    to_column: Callable[[list[Value]], Any]
    from_column: Callable[[Any], list[Value]]


def _plain(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(
        f"a value of the state is {type(value).__name__}; expected bytes or str. For others give the state a format, "
        'such as KeyedState(..., format="json"); to remove a key, call delete'
    )


def _listed(column: Any) -> list[Any]:
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _binary_column(values: list[Value]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.binary())


def _longs_column(values: list[Value]) -> Any:
    import numpy as np
    import pyarrow as pa

    zero = bytes(8)
    numbers = np.frombuffer(b"".join([zero if value is None else value for value in values]), ">i8")
    mask = np.fromiter((value is None for value in values), bool, len(values))
    return pa.array(numbers.astype("i8"), mask=mask)


def _longs_from(column: Any) -> list[Value]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    array = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, pa.int64())
    array = pc.cast(array, pa.int64())
    raw = np.asarray(pc.fill_null(array, 0)).astype(">i8").tobytes()
    values: list[Value] = [raw[at : at + 8] for at in range(0, len(raw), 8)]
    if array.null_count:
        return [
            None if is_null else value for value, is_null in zip(values, pc.is_null(array).to_pylist(), strict=True)
        ]
    return values


def _by_value(serialize: Serialize, deserialize: Deserialize) -> Codec:
    def checked(value: Any) -> bytes:
        data = serialize(value)
        if not isinstance(data, bytes):
            raise TypeError(f"the state's serializer returned {type(data).__name__}; expected bytes")
        return data

    return Codec(
        checked,
        deserialize,
        lambda values: [None if value is None else deserialize(value) for value in values],
        lambda column: [None if value is None else checked(value) for value in _listed(column)],
    )


FORMATS = {
    "bytes": Codec(
        _plain,
        lambda data: data,
        _binary_column,
        lambda column: [None if value is None else _plain(value) for value in _listed(column)],
    ),
    "json": _by_value(msgspec.json.encode, msgspec.json.decode),
    # As Kafka's LongSerializer writes it.
    "int64": Codec(_LONG.pack, lambda data: _LONG.unpack(data)[0], _longs_column, _longs_from),
}


class KeyedState(msgspec.Struct, frozen=True):
    """State for a processing loop.

    name        of the store; its changelog is the topic `<application id>.<name>.changelog`
    format      of values: "bytes", "json", "int64" (8 bytes, as Kafka's LongSerializer), or two functions
                (serialize, deserialize)
    directory   where the local copy is kept between runs, one per running instance; None: in a temporary folder, and
                every start reads the whole changelog
    version     of what the values mean; state of another version is refused
    adopt       start with empty state although the group has committed offsets (a loop that had no state before)
    """

    name: str = "state"
    format: str | tuple[Serialize, Deserialize] = "bytes"
    directory: str | Path | None = None
    version: int = 1
    adopt: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("the name of the state is empty; it names the changelog topic")
        if isinstance(self.format, str) and self.format not in FORMATS:
            raise ConfigError(
                f"the format of the state is {self.format!r}; it must be one of {', '.join(FORMATS)}, or two functions "
                "(serialize, deserialize)"
            )

    def codec(self) -> Codec:
        return FORMATS[self.format] if isinstance(self.format, str) else _by_value(*self.format)


def _key(key: Any) -> bytes:
    data = key.encode() if isinstance(key, str) else key
    if not isinstance(data, bytes):
        raise TypeError(f"a key of the state is {type(key).__name__}; expected bytes or str")
    if data.startswith(RESERVED):
        raise ValueError(f"keys that start with {RESERVED!r} are reserved")
    return data


class State:
    """What a function gets: the state of the partition that its record, or its table, is of.

    Changes are pending until the unit of work is committed. What a function changed before it raised is undone."""

    def __init__(self, codec: Codec, max_bytes: int) -> None:
        self._codec = codec
        self._serialize, self._deserialize = codec.serialize, codec.deserialize
        self._max_bytes = max_bytes
        self._pending: dict[int, Changes] = {}
        self._stores: dict[int, StateStore] = {}
        self._changes: Changes = {}  # of the current partition
        self._store: StateStore | None = None
        self._before: list[tuple[bytes, Any]] = []  # what pending values were, in case the function raises

    # -- for functions -------------------------------------------------------------------------------------------------
    def get(self, key: bytes | str, default: Any = None) -> Any:
        data = _key(key)
        value = self._changes.get(data, _NOTHING)
        if value is _NOTHING:
            value = self._current().get(data)
        return default if value is None else self._deserialize(value)

    def put(self, key: bytes | str, value: Any) -> None:
        self._change(_key(key), self._serialize(value))

    def delete(self, key: bytes | str) -> None:
        self._change(_key(key), None)

    def get_many(self, keys: Iterable[Any]) -> Any:
        """The values for a column of keys: an Arrow array (formats bytes, int64) or a list; null where none is."""
        wanted = [_key(key) for key in _listed(keys)]
        changes = self._changes
        others = [key for key in wanted if key not in changes]
        found = self._current().get_many(others) if others else {}
        return self._codec.to_column([changes[key] if key in changes else found[key] for key in wanted])

    def put_many(self, keys: Iterable[Any], values: Any) -> None:
        """Puts a column of values; where a value is null the key is deleted. Of a key that occurs twice, the last."""
        names = [_key(key) for key in _listed(keys)]
        new = self._codec.from_column(values)
        if len(names) != len(new):
            raise ValueError(f"put_many got {len(names)} keys and {len(new)} values")
        for key, value in zip(names, new, strict=True):
            self._check_size(key, value)
        self._current()
        self._before += [(key, self._changes.get(key, _NOTHING)) for key in names]
        self._changes.update(zip(names, new, strict=True))

    def scan(self, low: bytes | str = b"", high: bytes | str | None = None) -> Iterator[tuple[bytes, Any]]:
        """Keys from `low` on and before `high`, in order, with their values. Reads the file: not for every record."""
        first, last = _key(low), None if high is None else _key(high)
        found: dict[bytes, bytes] = dict(self._current().scan(first, last))
        for key, value in self._changes.items():
            if first <= key and (last is None or key < last):
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value
        for key in sorted(found):
            if not key.startswith(RESERVED):
                yield key, self._deserialize(found[key])

    # -- for the loop --------------------------------------------------------------------------------------------------
    def enter(self, partition: int) -> None:
        """A function is about to be called for a record, or a table, of this partition."""
        if self._before:
            self._before.clear()
        store = self._stores[partition]
        if store is not self._store:
            self._store, self._changes = store, self._pending.setdefault(partition, {})

    def savepoint(self) -> int:
        """For `roll_back`: what was changed since `enter` stays."""
        return len(self._before)

    def roll_back(self, to: int = 0) -> None:
        """The function raised: what it changed since `enter`, or since a savepoint, is as it was."""
        for key, value in reversed(self._before[to:]):
            if value is _NOTHING:
                self._changes.pop(key, None)
            else:
                self._changes[key] = value
        del self._before[to:]

    def leave(self) -> None:
        """The functions were called for all there was."""
        self._store, self._changes = None, {}
        self._before.clear()

    def attach(self, partition: int, store: StateStore) -> None:
        self._stores[partition] = store
        self.leave()

    def detach(self, partition: int) -> None:
        self._stores.pop(partition, None)
        self._pending.pop(partition, None)
        self.leave()

    def pending(self, partition: int) -> Changes:
        return self._pending.get(partition, {})

    def discard(self) -> None:
        """Pending changes are gone: they were handed over, or their unit of work will not count."""
        self._pending.clear()
        self.leave()

    def _current(self) -> StateStore:
        if self._store is None:
            raise RuntimeError("the state can be used only by the function, while it is called")
        return self._store

    def _change(self, key: bytes, value: Value) -> None:
        self._check_size(key, value)
        self._current()
        changes = self._changes
        self._before.append((key, changes.get(key, _NOTHING)))
        changes[key] = value

    def _check_size(self, key: bytes, value: Value) -> None:
        if len(key) + len(value or b"") > self._max_bytes:
            raise ValueError(
                f"key and value of the state take {len(key) + len(value or b'')} bytes; the changelog takes "
                f"{self._max_bytes} (max.request.size of the producer)"
            )
