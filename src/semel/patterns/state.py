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

import logging
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from semel import faults
from semel.client.errors import ConfigError, FatalError

# --- The state of one partition in one SQLite file: what has been committed, and how far in the changelog that is ---
#
# Values and the changelog offset that they correspond to are written in one SQLite transaction, so the file is always
# the state as of some offset, and what is missing can be read from the changelog. Committed values collect in memory
# first and are written in key order, many units of work at once: a key that changes often is written rarely. A file
# that belongs to something else, or cannot be read, is refused; one that does not fit its changelog any more is moved
# aside. Nothing is deleted.


log = logging.getLogger("semel.process")

FORMAT = 1
MAX_UNWRITTEN = 50_000  # committed values in memory
MAX_UNWRITTEN_BYTES = 16 << 20
LOOKUP_KEYS = 500  # in one query
# After a power cut the file may be behind, which the changelog makes up for, but it is whole.
SETTINGS = ("journal_mode=WAL", "synchronous=NORMAL", f"mmap_size={256 << 20}")

Value = bytes | None  # None: deleted
Changes = dict[bytes, Value]
T = TypeVar("T")

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS state (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value)",
)
_PUT = "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM state WHERE key = ?"
_SCAN = "SELECT key, value FROM state WHERE key >= ?1 AND (?2 IS NULL OR key < ?2)"
_ABOUT = "INSERT INTO about VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_ANY = "SELECT 1 FROM state LIMIT 1"
_MISSING: Any = object()


class StateError(FatalError):
    """The state of a processing loop cannot be used as it is; the message says why and what to do."""


class StoreIdentity(msgspec.Struct, frozen=True):
    """Whose state a file holds. The topic id differs when a changelog was deleted and created again."""

    application_id: str
    store: str
    version: int
    partition: int
    topic_id: str
    format: int = FORMAT


_decode_identity = msgspec.json.Decoder(StoreIdentity).decode


class StateStore:
    """One partition. `offset` is the changelog offset up to which (exclusive) the committed values go."""

    def __init__(self, path: Path, identity: StoreIdentity) -> None:
        self.path, self.identity = path, identity
        self.offset = 0
        self.saved_ms = 0  # when the file was written last; 0: never
        self._unwritten: Changes = {}
        self._unwritten_bytes = 0
        self._written: Changes = {}  # what was written last: a cache of the file
        self._file = self._guarded(self._open)

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, isolation_level=None)
        try:
            for setting in SETTINGS:
                file.execute(f"PRAGMA {setting}")
            for statement in _SCHEMA:
                file.execute(statement)
            about = dict(file.execute("SELECT name, value FROM about").fetchall())
            if about:
                self._check_identity(about.get("identity"))
                self.offset, self.saved_ms = about["offset"], about["saved_ms"]
            else:
                self._check_empty(file)
        except BaseException:
            file.close()
            raise
        return file

    def _check_identity(self, stored: Any) -> None:
        try:
            found = _decode_identity(stored)
        except (msgspec.MsgspecError, TypeError):
            found = None
        if found == self.identity:
            return
        what = f"{self.path} holds the state of {found}; expected {self.identity}. "
        if found is None or found.format != FORMAT:
            way_out = "It is not of this version of semel. Give another directory, or move the file away"
        elif msgspec.structs.replace(found, topic_id=self.identity.topic_id) == self.identity:
            way_out = (
                "The changelog topic was deleted and created again, so this file may be the only copy of the state: "
                "restore the topic, or move the file away to go on with what the new topic has"
            )
        elif msgspec.structs.replace(found, version=self.identity.version) == self.identity:
            way_out = "The version was changed: go back to it, or start over with another store name"
        else:
            way_out = "It belongs to something else: give another directory"
        raise StateError(what + way_out)

    def _check_empty(self, file: sqlite3.Connection) -> None:
        if file.execute(_ANY).fetchone() is not None:
            raise StateError(f"{self.path} has values and does not say whose they are; move it away")

    # -- reading -------------------------------------------------------------------------------------------------------
    def get(self, key: bytes) -> Value:
        value = self._unwritten.get(key, _MISSING)
        if value is _MISSING:
            value = self._written.get(key, _MISSING)
            if value is _MISSING:
                row = self._guarded(
                    lambda: self._file.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
                )
                value = None if row is None else row[0]
        return value  # type: ignore[no-any-return]

    def get_many(self, keys: list[bytes]) -> Changes:
        """The values of distinct keys; those that have none are None."""
        found: Changes = dict(zip(keys, map(self._unwritten.get, keys, repeat(_MISSING)), strict=True))
        missing = [key for key, value in found.items() if value is _MISSING]
        found.update(zip(missing, map(self._written.get, missing, repeat(_MISSING)), strict=True))
        missing = [key for key in missing if found[key] is _MISSING]
        found.update(dict.fromkeys(missing))
        for start in range(0, len(missing), LOOKUP_KEYS):
            found.update(self._guarded(partial(self._look_up, missing[start : start + LOOKUP_KEYS])))
        return found

    def _look_up(self, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
        query = f"SELECT key, value FROM state WHERE key IN ({','.join('?' * len(keys))})"
        return self._file.execute(query, keys).fetchall()

    def is_empty(self) -> bool:
        return not self._unwritten and self._guarded(lambda: self._file.execute(_ANY).fetchone()) is None

    def scan(self, low: bytes, high: bytes | None) -> list[tuple[bytes, bytes]]:
        """Keys from `low` on and before `high` (None: all) with their values."""
        self.write()
        return self._guarded(lambda: self._file.execute(_SCAN, (low, high)).fetchall())

    # -- writing -------------------------------------------------------------------------------------------------------
    def advance(self, changes: Mapping[bytes, Value], offset: int) -> None:
        """Takes over what was committed up to a changelog offset."""
        self._unwritten.update(changes)
        self._unwritten_bytes += sum(map(len, changes)) + sum(map(len, filter(None, changes.values())))
        self.offset = offset
        if len(self._unwritten) > MAX_UNWRITTEN or self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
            self.write()

    def write(self) -> None:
        """Writes what was committed to the file, in one transaction with its offset."""
        if faults.armed:
            faults.hit("state.write")
        if not self._unwritten and self.saved_ms:
            return
        ordered = sorted(self._unwritten.items())
        now_ms = int(time.time() * 1000)
        about = {"identity": msgspec.json.encode(self.identity), "offset": self.offset, "saved_ms": now_ms}

        def write() -> None:
            with self._file:
                self._file.execute("BEGIN")
                self._file.executemany(_PUT, [change for change in ordered if change[1] is not None])
                self._file.executemany(_DELETE, [(key,) for key, value in ordered if value is None])
                self._file.executemany(_ABOUT, about.items())

        self._guarded(write)
        self.saved_ms = now_ms
        self._written, self._unwritten, self._unwritten_bytes = self._unwritten, {}, 0

    def close(self, write: bool = True) -> None:
        try:
            if write:
                self.write()
        finally:
            self._file.close()

    def move_aside(self, why: str) -> StateStore:
        """Renames the file and returns a new, empty store in its place."""
        self.close(write=False)  # which also puts what is in the -wal file into the file itself
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.aside-{number}")).exists():
            number += 1
        self.path.rename(target)
        log.warning("%s; %s is rebuilt from the changelog, and what it held is kept as %s", why, self.path, target)
        return StateStore(self.path, self.identity)

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except sqlite3.Error as error:
            raise StateError(
                f"{self.path}: {error}. What is committed is in the changelog: free space on the disk if it is full; "
                "if the file is damaged, move it away and it is restored"
            ) from error


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


def _keys(column: Iterable[Any]) -> list[bytes]:
    keys = _listed(column)
    if {*map(type, keys)} <= {bytes} and not any(map(bytes.startswith, keys, repeat(RESERVED))):
        return keys
    return [_key(key) for key in keys]


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
        self._before: list[Any] = []  # in case the function raises: a key, what its pending value was, another key, ...
        self.settled = self._before.clear  # the function has returned, and is called again for the same partition

    # -- for functions -------------------------------------------------------------------------------------------------
    def get(self, key: bytes | str, default: Any = None) -> Any:
        data = key if type(key) is bytes else _key(key)
        value = self._changes.get(data, _NOTHING)
        if value is _NOTHING:
            value = self._current().get(_key(data))
        return default if value is None else self._deserialize(value)

    def put(self, key: bytes | str, value: Any) -> None:
        self._change(key if type(key) is bytes else _key(key), self._serialize(value))

    def delete(self, key: bytes | str) -> None:
        self._change(_key(key), None)

    def get_many(self, keys: Iterable[Any]) -> Any:
        """The values for a column of keys: an Arrow array (formats bytes, int64) or a list; null where none is."""
        wanted = _keys(keys)
        values = [*map(self._changes.get, wanted, repeat(_NOTHING))]
        others = [key for key, value in zip(wanted, values, strict=True) if value is _NOTHING]
        if others:
            found = self._current().get_many(others)
            values = [found[key] if value is _NOTHING else value for key, value in zip(wanted, values, strict=True)]
        return self._codec.to_column(values)

    def put_many(self, keys: Iterable[Any], values: Any) -> None:
        """Puts a column of values; where a value is null the key is deleted. Of a key that occurs twice, the last."""
        names = _keys(keys)
        new = self._codec.from_column(values)
        if len(names) != len(new):
            raise ValueError(f"put_many got {len(names)} keys and {len(new)} values")
        if max(map(len, names), default=0) + max(map(len, filter(None, new)), default=0) > self._max_bytes:
            for key, value in zip(names, new, strict=True):
                self._check_size(key, value)
        self._current()
        self._before += chain.from_iterable(zip(names, map(self._changes.get, names, repeat(_NOTHING)), strict=True))
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
        self._before.clear()
        store = self._stores[partition]
        if store is not self._store:
            self._store, self._changes = store, self._pending.setdefault(partition, {})

    def savepoint(self) -> int:
        """For `roll_back`: what was changed since `enter` stays."""
        return len(self._before)

    def roll_back(self, to: int = 0) -> None:
        """The function raised: what it changed since `enter`, or since a savepoint, is as it was."""
        undone = self._before[to:]
        for key, value in zip(undone[-2::-2], undone[::-2], strict=True):
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
        changes = self._changes
        before = changes.get(key, _NOTHING)
        if before is _NOTHING:  # else the key was looked at then, and the state is in use
            self._current()
            _key(key)
        if len(key) + len(value or b"") > self._max_bytes:
            self._check_size(key, value)
        self._before += (key, before)
        changes[key] = value

    def _check_size(self, key: bytes, value: Value) -> None:
        if len(key) + len(value or b"") > self._max_bytes:
            raise ValueError(
                f"key and value of the state take {len(key) + len(value or b'')} bytes; the changelog takes "
                f"{self._max_bytes} (max.request.size of the producer)"
            )
