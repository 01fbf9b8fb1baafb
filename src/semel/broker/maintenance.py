"""Background work in small steps: retention, producer expiry, checkpoints, compaction, idle connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from semel.broker.broker import BrokerNode
from semel.broker.server import Server
from semel.broker.turns import Turns
from semel.storage import Compactor, PartitionLog

log = logging.getLogger(__name__)

IDLE_CHECKS_PER_LIMIT = 10
SHORTEST_PAUSE_S = 0.05
LONGEST_SLEEP_S = 60.0  # an altered setting counts after this at the latest
LOGS_PER_STEP = 20  # between two steps requests are handled
LOGS_OPENED_PER_ROUND = 20  # logs that were not used since the start are read a few at a time


class Maintenance:
    """Periodic jobs. A job that fails is logged and tried again next time."""

    def __init__(self, broker: BrokerNode, server: Server) -> None:
        self._broker, self._server = broker, server
        self._compactor = Compactor()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._every("log.retention.check.interval.ms", self.keep_up_storage)
        self._every("log.cleaner.backoff.ms", self.compact)
        self._every("connections.max.idle.ms", self._close_idle, IDLE_CHECKS_PER_LIMIT)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._compactor.close()

    def _every(self, setting: str, job: Callable[[], Awaitable[object]], times: int = 1) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._repeat(setting, job, times)))

    async def _repeat(self, setting: str, job: Callable[[], Awaitable[object]], times: int) -> None:
        """A job, so many times in what a setting says now: it may be altered while the broker runs."""
        clock = asyncio.get_running_loop().time
        while True:
            started_s = clock()
            while (left_s := self._pause_s(setting, times) - (clock() - started_s)) > 0:
                await asyncio.sleep(min(left_s, LONGEST_SLEEP_S))
            try:
                await job()
            except Exception:
                log.exception("background work failed")

    def _pause_s(self, setting: str, times: int) -> float:
        interval_ms: int = self._broker.settings[setting]
        return max(interval_ms / 1000 / times, SHORTEST_PAUSE_S)

    async def keep_up_storage(self) -> None:
        """Retention, expiry of producers, removal of deleted files, checkpoints."""
        data_dir, clock = self._broker.data_dir, self._broker.clock
        opened = [log for log in data_dir.logs.values() if log.is_open]
        unread = [log for log in data_dir.logs.values() if not log.is_open][:LOGS_OPENED_PER_ROUND]
        for number, log in enumerate(opened + unread, 1):
            if data_dir.get(log.topic, log.partition) is log:
                data_dir.maintain_log(log, clock.now_ms())
            if number % LOGS_PER_STEP == 0:
                await asyncio.sleep(0)
        await Turns().run(data_dir.garbage_removal(clock.now_ms()))
        await asyncio.to_thread(data_dir.take_checkpoint())

    async def compact(self) -> None:
        """Compacts the dirtiest logs, one after the other, on a thread of its own, until none is dirty enough."""
        if not self._broker.settings["log.cleaner.enable"]:
            return
        done: set[PartitionLog] = set()
        while True:
            waiting = [log for log in self._broker.data_dir.logs.values() if log not in done]
            compacted = await self._compactor.run_once(waiting, self._broker.clock.now_ms())
            if compacted is None:
                return
            done.add(compacted)

    async def _close_idle(self) -> None:
        self._server.close_idle()
