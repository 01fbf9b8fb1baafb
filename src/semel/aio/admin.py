"""The admin client for asyncio.

    async with AsyncAdmin(bootstrap_servers="localhost:9092") as admin:
        await admin.create_topic("orders", partitions=6)

Its calls are those of `semel.Admin`, each of which is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from semel.aio.cluster import AsyncCluster, LoopGuard
from semel.client.admin.base import admin_settings
from semel.client.admin.calls import AdminCalls
from semel.client.settings import ClientSettings


class AsyncAdmin(AdminCalls):
    """Tasks of one event loop may share it."""

    def __init__(self, options: Mapping[str, Any] | ClientSettings | None = None, /, **keywords: Any) -> None:
        """Options by Kafka's names: `{"bootstrap.servers": "..."}` or `bootstrap_servers="..."`."""
        settings = admin_settings(options, keywords)
        self._cluster = AsyncCluster(settings, LoopGuard("AsyncAdmin"))
        super().__init__(settings, self._cluster)
        self._cluster.close_with(self)

    async def close(self) -> None:
        """Closes its connections. Calls of other tasks that wait fail."""
        self._cluster.close()

    async def __aenter__(self) -> Self:
        self._cluster.check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
