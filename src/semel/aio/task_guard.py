"""One task at a time in what belongs to one: a poll, and what changes the partitions that it reads."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from semel.aio.loop_guard import LoopGuard
from semel.client.errors import ConcurrentUseError


class _Use:
    """A task that is inside, with the tasks that it started there (`asyncio.wait_for` starts one)."""

    __slots__ = ("depth", "description")

    def __init__(self, description: str) -> None:
        self.description = description
        self.depth = 0


_uses: ContextVar[tuple[_Use, ...]] = ContextVar("semel_uses", default=())


class TaskGuard:
    """Lets one task in, which may come in again (from a listener), and refuses others instead of making them wait."""

    def __init__(self, what: str, loops: LoopGuard) -> None:
        self._what = what
        self._loops = loops
        self._use: _Use | None = None

    def enter(self, call: str) -> None:
        self._loops.check()
        use = self._use
        if use is None:
            use = self._use = _Use(_in_task(call))
            _uses.set((*_uses.get(), use))
        elif use not in _uses.get():
            raise ConcurrentUseError(
                f"{_in_task(call)} while another one is in this {self._what}: {use.description}. One task at a time "
                f"may poll, assign, subscribe or close it: make one {self._what} per task, or call wakeup() first"
            )
        use.depth += 1

    def leave(self) -> None:
        use = self._use
        assert use is not None
        use.depth -= 1
        if not use.depth:
            self._use = None
            _uses.set(tuple(each for each in _uses.get() if each is not use))


def _in_task(call: str) -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"{call}() in task {task.get_name()!r}" if task is not None else f"{call}() outside of tasks"
