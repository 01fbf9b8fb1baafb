"""Background work, in small steps on the event loop: retention, compaction, producer expiry, idle connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from inspect import isawaitable
from typing import TYPE_CHECKING

from semel.storage import Compactor

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.server import Server
    from semel.storage import PartitionLog

log = logging.getLogger(__name__)

IDLE_CHECKS_PER_LIMIT = 10
LONGEST_PAUSE_S = 60.0
LOGS_PER_STEP = 50  # between two steps clients are served


class Maintenance:
    """Periodic jobs. A job that fails is logged and tried again next time."""

    def __init__(self, broker: Broker, server: Server) -> None:
        self._broker, self._server = broker, server
        self._compactor = Compactor()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        settings = self._broker.settings
        self._every(settings["log.retention.check.interval.ms"] / 1000, self.maintain_storage)
        self._every(settings["log.cleaner.backoff.ms"] / 1000, self.compact)
        self._every(settings["connections.max.idle.ms"] / 1000 / IDLE_CHECKS_PER_LIMIT, self._close_idle)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._compactor.close()

    def _every(self, pause_s: float, job: Callable[[], object]) -> None:
        pause_s = min(max(pause_s, 0.05), LONGEST_PAUSE_S)
        self._tasks.append(asyncio.get_running_loop().create_task(self._repeat(pause_s, job)))

    async def _repeat(self, pause_s: float, job: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                result = job()
                if isawaitable(result):
                    await result
            except Exception:
                log.exception("background work failed", extra={"job": job.__name__})

    async def maintain_storage(self) -> None:
        """Retention and expiry of every log, removal of deleted files, checkpoints."""
        data_dir, now_ms = self._broker.data_dir, self._broker.clock.now_ms()
        for number, log_ in enumerate(list(data_dir.logs.values()), 1):
            if data_dir.get(log_.topic, log_.partition) is log_ and not _is_known_empty(log_):
                data_dir.maintain_log(log_, now_ms)
            if number % LOGS_PER_STEP == 0:
                await asyncio.sleep(0)
        data_dir.remove_garbage(now_ms)
        data_dir.checkpoint()

    async def compact(self) -> None:
        """Compacts one log after the other until none is dirty enough."""
        broker = self._broker
        while broker.settings["log.cleaner.enable"]:
            logs = [log_ for log_ in broker.data_dir.logs.values() if not _is_known_empty(log_)]
            if await self._compactor.run_once(logs, broker.clock.now_ms()) is None:
                return

    def _close_idle(self) -> None:
        self._server.close_idle()


def _is_known_empty(log_: PartitionLog) -> bool:
    """Nothing to look after, and that is known without reading the folder."""
    return not log_.is_loaded and log_.recovery_point <= log_.known_start_offset
