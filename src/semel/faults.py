"""The one port for faults: where a test or `semel prove` may act inside a running semel.

Nothing is installed here by semel itself, and no setting or environment variable can do it: a program has to call
`install` before the rest of semel starts (see `semel.prove.injection`). Without an injector a point costs one look at
a module attribute, `if faults.armed: ...`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Injector:
    """What can be installed. This one does nothing."""

    def hit(self, point: str) -> None:
        """The program has reached a named point."""

    async def reach(self, point: str) -> None:
        """The same where other requests may go on during a delay."""
        self.hit(point)

    def clock_offset_ms(self) -> int:
        """What is added to the broker's wall clock."""
        return 0

    def files(self, data_dir: str | Path) -> Any:
        """The `semel.storage.DiskFiles` for a data folder; None for ordinary ones."""
        return None


armed = False
_injector = Injector()


def install(injector: Injector | None) -> None:
    """Takes the place of the injector that was there; None removes it."""
    global armed, _injector
    _injector = injector or Injector()
    armed = injector is not None


def hit(point: str) -> None:
    _injector.hit(point)


async def reach(point: str) -> None:
    await _injector.reach(point)


def clock_offset_ms() -> int:
    return _injector.clock_offset_ms()


def files(data_dir: str | Path) -> Any:
    return _injector.files(data_dir)
