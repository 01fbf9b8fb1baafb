"""Group commit: many waiting appends share one fsync. (API under construction.)"""

from __future__ import annotations

import asyncio
from typing import Literal

from semel.storage.log import PartitionLog

FsyncMode = Literal["commit", "os"]


class SyncGroup:
    """fsyncs the logs that were written to, in rounds, on worker threads. fsync="os" makes every wait immediate."""

    def __init__(self, mode: FsyncMode, *, workers: int = 2) -> None:
        self.mode: FsyncMode = mode

    def wait(self, log: PartitionLog, offset: int) -> asyncio.Future[None]:
        """Done once the log's high watermark reached `offset` (last offset + 1 of what is to be acknowledged).

        Fails with StorageError(KAFKA_STORAGE_ERROR) if the fsync failed: then nothing may be acknowledged.
        Needs a running loop. Cheap check before: `log.high_watermark >= offset`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Waits for the last round and stops the workers."""
        raise NotImplementedError
