"""A small durable map: an append-only file of changes, each with its checksum, rewritten when the broker starts.

It keeps what Kafka keeps in its metadata log: topics, altered settings, the next producer id. A change is on the disk
before `commit` returns. A torn last line, as kill -9 or a power cut leaves, is a change that was never acknowledged.

It also counts how often it was opened: leaders of a later start have a higher epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from semel.protocol.crc import crc32c
from semel.storage import DiskFiles, write_fully

FILE_NAME = "broker.journal"
NEXT_PRODUCER_ID = "next-producer-id"  # key: ids from here on were never used
_STARTS = "starts"


class StoreCorruptError(Exception):
    """A damaged line that is not the last one: another program wrote to the file, or the disk lost data."""


class Store:
    """The map. Keys are short strings such as "topic/name"; values are what JSON can hold."""

    def __init__(self, folder: Path, *, fsync: bool = True, files: DiskFiles | None = None) -> None:
        self._path = str(folder.absolute() / FILE_NAME)
        self._files = files or DiskFiles()
        self._fsync = fsync
        self.is_new = not os.path.exists(self._path)
        self._values: dict[str, Any] = {} if self.is_new else _read(self._path)  # what the file says
        _replay(self._values, _STARTS, self._values.get(_STARTS, 0) + 1)
        self.starts: int = self._values[_STARTS]
        self._pending: dict[str, Any] = {}  # put and not committed yet; None takes the key away
        self._fd, self.size_bytes = self._rewrite()

    def get(self, key: str) -> Any:
        return self._pending[key] if key in self._pending else self._values.get(key)

    def items(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """(rest of the key, value) of every key with a prefix."""
        values = {**self._values, **self._pending} if self._pending else self._values
        for key, value in values.items():
            if value is not None and key.startswith(prefix):
                yield key[len(prefix) :], value

    def put(self, key: str, value: Any) -> None:
        """Changes a value; None takes the key away. Durable with the next `commit`."""
        self._pending[key] = value

    def commit(self) -> None:
        """Writes the changes since the last commit, as one write and one fsync; then replays them. OSError: they are
        dropped, and the values are those of the file."""
        if not self._pending:
            return
        lines = b"".join(_line(key, value) for key, value in self._pending.items())
        try:
            write_fully(self._files, self._fd, lines, self.size_bytes)
            if self._fsync:
                self._files.sync_file(self._fd, self._path)
        except OSError:
            self.discard_changes()
            self._files.truncate(
                self._fd, self._path, self.size_bytes
            )  # a half-written change must not stand before others
            raise
        self.size_bytes += len(lines)
        for key, value in self._pending.items():
            _replay(self._values, key, value)
        self._pending.clear()

    def discard_changes(self) -> None:
        """Drops what was put since the last commit."""
        self._pending.clear()

    def close(self) -> None:
        self.commit()
        os.close(self._fd)

    def _rewrite(self) -> tuple[int, int]:
        """One line for each key, in a new file that takes the old one's place at once. Returns (file, size)."""
        content = b"".join(_line(key, value) for key, value in self._values.items())
        self._files.write_whole(self._path, content)
        return self._files.open(self._path), len(content)


def _line(key: str, value: Any) -> bytes:
    body = msgspec.json.encode([key, value])
    return b"%08x %s\n" % (crc32c(body), body)


def _read(path: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if not _is_whole(line):
            if any(map(_is_whole, lines[number:])):
                raise StoreCorruptError(
                    f"line {number} of {path} is damaged and whole lines follow it; restore the file from a copy, or "
                    "take that line out"
                )
            break
        _replay(values, *msgspec.json.decode(line[9:]))
    return values


def _replay(values: dict[str, Any], key: str, value: Any) -> None:
    """One change that is in the file: the only way in which values change, when the store is opened and later."""
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def _is_whole(line: bytes) -> bool:
    try:
        return len(line) > 9 and int(line[:8], 16) == crc32c(line[9:])
    except ValueError:
        return False
