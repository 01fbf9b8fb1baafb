"""A client of `semel.aio` belongs to one event loop: the first in which it is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from semel.client.errors import IllegalStateError


class _Forks:
    """How many forks led to this process: a look at it costs less than a call to the kernel for the process id."""

    count = 0


def _forked() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_forked)


class LoopGuard:
    """Refuses other event loops, which run in other threads or after the first one, and forked children."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = _Forks.count

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of this client, in which the caller runs."""
        self.check()
        assert self._loop is not None
        return self._loop

    def call_soon(self, call: Callable[[], None]) -> None:
        """Calls it in the loop of this client, if that is still there. Any thread may do that, and a signal handler."""
        if self._loop is not None and not self.is_forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    @property
    def is_forked(self) -> bool:
        return _Forks.count != self._forks

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more: the loop is closed, or this is a forked child."""
        return self.is_forked or (self._loop is not None and self._loop.is_closed())

    def check(self) -> None:
        if self._forks != _Forks.count:
            raise IllegalStateError(
                f"this {self._what} was made before the process was forked; make one in each process"
            )
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise IllegalStateError(f"this {self._what} must be used in a coroutine, inside its event loop") from None
        if self._loop is None:
            self._loop = running
        elif running is not self._loop:
            state = "is closed" if self._loop.is_closed() else "runs elsewhere"
            raise IllegalStateError(
                f"this {self._what} belongs to another event loop, which {state}; make one {self._what} per loop, or "
                "use asyncio.run_coroutine_threadsafe() with the loop that it belongs to"
            )
