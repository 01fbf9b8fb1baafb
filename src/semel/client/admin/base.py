"""What all parts of the admin client share: its settings, and calls with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from semel.client.cluster_calls import ClusterCalls, NodeTarget, Request, Response, Target, top_error
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.protocol.api import Api


class AdminBase:
    settings: ClientSettings
    cluster: ClusterCalls[Any]

    def _deadline(self, timeout_ms: float | None) -> Deadline:
        return self.cluster.deadline(None if timeout_ms is None else timeout_ms / 1000)

    async def _call(
        self,
        target: Target,
        api: Api[Request, Response],
        request: Request,
        deadline: Deadline,
        errors: Callable[[Response], Iterable[int]] | None = top_error,
    ) -> Response:
        return await self.cluster.call(target, api, request, timeout_s=deadline.remaining_s(), errors=errors)

    async def _call_all(self, api: Api[Request, Response], request: Request, deadline: Deadline) -> list[Response]:
        """The response of every broker."""
        await self.cluster.retry(lambda: self.cluster.refresh([], deadline), "looking up the brokers", deadline)
        node_ids = sorted(self.cluster.metadata.brokers)
        return [await self._call(NodeTarget(node_id), api, request, deadline) for node_id in node_ids]


def admin_settings(options: Mapping[str, Any] | ClientSettings | None, keywords: dict[str, Any]) -> ClientSettings:
    """Options by Kafka's names, as the constructors of the admin clients take them."""
    keywords = {"allow_auto_create_topics": False, **keywords}  # looking a topic up must not create it
    if isinstance(options, ClientSettings):
        return options.common(**keywords)
    return ClientSettings.of(options, **keywords)


def listed(names: Iterable[str] | str) -> list[str]:
    """One name may be given as it is: its letters are never meant."""
    return [names] if isinstance(names, str) else list(names)
