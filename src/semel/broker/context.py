"""What a handler knows about a request besides its body."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from semel.broker.connection import Connection


class RequestContext(NamedTuple):
    """The envelope of one request."""

    api_key: int
    version: int
    client_id: str | None
    client_host: str  # as Kafka shows it: "/127.0.0.1"
    connection: Connection | None  # None in tests
    principal: str = "User:ANONYMOUS"
