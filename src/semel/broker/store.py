"""A small durable map: an append-only file of changes, each with its checksum, written anew when the broker starts.

It keeps what Kafka keeps in its metadata log: topics, altered settings, the next producer id. A change is on the disk
before `commit` returns. A torn last line, as kill -9 or a power cut leaves, is a change that was never acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

FILE_NAME = "broker.journal"


class StoreCorruptError(Exception):
    """A damaged line that is not the last one: somebody else wrote to the file, or the disk lost data."""


class Store:
    """The map. Keys are short strings such as "topic/name"; values are what JSON can hold."""

    def __init__(self, folder: Path, *, fsync: bool = True) -> None:
        self._path = folder / FILE_NAME
        self._fsync = fsync
        self.is_new = not self._path.exists()
        self._values: dict[str, Any] = {} if self.is_new else _read(self._path)
        self._changes = bytearray()
        self._fd = self._write_anew()

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def items(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """(rest of the key, value) of every key with a prefix."""
        for key, value in self._values.items():
            if key.startswith(prefix):
                yield key[len(prefix) :], value

    def put(self, key: str, value: Any) -> None:
        """Changes a value; None takes the key away. Durable with the next `commit`, which may fail: try it again, or
        `forget_changes`."""
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        self._changes += _line(key, value)

    def commit(self) -> None:
        """Writes the changes since the last commit, as one write and one fsync."""
        if not self._changes:
            return
        changes, self._changes = self._changes, bytearray()
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            _write_all(self._fd, changes)
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, end)  # a half-written change must not stand before a later one
            self._changes = changes
            raise

    def forget_changes(self) -> None:
        """Gives up what could not be committed; the values are as the file has them."""
        self._changes = bytearray()
        self._values = _read(self._path)

    def close(self) -> None:
        self.commit()
        os.close(self._fd)

    def _write_anew(self) -> int:
        """One line for each key, in a new file that takes the old one's place at once."""
        draft = self._path.with_suffix(".draft")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        _write_all(fd, b"".join(_line(key, value) for key, value in self._values.items()))
        os.fsync(fd)
        os.replace(draft, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return fd


def _line(key: str, value: Any) -> bytes:
    body = msgspec.json.encode([key, value])
    return b"%08x %s\n" % (crc32c(body), body)


def _write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines = path.read_bytes().split(b"\n")
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
        key, value = msgspec.json.decode(line[9:])
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def _is_whole(line: bytes) -> bool:
    try:
        return len(line) > 9 and int(line[:8], 16) == crc32c(line[9:])
    except ValueError:
        return False
