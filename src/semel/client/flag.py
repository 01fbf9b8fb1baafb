"""A flag that threads wait for, and that a signal handler may set."""

from __future__ import annotations

from contextlib import suppress
from threading import TIMEOUT_MAX, Lock
from typing import Any


class Flag:
    """As `threading.Event`, without its lock. A handler that sets an Event in the thread that waits for it stands still
    for good if the signal comes while the thread has that lock, and Ctrl-C can leave it taken.

    Each step on the list is one operation of the interpreter, and one who waits looks at the flag behind his entry."""

    def __init__(self) -> None:
        self._is_set = False
        self._sleepers: list[Any] = []  # a lock of each one who waits

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._sleepers.pop().release()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set, or for so long in seconds; whether it is set."""
        sleeper = Lock()
        sleeper.acquire()
        try:
            self._sleepers.append(sleeper)
            if not self._is_set:
                sleeper.acquire(timeout=TIMEOUT_MAX if timeout is None else min(max(timeout, 0.0), TIMEOUT_MAX))
        finally:
            with suppress(ValueError):
                self._sleepers.remove(sleeper)
        return self._is_set
