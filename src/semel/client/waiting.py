"""What threads wait for: a flag that a signal handler may set, and a condition whose lock no Ctrl-C leaves taken."""

from __future__ import annotations

from _thread import LockType, RLock
from collections.abc import Callable
from contextlib import suppress
from threading import TIMEOUT_MAX, Lock, get_ident
from typing import TYPE_CHECKING, TypeVar

from semel.client.timing import Deadline

Value = TypeVar("Value")


class Flag:
    """As `threading.Event`, without its lock. A handler that sets an Event in the thread that waits for it stands still
    for good if the signal comes while the thread has that lock, and Ctrl-C can leave it taken.

    Each step on the list is one operation of the interpreter, and one who waits looks at the flag behind his entry."""

    def __init__(self) -> None:
        self._is_set = False
        self._sleepers: list[LockType] = []  # a lock of each one who waits

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


class LastingCondition(RLock):  # type: ignore[misc]  # it may be subclassed, whatever typeshed says
    """A condition that is its own lock. Entering and leaving a `threading.Condition` are Python functions, in which
    Ctrl-C can come after the lock was taken, or before it is given back: it would stay taken, and others stand still
    for good."""

    if TYPE_CHECKING:  # of RLock, for conditions

        def _is_owned(self) -> bool: ...

        def _acquire_restore(self, state: tuple[int, int], /) -> None: ...

    def __init__(self) -> None:
        self._sleepers: list[LockType] = []

    def wait_for(self, predicate: Callable[[], Value], timeout_s: float | None = None) -> Value:
        """Waits until the predicate holds, or for so long; its last value. To be called with the lock taken, once."""
        deadline = Deadline(TIMEOUT_MAX if timeout_s is None else min(timeout_s, TIMEOUT_MAX))
        while not (value := predicate()) and not deadline.expired:
            self.wait(deadline.remaining_s())
        return value

    def wait(self, timeout_s: float) -> None:
        """Gives the lock back until `notify_all`. It is taken again whatever happens: `acquire` ends with a signal."""
        sleeper = Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            self.release()
            sleeper.acquire(timeout=timeout_s)
        finally:
            try:
                self._take_back()
            finally:
                self._take_back()  # if Ctrl-C came within the first
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def _take_back(self) -> None:
        if not self._is_owned():
            self._acquire_restore((1, get_ident()))

    def notify_all(self) -> None:
        while self._sleepers:
            self._sleepers.pop().release()
