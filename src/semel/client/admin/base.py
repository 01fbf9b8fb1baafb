"""What all parts of the admin client share: its connections, and calls with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from semel.client.closing import Closing
from semel.client.cluster import Cluster, NodeTarget, Request, Response, Target, top_error
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.protocol.api import Api


class AdminBase(Closing):
    def __init__(self, options: Mapping[str, Any] | ClientSettings | None = None, /, **keywords: Any) -> None:
        """Options by Kafka's names: `{"bootstrap.servers": "..."}` or `bootstrap_servers="..."`."""
        keywords = {"allow_auto_create_topics": False, **keywords}  # looking a topic up must not create it
        if isinstance(options, ClientSettings):
            self.settings = options.common(**keywords)
        else:
            self.settings = ClientSettings.of(options, **keywords)
        self._cluster = Cluster(self.settings)

    def close(self) -> None:
        self._cluster.close()

    def _deadline(self, timeout_ms: float | None) -> Deadline:
        return self._cluster.deadline(None if timeout_ms is None else timeout_ms / 1000)

    def _call(
        self,
        target: Target,
        api: Api[Request, Response],
        request: Request,
        deadline: Deadline,
        errors: Callable[[Response], Iterable[int]] | None = top_error,
    ) -> Response:
        return self._cluster.call(target, api, request, timeout_s=deadline.remaining_s(), errors=errors)

    def _call_all(self, api: Api[Request, Response], request: Request, deadline: Deadline) -> Iterator[Response]:
        """The response of every broker."""
        self._cluster.retry(lambda: self._cluster.refresh([], deadline), "looking up the brokers", deadline)
        for node_id in sorted(self._cluster.metadata.brokers):
            yield self._call(NodeTarget(node_id), api, request, deadline)


def listed(names: Iterable[str] | str) -> list[str]:
    """One name may be given as it is: its letters are never meant."""
    return [names] if isinstance(names, str) else list(names)
