"""What `semel prove` can change in a running broker: its clock, and whether its disk is full.

SEMEL_CONTROL names a small file that both sides map into memory, so that a change is seen at once and asking costs no
system call. Without the variable none of this is there.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

VARIABLE = "SEMEL_CONTROL"
_LAYOUT = struct.Struct("<qq")  # milliseconds to add to the clock; 1: writes find no room


class Control:
    """The file, mapped."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    @classmethod
    def create(cls, path: Path) -> Control:
        path.write_bytes(bytes(_LAYOUT.size))
        return cls(path)

    @property
    def clock_offset_ms(self) -> int:
        return int(_LAYOUT.unpack_from(self._memory)[0])

    @property
    def disk_is_full(self) -> bool:
        return bool(_LAYOUT.unpack_from(self._memory)[1])

    def set(self, *, clock_offset_ms: int | None = None, disk_is_full: bool | None = None) -> None:
        """Changes what is named."""
        offset, full = _LAYOUT.unpack_from(self._memory)
        offset = offset if clock_offset_ms is None else clock_offset_ms
        full = full if disk_is_full is None else int(disk_is_full)
        _LAYOUT.pack_into(self._memory, 0, offset, full)

    def close(self) -> None:
        self._memory.close()


def from_environment() -> Control | None:
    """The control file that the environment names, if it does."""
    path = os.environ.get(VARIABLE)
    return Control(path) if path else None
