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
        Row(8, 2, 10, "semel.broker.groups.handlers.positions:offset_commit"),
        Row(9, 1, 10, "semel.broker.groups.handlers.positions:offset_fetch"),
        Row(10, 0, 6, "semel.broker.handlers.find_coordinator:find_coordinator"),
        Row(11, 0, 9, "semel.broker.groups.handlers.membership:join_group"),
        Row(12, 0, 4, "semel.broker.groups.handlers.membership:heartbeat"),
        Row(13, 0, 5, "semel.broker.groups.handlers.membership:leave_group"),
        Row(14, 0, 5, "semel.broker.groups.handlers.membership:sync_group"),
        Row(15, 0, 6, "semel.broker.groups.handlers.admin:describe_groups"),
        Row(16, 0, 5, "semel.broker.groups.handlers.admin:list_groups"),
        Row(18, 0, 4, "semel.broker.handlers.api_versions:api_versions"),
        Row(42, 0, 2, "semel.broker.groups.handlers.admin:delete_groups"),
        Row(47, 0, 0, "semel.broker.groups.handlers.positions:offset_delete"),
        Row(22, 0, 5, "semel.broker.transactions.handlers:init_producer_id"),
        Row(
            24, 0, 5, "semel.broker.transactions.handlers:add_partitions_to_txn", "from version 4 on meant for brokers"
        ),
        Row(25, 0, 4, "semel.broker.transactions.handlers:add_offsets_to_txn"),
        Row(26, 0, 5, "semel.broker.transactions.handlers:end_txn"),
        Row(
            27,
            1,
            2,
            "semel.broker.transactions.handlers:write_txn_markers",
            "for operators: ends a hanging transaction",
        ),
        Row(28, 0, 5, "semel.broker.transactions.handlers:txn_offset_commit"),
        Row(65, 0, 0, "semel.broker.transactions.handlers:describe_transactions"),
        Row(66, 0, 2, "semel.broker.transactions.handlers:list_transactions"),
    )
}
