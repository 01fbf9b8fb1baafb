"""Processes of a simulated world that run blocking code as it is: threads, locks, sockets, pipes and clocks of the
client are taken from here instead of the operating system.

Each thread is a greenlet: one of them runs at a time, from one wait to the next, and the seed says which. So a run can
be repeated, and threads meet in orders that an operating system shows once in a thousand runs. A wait costs virtual
time only. A process is killed at any wait: from then on every call of its threads ends them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import inspect
import logging
import os
import pkgutil
import random
import select
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from semel.client.waiting import Flag
from tests.simulation.loop import NEVER_S
from tests.simulation.world import WALL_S, SimulatedConnection, World

PACKAGES = ("semel.client", "semel.patterns")
IF_IMPORTED = ("semel.spark",)
FIRST_FD = 1 << 30
FIRST_PORT = 9092
THROTTLE_NOTICED_S = 1.0  # so long after it has read that it is throttled, a client knows it
STEPS_MAX = 20_000  # of a process without time passing: more is a loop that does not wait
CALLS_MAX = 200_000  # of a clock


class Killed(BaseException):
    """Ends the threads of a process that was killed."""


class _Scheduler:
    """Which thread runs. None: the world does."""

    def __init__(self) -> None:
        self.running: _Fiber | None = None
        self.world: World | None = None
        self.descriptors: dict[int, _Pipe | SimulatedSocket] = {}
        self._next_fd = FIRST_FD
        self._calls_at: tuple[float, int] = (0.0, 0)

    def now_s(self) -> float:
        assert self.world is not None
        now_s, (last_s, calls) = self.world.now_s, self._calls_at
        self._calls_at = (now_s, calls + 1 if now_s == last_s else 0)
        assert calls < CALLS_MAX, f"{self.running} does not wait"
        return now_s

    def process(self) -> ClientProcess:
        assert self.running is not None
        return self.running.process

    def check_alive(self) -> None:
        if self.running is not None and self.running.process.is_over:
            raise Killed

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Lets others run, and time pass, until it is so; False at the timeout."""
        self.check_alive()
        if is_ready():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        me = self.running
        assert me is not None, "the world itself cannot wait"
        me.is_ready = is_ready
        me.until_s = NEVER_S if timeout_s is None else self.now_s() + timeout_s
        me.park()
        return is_ready()

    def maybe_yield(self) -> None:
        """At places where an operating system may run another thread: sometimes it does, for a moment."""
        me = self.running
        if me is None:
            return
        self.check_alive()
        rng = me.process.world.rng
        if rng.random() < me.process.preemption_rate:
            me.is_ready, me.until_s = _never, self.now_s() + rng.random() * me.process.preemption_s
            me.park()

    def add_descriptor(self, what: _Pipe | SimulatedSocket) -> int:
        self._next_fd += 1
        self.descriptors[self._next_fd] = what
        return self._next_fd


_scheduler = _Scheduler()


def _never() -> bool:
    return False


def wait_for(is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """For code of a test that runs in a simulated process."""
    return _scheduler.wait(is_ready, timeout_s)


def current_process() -> ClientProcess:
    return _scheduler.process()


class _Fiber:
    """A thread of a simulated process."""

    def __init__(self, process: ClientProcess, work: Callable[[], None], face: SimulatedThread) -> None:
        self.process = process
        self.face = face
        self.is_over = False
        self.error: BaseException | None = None
        self.is_ready: Callable[[], bool] = lambda: True
        self.until_s = NEVER_S
        self.is_interrupted = False
        self._greenlet = greenlet(lambda: self._run(work))
        self._world: greenlet | None = None

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.face.name}"

    def can_run(self, now_s: float) -> bool:
        return now_s >= self.until_s or self.is_interrupted or self.is_ready()

    @property
    def is_started(self) -> bool:
        return self._world is not None

    def resume(self) -> None:
        """Runs it up to its next wait, or its end."""
        self._world = self._greenlet.parent = getcurrent()
        before, _scheduler.running = _scheduler.running, self  # one process may kill another
        try:
            self._greenlet.switch()
        finally:
            _scheduler.running = before

    def park(self) -> None:
        assert self._world is not None
        self._world.switch()
        if self.process.is_over:
            raise Killed
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True


class ClientProcess:
    """A process around a function. It is over when that returns or raises, or when it is killed."""

    def __init__(self, world: World, name: str, main: Callable[[], None]) -> None:
        self.world = world
        self.name = name
        self.is_over = False
        self.was_killed = False
        self.error: BaseException | None = None  # what `main` raised
        self.cut_rate = 0.0  # of writes to a socket, after which the connection is cut
        self.preemption_rate = 0.0  # of calls that could let another thread run
        self.preemption_s = 0.002  # how long that takes, at most
        self.frozen_until_s = 0.0
        self.offline_until_s = 0.0
        self.on_end: Callable[[], None] = lambda: None
        self.on_send: Callable[[], None] = lambda: None
        self.on_request: Callable[[int], None] = lambda api_key: None  # that is on its way
        self.sockets: list[SimulatedSocket] = []
        self.refused_s: list[float] = []  # when a connection was refused
        self.violations: list[str] = []  # what it must not have done
        self._fibers: list[_Fiber] = []
        self._main = self.spawn(SimulatedThread(target=main, name="main"))
        world.processes.append(self)

    def spawn(self, thread: SimulatedThread) -> _Fiber:
        fiber = _Fiber(self, thread.run, thread)
        thread.fiber = fiber
        self._fibers.append(fiber)
        return fiber

    @property
    def is_frozen(self) -> bool:
        return self.world.now_s < self.frozen_until_s

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if self.is_frozen:
            return
        self.world.fault(f"{self.name} is frozen for {seconds:.1f} s")
        self.frozen_until_s = self.world.now_s + seconds

    def cut_connections(self, offline_s: float = 0.0) -> None:
        """All that it has; and nobody can be reached for a while. What is on its way may arrive."""
        self.world.fault(f"{self.name} is offline for {offline_s:.1f} s")
        self.offline_until_s = self.world.now_s + offline_s
        for each in list(self.sockets):
            each.cut()

    @contextlib.contextmanager
    def interrupted_after(self, seconds: float) -> Iterator[None]:
        """Ctrl-C, unless what is inside has ended by then: KeyboardInterrupt where the main thread waits next."""
        fiber, state = self._main, [True]

        def strike() -> None:
            if state and not self.is_over:
                self.world.fault(f"{self.name} is interrupted")
                fiber.is_interrupted = True

        self.world.after(seconds, strike)
        try:
            yield
        finally:
            state.clear()
            fiber.is_interrupted = False

    def kill(self) -> None:
        if not self.is_over:
            self.world.fault(f"{self.name} is killed")
            self.was_killed = True
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._detach_finalizers()
        for each in self.sockets:
            each.reset()
        for fiber in self._fibers:
            if fiber.is_started and not fiber.is_over:
                fiber.resume()
            assert fiber.is_over or not fiber.is_started, f"{fiber} did not end"
        self._fibers = []
        self.on_end()

    def _detach_finalizers(self) -> None:
        """Those of producers that nobody closed: a process that is over runs nothing."""
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            _, call, _, _ = finalizer.peek()
            thread = getattr(call, "__self__", None)
            if isinstance(thread, SimulatedThread) and thread.fiber is not None and thread.fiber.process is self:
                finalizer.detach()

    def next_event_s(self) -> float:
        if self.is_over:
            return NEVER_S
        now_s = self.world.now_s
        due_s = min(now_s if fiber.can_run(now_s) else fiber.until_s for fiber in self._fibers)
        return max(due_s, self.frozen_until_s)

    def run(self) -> None:
        if self.is_over or self.is_frozen:
            return
        now_s = self.world.now_s
        for _ in range(STEPS_MAX):
            ready = [fiber for fiber in self._fibers if fiber.can_run(now_s)]
            if not ready:
                return
            fiber = ready[0] if len(ready) == 1 else self.world.rng.choice(ready)
            fiber.resume()
            if fiber.is_over:
                self._fibers.remove(fiber)
                if fiber is self._main:
                    self.error = fiber.error
                    self._end()
                    return
                if fiber.error is not None:
                    raise AssertionError(f"{fiber} ended: {fiber.error!r}") from fiber.error
        raise AssertionError(f"{self.name} does not wait: {self._fibers}")


# --- threading --------------------------------------------------------------------------------------------------------
class SimulatedThread:
    """As `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or "thread"
        self.daemon = daemon
        self.ident = id(self)
        self.fiber: _Fiber | None = None

    def start(self) -> None:
        _scheduler.check_alive()
        _scheduler.process().spawn(self)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self.fiber is not None and not self.fiber.is_over

    def join(self, timeout: float | None = None) -> None:
        _scheduler.wait(lambda: not self.is_alive(), timeout)


class SimulatedLock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        _scheduler.maybe_yield()
        limit_s = 0.0 if not blocking else None if timeout < 0 else timeout
        if not _scheduler.wait(lambda: not self._is_held, limit_s):
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release_all(self) -> int:
        self._is_held = False
        return 1

    def acquire_again(self, _: int) -> None:
        _scheduler.wait(lambda: not self._is_held)
        self._is_held = True


class SimulatedRLock:
    """As `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: _Fiber | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        _scheduler.maybe_yield()
        me = _scheduler.running
        limit_s = 0.0 if not blocking else None if timeout < 0 else timeout
        if not _scheduler.wait(lambda: not self._count or self._owner is me, limit_s):
            return False
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return bool(self._count) and self._owner is _scheduler.running

    def release_all(self) -> int:
        count, self._count = self._count, 0
        return count

    def acquire_again(self, count: int) -> None:
        me = _scheduler.running
        _scheduler.wait(lambda: not self._count)
        self._owner, self._count = me, count


class SimulatedCondition:
    """As `threading.Condition`."""

    def __init__(self, lock: SimulatedLock | SimulatedRLock | None = None) -> None:
        self._lock = lock or SimulatedRLock()
        self._waiters: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        notified: list[bool] = []
        self._waiters.append(notified)
        count = self._lock.release_all()
        try:
            _scheduler.wait(lambda: bool(notified), timeout)
        finally:
            if notified in self._waiters:
                self._waiters = [each for each in self._waiters if each is not notified]
            self._lock.acquire_again(count)
        return bool(notified)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end_s = NEVER_S if timeout is None else _scheduler.now_s() + timeout
        while not (result := predicate()):
            left_s = end_s - _scheduler.now_s()
            if left_s <= 0:
                break
            self.wait(None if left_s == NEVER_S else left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for notified in self._waiters[:n]:
            notified.append(True)
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimulatedDeliveryCondition(SimulatedCondition):
    """As `deliveries.DeliveryCondition`, which is a lock in C."""

    def __init__(self) -> None:
        super().__init__()
        self.sending_thread: int | None = None

    def check_process(self) -> None:
        """All processes of a world are one."""


class SimulatedEvent:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return _scheduler.wait(self.is_set, timeout)


def _current_thread() -> SimulatedThread:
    return _OUTSIDE if _scheduler.running is None else _scheduler.running.face


_OUTSIDE = SimulatedThread(name="world")
_THREADING = SimpleNamespace(
    Thread=SimulatedThread,
    Lock=SimulatedLock,
    RLock=SimulatedRLock,
    Condition=SimulatedCondition,
    Event=SimulatedEvent,
    TIMEOUT_MAX=threading.TIMEOUT_MAX,
    current_thread=_current_thread,
    main_thread=lambda: _OUTSIDE,  # so nobody sets signal handlers
    get_ident=lambda: _current_thread().ident,
)


# --- time -------------------------------------------------------------------------------------------------------------
def _sleep(seconds: float) -> None:
    _scheduler.wait(_never, seconds)


_TIME = SimpleNamespace(
    monotonic=_scheduler.now_s,
    perf_counter=_scheduler.now_s,
    time=lambda: WALL_S + _scheduler.now_s(),
    time_ns=lambda: int((WALL_S + _scheduler.now_s()) * 1e9),
    monotonic_ns=lambda: int(_scheduler.now_s() * 1e9),
    sleep=_sleep,
)


# --- descriptors ------------------------------------------------------------------------------------------------------
class _Pipe:
    def __init__(self) -> None:
        self.bytes = 0
        self.is_readable = lambda: self.bytes > 0
        self.is_writable = lambda: True


def _pipe() -> tuple[int, int]:
    pipe = _Pipe()
    return _scheduler.add_descriptor(pipe), _scheduler.add_descriptor(pipe)


def _found_pipe(fd: int) -> _Pipe:
    _scheduler.check_alive()
    found = _scheduler.descriptors.get(fd)
    if not isinstance(found, _Pipe):
        raise OSError(errno.EBADF, "Bad file descriptor")
    return found


def _read(fd: int, count: int) -> bytes:
    pipe = _found_pipe(fd)
    if not pipe.bytes:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    taken = min(count, pipe.bytes)
    pipe.bytes -= taken
    return bytes(taken)


def _write(fd: int, data: bytes) -> int:
    _found_pipe(fd).bytes += len(data)
    return len(data)


def _close(fd: int) -> None:
    _scheduler.descriptors.pop(fd, None)


class _Os(ModuleType):
    """The module, but for pipes."""

    pipe = staticmethod(_pipe)
    read = staticmethod(_read)
    write = staticmethod(_write)
    close = staticmethod(_close)
    set_blocking = staticmethod(lambda fd, blocking: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Poller:
    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}

    def register(self, fd: int, events: int = select.POLLIN | select.POLLOUT) -> None:
        self._wanted[fd] = events

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        _scheduler.maybe_yield()
        timeout_s = None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        _scheduler.wait(lambda: bool(self._ready()), timeout_s)
        return self._ready()

    def _ready(self) -> list[tuple[int, int]]:
        ready = []
        for fd, wanted in self._wanted.items():
            what = _scheduler.descriptors.get(fd)
            events = select.POLLNVAL if what is None else _events(what)
            if events & (wanted | select.POLLNVAL):
                ready.append((fd, events & (wanted | select.POLLNVAL)))
        return ready


def _events(what: _Pipe | SimulatedSocket) -> int:
    return (select.POLLOUT if what.is_writable() else 0) | (select.POLLIN if what.is_readable() else 0)


_SELECT = SimpleNamespace(poll=_Poller, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)


# --- sockets ----------------------------------------------------------------------------------------------------------
class SimulatedSocket:
    """As a TCP socket of the client. Its connection is one of the world's."""

    def __init__(self, process: ClientProcess) -> None:
        self._process = process
        self._received = bytearray()
        self._is_at_end = False
        self._drained_s = 0.0  # when all was read that had come
        self._connection: SimulatedConnection | None = None
        self._fd = _scheduler.add_descriptor(self)
        process.sockets.append(self)

    def connect(self, address: tuple[str, int]) -> bool:
        broker = self._process.world.broker
        if address in (("bootstrap", FIRST_PORT), ("broker", broker.port)):
            self._connection = broker.connect(self._received.extend, self._on_lost)
        return self._connection is not None

    def _on_lost(self) -> None:
        self._is_at_end = True

    def is_readable(self) -> bool:
        return bool(self._received) or self._is_at_end

    def is_writable(self) -> bool:
        return self._is_at_end or self._connection is None or self._connection.free_bytes > 0

    def fileno(self) -> int:
        return self._fd

    def sendmsg(self, buffers: list[Any], _: object = (), __: int = 0) -> int:
        _scheduler.maybe_yield()
        _scheduler.check_alive()
        if self._fd < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._is_at_end:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        process, connection = self._process, self._connection
        assert connection is not None
        data = b"".join(buffers)[: connection.free_bytes]
        if not data:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._check_throttle(connection)
        world = process.world
        connection.send(data)
        if world.rng.random() < process.cut_rate and world.may_strike():
            world.after(world.rng.random() * 4 * world.delay_s, lambda: connection.cut_by(process.name))
        process.on_send()
        for api_key in _api_keys(data):
            process.on_request(api_key)
        return len(data)

    def _check_throttle(self, connection: SimulatedConnection) -> None:
        process, throttled_s = self._process, connection.throttled_for_s
        now_s = process.world.now_s
        noticed_s = now_s - max(self._drained_s, process.frozen_until_s)
        if THROTTLE_NOTICED_S < noticed_s < throttled_s:
            process.violations.append(f"{process.name} sends although it was throttled {throttled_s:.1f} s ago")

    def recv_into(self, space: Any, count: int, flags: int = 0) -> int:
        _scheduler.check_alive()
        if self._fd < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self.is_readable():
            if flags & socket.MSG_DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            _scheduler.wait(self.is_readable)
        taken = min(count, len(self._received))
        space[:taken] = self._received[:taken]
        del self._received[:taken]
        if not self._received and taken:
            self._drained_s = self._process.world.now_s
        return taken

    def shutdown(self, _: int) -> None:
        if self._connection is not None:
            self._connection.cut()
        self._is_at_end = True

    def cut(self) -> None:
        """By the network."""
        if self._connection is not None:
            self._connection.cut()

    def reset(self) -> None:
        """The process is gone."""
        if self._connection is not None:
            self._connection.cut()
        _scheduler.descriptors.pop(self._fd, None)

    def close(self) -> None:
        self.reset()
        self._fd = -1
        if self in self._process.sockets:
            self._process.sockets.remove(self)

    def setsockopt(self, *_: object) -> None:
        """There is nothing to set."""

    def setblocking(self, _: bool) -> None:
        """Each call says it."""

    def settimeout(self, _: float | None) -> None:
        """Each call says it."""


def _api_keys(data: bytes) -> Iterator[int]:
    """Of the requests in what is sent at once: whole frames."""
    at = 0
    while at + 6 <= len(data):
        yield int.from_bytes(data[at + 4 : at + 6], "big")
        at += 4 + int.from_bytes(data[at : at + 4], "big")


def _create_connection(address: tuple[str, int], timeout: float | None = None) -> SimulatedSocket:
    process = _scheduler.process()
    delay_s = max(process.world.network_delay_s(), process.offline_until_s - process.world.now_s)
    if timeout is not None and timeout < delay_s:
        _sleep(timeout)
        raise TimeoutError(errno.ETIMEDOUT, "timed out")
    _sleep(delay_s)
    made = SimulatedSocket(process)
    if not made.connect(address):
        made.close()
        process.refused_s.append(process.world.now_s)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return made


def _getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """The names of the world are its addresses."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]


class _Socket(ModuleType):
    """The module, but for sockets."""

    socket = SimulatedSocket
    getaddrinfo = staticmethod(_getaddrinfo)
    create_connection = staticmethod(_create_connection)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


# --- taking the place of the operating system -------------------------------------------------------------------------
_INSTEAD: dict[int, tuple[Any, Any]] = {
    id(real): (real, simulated)
    for real, simulated in (
        (threading, _THREADING),
        (time, _TIME),
        (select, _SELECT),
        (os, _Os("os")),
        (socket, _Socket("socket")),
        (threading.Lock, SimulatedLock),
        (threading.RLock, SimulatedRLock),
        (threading.Condition, SimulatedCondition),
        (threading.Event, SimulatedEvent),
        (Flag, SimulatedEvent),
        (threading.Thread, SimulatedThread),
        (time.monotonic, _scheduler.now_s),
        (time.time, _TIME.time),
        (time.perf_counter, _scheduler.now_s),
        (time.sleep, _sleep),
    )
}
Change = tuple[Any, str, Any, Any]  # owner, attribute, real, simulated
_found: dict[int, list[Change]] = {}  # by the number of modules


def _find_changes() -> list[Change]:
    if not _found:
        for package in PACKAGES:
            path = importlib.import_module(package).__path__
            for each in pkgutil.walk_packages(path, package + "."):
                importlib.import_module(each.name)
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(PACKAGES + IF_IMPORTED)]
    if len(modules) not in _found:
        changes = _found[len(modules)] = []
        for module in modules:
            for name, value in list(vars(module).items()):
                changes.extend(_changes_of(module, name, value))
        futures = importlib.import_module("semel.client.producer.deliveries")
        changes.append((futures, "CONDITION", futures.CONDITION, SimulatedRLock()))
        sender = importlib.import_module("semel.client.producer.sender")
        changes.append((sender, "DeliveryCondition", sender.DeliveryCondition, SimulatedDeliveryCondition))
    return _found[len(modules)]


def _changes_of(module: ModuleType, name: str, value: Any) -> Iterator[Change]:
    if id(value) in _INSTEAD:
        yield module, name, value, _INSTEAD[id(value)][1]
    elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
        yield from _changes_of_defaults(value)
    elif inspect.isclass(value) and value.__module__ == module.__name__:
        bases = tuple(_INSTEAD.get(id(base), (base, base))[1] for base in value.__bases__)
        if bases != value.__bases__:
            yield value, "__bases__", value.__bases__, bases
        for member in vars(value).values():
            function = getattr(member, "__wrapped__", None) or getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield from _changes_of_defaults(function)


def _changes_of_defaults(function: FunctionType) -> Iterator[Change]:
    defaults = function.__defaults__ or ()
    simulated = tuple(_INSTEAD.get(id(value), (value, value))[1] for value in defaults)
    if any(one is not other for one, other in zip(defaults, simulated, strict=True)):
        yield function, "__defaults__", defaults, simulated


def _end_real_senders() -> None:
    """Producers that other tests have left in this process must not meet simulated clocks and sockets."""
    senders = list(importlib.import_module("semel.client.producer.producer")._running)
    for sender in senders:
        sender.stop()
    for sender in senders:
        sender.join()


@contextlib.contextmanager
def client_processes(world: World) -> Iterator[None]:
    """Inside, the client's code runs in processes of this world."""
    _end_real_senders()
    changes = _find_changes()
    state = random.getstate()
    random.seed(world.seed)
    real_uuid4, ids = (
        uuid.uuid4,
        random.Random(world.seed),
    )  # names of members and instances, and what is sorted by them
    uuid.uuid4 = lambda: uuid.UUID(int=ids.getrandbits(128), version=4)
    gc_was_on = gc.isenabled()
    finalizers = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    gc.disable()  # the time of a collection is not the seed's
    _scheduler.world = world
    world.disk.on_hit = _scheduler.maybe_yield
    logging.getLogger("semel").addHandler(_quiet)
    for owner, name, _, simulated in changes:
        setattr(owner, name, simulated)
    try:
        yield
    finally:
        world.is_over = True
        for process in world.processes:
            if isinstance(process, ClientProcess):
                process.on_end = lambda: None
                process.kill()
        world.processes.clear()
        gc.collect()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            if finalizer not in finalizers:
                finalizer.detach()
        for owner, name, real, _ in changes:
            setattr(owner, name, real)
        logging.getLogger("semel").removeHandler(_quiet)
        _scheduler.descriptors.clear()
        _scheduler.world = None
        random.setstate(state)
        uuid.uuid4 = real_uuid4
        if gc_was_on:
            gc.enable()


_quiet = logging.NullHandler()
