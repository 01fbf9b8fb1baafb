"""What threads wait for: a flag that a signal handler may set, and a condition whose lock no Ctrl-C leaves taken."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from _thread import LockType, RLock
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import TIMEOUT_MAX, Lock, get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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


# --- Work that may wait for a broker, done aside, so that the caller keeps its own deadline ---
#
# A consumer's poll() with a timeout of 100 ms must return after 100 ms, also when a broker accepts connections and
# responds to nothing. What takes a row of requests (opening a connection, finding a coordinator, looking offsets up)
# is a coroutine that a thread or a task runs: poll() waits for its end as for any other event, and a later poll()
# takes the outcome.


class Waker:
    """A pipe that ends a wait in poll(2). Any thread may call `wake`, a signal handler too, also after `close`. In a
    forked child nothing waits, and another thread of the parent may have had the lock at the fork."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.RLock()  # after close() the number of the descriptor may belong to another file
        self._closed = False
        self._owner_pid = os.getpid()

    def wake(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # full: the wait ends anyway
                    os.write(self._write_fd, b"\0")

    def drain(self) -> None:
        if self._closed:  # by a signal handler, while the owner waited
            return
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        is_forked = os.getpid() != self._owner_pid
        with contextlib.nullcontext() if is_forked else self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self.fd)
            os.close(self._write_fd)


class TaskOutcome(Generic[Value]):
    __slots__ = ("_error", "_value", "is_done", "started_s")

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.is_done = False
        self._value: Value | None = None
        self._error: BaseException | None = None

    def result(self) -> Value:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    async def fill(self, work: Callable[[], Coroutine[Any, Any, Value]], wake: Callable[[], None]) -> None:
        try:
            self._value = await work()
        except BaseException as error:
            self._error = error
        self.is_done = True
        wake()


class Aside:
    """At most one piece of work at a time in each lane. `spawn` runs a coroutine, `wake` is called at its end. All
    methods are for the owner's thread."""

    def __init__(
        self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], wake: Callable[[], None]
    ) -> None:
        self._spawn = spawn
        self._wake = wake
        self._under_way: dict[str, tuple[TaskOutcome[Any], Callable[[TaskOutcome[Any]], None]]] = {}

    def is_busy(self, lane: str) -> bool:
        return lane in self._under_way

    def start(
        self,
        lane: str,
        work: Callable[[], Coroutine[Any, Any, Value]],
        then: Callable[[TaskOutcome[Value]], None],
    ) -> bool:
        """Starts the work if the lane is free. `then` gets the outcome from a later `collect`."""
        if lane in self._under_way:
            return False
        outcome: TaskOutcome[Value] = TaskOutcome()
        self._spawn(lambda: outcome.fill(work, self._wake))
        self._under_way[lane] = (outcome, then)  # last: if Ctrl-C kept the work from starting, the lane stays free
        return True

    def collect(self, lane: str | None = None) -> None:
        """Hands over the outcomes of what has ended (in this lane). Raises what `then` raises; the others stay."""
        for name, (outcome, then) in list(self._under_way.items()) if self._under_way else ():
            if outcome.is_done and lane in (None, name):
                del self._under_way[name]
                then(outcome)


def in_thread(work: Callable[[], None]) -> None:
    """Runs it in a thread; here if the system has none to give."""
    try:
        threading.Thread(target=work, name="semel-aside", daemon=True).start()
    except RuntimeError:
        work()
