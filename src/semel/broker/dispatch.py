"""From a request's key to the code that handles it: versions are checked here, handlers are loaded at first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.broker.counters import Latencies
from semel.broker.table import TABLE, Row
from semel.protocol.api import Api
from semel.protocol.apis import api_of
from semel.protocol.batch import Buffer
from semel.protocol.errors import UnsupportedVersionError
from semel.protocol.schema import Struct

if TYPE_CHECKING:
    from semel.broker.connection import Connection


LONGEST_SHOWN_ID = 100


class RequestContext(NamedTuple):
    """The envelope of one request."""

    api_key: int
    version: int
    client_id: str | None
    client_host: str  # as Kafka shows it: "/127.0.0.1"
    connection: Connection | None  # None in tests

    @property
    def client(self) -> str:
        """Who sent it, for people."""
        return f"{(self.client_id or '')[:LONGEST_SHOWN_ID]} {self.client_host}".strip()


HandlerResult = Struct | asyncio.Future[Struct | None] | Coroutine[Any, Any, Struct | None] | None
Handler = Callable[[Any, RequestContext, Any], HandlerResult]


class Served:
    """A row of the table, ready to be called."""

    def __init__(self, row: Row) -> None:
        self.api: Api[Any, Any] = api_of(row.key)
        self.name = self.api.name
        self.min_version = row.min_version if row.min_served is None else row.min_served
        self.max_version = row.max_version
        self.pipelined = row.pipelined
        self.cancel_on_disconnect = row.cancel_on_disconnect
        self.latencies = Latencies()  # from request to response
        module, _, function = row.handler.partition(":")
        self.handler: Handler = getattr(import_module(f"semel.broker.{module}"), function)

    def decode(self, frame: Buffer, version: int, at: int) -> Any:
        """The request. Bytes after it are ignored, as Kafka does: librdkafka's Metadata for all topics has three."""
        return self.api.request.decode_from(frame, version, at)[0]


class Dispatcher:
    """The APIs in use so far."""

    def __init__(self, setting: Callable[[str], Any]) -> None:
        """`setting(name)` is the value of a broker setting."""
        self._setting = setting
        self.served: dict[int, Served] = {}

    def find(self, api_key: int, version: int) -> Served:
        """The handler of a request. UnsupportedVersionError: there is none."""
        served = self.served.get(api_key)
        if served is None:
            row = TABLE.get(api_key)
            if row is None:
                raise UnsupportedVersionError(f"API {api_key} is not served")
            served = self.served[api_key] = Served(row.with_settings(self._setting))
        if not served.min_version <= version <= served.max_version:
            raise UnsupportedVersionError(
                f"{served.name} is served in versions {served.min_version}-{served.max_version}, not {version}"
            )
        return served
