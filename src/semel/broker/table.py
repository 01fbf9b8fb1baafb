"""The one table of APIs: which versions are served, by which handler. The docs page is generated from it.

`python -m semel.broker.table` prints docs/protocol-support.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """An API as this broker serves it.

    `handler` is "module:function", loaded at its first request so that the broker starts fast. The function gets
    (broker, context, request) and returns the response, a future of it, or is a coroutine function; None is no answer.
    """

    key: int
    min_version: int
    max_version: int
    handler: str
    note: str = ""
    min_served: int | None = None  # advertised from min_version, but served from here on (others: UNSUPPORTED_VERSION)
    pipelined: bool = False  # may start while earlier requests of its kind on the connection wait for their answer


TABLE: dict[int, Row] = {
    row.key: row
    for row in (
        Row(0, 0, 13, "semel.broker.handlers.produce:produce", min_served=3, pipelined=True),
        Row(1, 4, 18, "semel.broker.handlers.fetch:fetch"),
        Row(2, 1, 11, "semel.broker.handlers.list_offsets:list_offsets"),
        Row(3, 0, 13, "semel.broker.handlers.metadata:metadata"),
        Row(10, 0, 6, "semel.broker.handlers.find_coordinator:find_coordinator"),
        Row(18, 0, 4, "semel.broker.handlers.api_versions:api_versions"),
    )
}
