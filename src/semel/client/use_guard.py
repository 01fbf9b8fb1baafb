"""One thread or task at a time in an object that belongs to one, and none of a forked child."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from semel.client.errors import ConcurrentUseError, IllegalStateError
from semel.client.timing import refuse_seconds

Kind = TypeVar("Kind", bound=type)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class UseGuard:
    """Lets one thread in, which may come in again (from a listener), and refuses others instead of making them wait."""

    def __init__(self, what: str, open_to_all: str) -> None:
        self._what = what
        self._open_to_all = open_to_all
        self._lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._user = ""

    def enter(self, call: str) -> None:
        if os.getpid() != self._owner_pid:
            self._enter_forked(call)
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError(
                f"{_in_thread(call)} while another one is in this {self._what}: {self._user}. It belongs to one thread "
                f"at a time; only {self._open_to_all} may be called from others: make one {self._what} per thread"
            )
        self._user = _in_thread(call)

    def leave(self) -> None:
        self._lock.release()

    def _enter_forked(self, call: str) -> None:
        if call != "close":
            raise IllegalStateError(
                f"this {self._what} was made before a fork; its connections and its place in the group belong to the "
                f"parent process: make a {self._what} in each process"
            )
        self._lock = threading.RLock()  # another thread of the parent may have had it at the fork


def _in_thread(call: str) -> str:
    return f"{call}() in thread {threading.current_thread().name!r}"


def one_user_at_a_time(*also: str, but: tuple[str, ...] = ()) -> Callable[[Kind], Kind]:
    """A class whose public methods, inherited ones too, and some others go through its `_guard`."""

    def guarded_class(kind: Kind) -> Kind:
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if name in also or not (name.startswith("_") or name in but):
                setattr(kind, name, guarded(name, function))
        return kind

    return guarded_class


def guarded(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A method, or one that is a coroutine, that enters the `_guard` of its object under this name."""
    call = name.lstrip("_")

    unguarded: Callable[..., Any] = function

    @functools.wraps(function)
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        refuse_seconds(call, keywords)
        guard = self._guard
        guard.enter(call)
        try:
            return unguarded(self, *args, **keywords)
        finally:
            guard.leave()

    @functools.wraps(function)
    async def coroutine(self: Any, *args: Any, **keywords: Any) -> Any:
        refuse_seconds(call, keywords)
        guard = self._guard
        guard.enter(call)
        try:
            return await unguarded(self, *args, **keywords)
        finally:
            guard.leave()

    made: Callable[..., Any] = coroutine if inspect.iscoroutinefunction(function) else method
    made.__name__ = name
    return made
