"""Background work, in small steps on the event loop: retention, compaction, producer expiry, idle connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.server import Server

log = logging.getLogger(__name__)

IDLE_CHECKS_PER_LIMIT = 10
LONGEST_PAUSE_S = 60.0


class Maintenance:
    """Periodic jobs. A job that fails is logged and tried again next time."""

    def __init__(self, broker: Broker, server: Server) -> None:
        self._broker, self._server = broker, server
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        settings = self._broker.settings
        storage_s = min(settings["log.retention.check.interval.ms"], settings["log.cleaner.backoff.ms"]) / 1000
        idle_s = max(settings["connections.max.idle.ms"], 0) / 1000 / IDLE_CHECKS_PER_LIMIT
        self._every(min(max(storage_s, 0.05), LONGEST_PAUSE_S), self.maintain_storage)
        self._every(min(max(idle_s, 0.05), LONGEST_PAUSE_S), self._close_idle)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _every(self, pause_s: float, job: Callable[[], object]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._repeat(pause_s, job)))

    async def _repeat(self, pause_s: float, job: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                job()
            except Exception:
                log.exception("background work failed", extra={"job": job.__name__})

    def maintain_storage(self) -> None:
        self._broker.data_dir.maintain(self._broker.clock.now_ms())

    def _close_idle(self) -> None:
        self._server.close_idle()
