"""The state of one partition in one SQLite file: what has been committed, and how far in the changelog that is.

Values and the changelog offset that they correspond to are written in one SQLite transaction, so the file is always
the state as of some offset, and what is missing can be read from the changelog. Committed values collect in memory
first and are written in key order, many units of work at once: a key that changes often is written rarely. A file that
belongs to something else, or cannot be read, is refused; one that does not fit its changelog any more is moved aside.
Nothing is deleted.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from semel import faults
from semel.client.errors import FatalError

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
        found: Changes = dict.fromkeys(keys)
        unwritten, written = self._unwritten, self._written
        missing = []
        for key in found:
            if key in unwritten:
                found[key] = unwritten[key]
            elif key in written:
                found[key] = written[key]
            else:
                missing.append(key)
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
        self._unwritten_bytes += sum(len(key) + len(value or b"") for key, value in changes.items())
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
