"""From a request's key to the code that handles it: versions are checked here, handlers are loaded at first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.broker.counters import Latencies
from semel.protocol.api import Api, api_of
from semel.protocol.batch import Buffer
from semel.protocol.errors import UnsupportedVersionError
from semel.protocol.schema import Struct

if TYPE_CHECKING:
    from semel.broker.connection import Connection

# --- The one table of APIs: which versions are served, by which handler. The docs page is generated from it ---
#
# `python -m semel.broker.dispatch` prints docs/protocol-support.md.


class Row(NamedTuple):
    """An API as this broker serves it.

    `handler` is "module:function", in semel.broker, loaded at its first request so that the broker starts fast. The
    function gets (broker, context, request) and returns the response, a future of it, or is a coroutine function; None
    is no response.
    """

    key: int
    min_version: int
    max_version: int
    handler: str
    note: str = ""
    min_served: int | None = None  # advertised from min_version, but served from here on (others: UNSUPPORTED_VERSION)
    pipelined: bool = False  # may start while earlier requests of its kind on the connection wait for their response
    cancel_on_disconnect: bool = False  # ends with its connection; anything that changes something goes on to its end
    higher: tuple[str, int] | None = None  # a setting that is off, and the highest version where it is on

    def with_settings(self, setting: Callable[[str], Any]) -> Row:
        """The row of a broker with these settings."""
        if self.higher is None or not setting(self.higher[0]):
            return self
        return self._replace(max_version=self.higher[1])


_NO_SECURITY = "no security layer: ILLEGAL_SASL_STATE, as on a PLAINTEXT listener"
_NO_TOKENS = "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, as on a PLAINTEXT listener"
_NO_SASL = "kept, but there is no SASL listener to log in to"
_NO_ACLS = "no authorizer: SECURITY_DISABLED"

TABLE: dict[int, Row] = {
    row.key: row
    for row in (
        Row(0, 0, 13, "handlers.produce:produce", "record batches of format 2", min_served=3, pipelined=True),
        Row(1, 4, 18, "handlers.fetch:fetch", cancel_on_disconnect=True),
        Row(2, 1, 11, "handlers.logs:list_offsets"),
        Row(3, 0, 13, "handlers.metadata:metadata"),
        Row(8, 2, 10, "groups.handlers:offset_commit"),
        Row(9, 1, 10, "groups.handlers:offset_fetch"),
        Row(10, 0, 6, "handlers.metadata:find_coordinator"),
        Row(11, 0, 9, "groups.handlers:join_group"),
        Row(12, 0, 4, "groups.handlers:heartbeat"),
        Row(13, 0, 5, "groups.handlers:leave_group"),
        Row(14, 0, 5, "groups.handlers:sync_group"),
        Row(15, 0, 6, "groups.handlers:describe_groups"),
        Row(16, 0, 5, "groups.handlers:list_groups"),
        Row(17, 0, 1, "handlers.security:sasl_handshake", _NO_SECURITY),
        Row(19, 2, 7, "handlers.topics:create_topics"),
        Row(20, 1, 6, "handlers.topics:delete_topics"),
        Row(21, 0, 2, "handlers.logs:delete_records"),
        Row(23, 2, 4, "handlers.logs:offset_for_leader_epoch"),
        Row(29, 1, 3, "handlers.security:describe_acls", _NO_ACLS),
        Row(30, 1, 3, "handlers.security:create_acls", _NO_ACLS),
        Row(31, 1, 3, "handlers.security:delete_acls", _NO_ACLS),
        Row(32, 1, 4, "handlers.configs:describe_configs"),
        Row(33, 0, 2, "handlers.configs:alter_configs"),
        Row(34, 1, 2, "handlers.topics:alter_replica_log_dirs", "there is one data folder"),
        Row(38, 1, 3, "handlers.security:create_delegation_token", _NO_TOKENS),
        Row(39, 1, 2, "handlers.security:renew_delegation_token", _NO_TOKENS),
        Row(40, 1, 2, "handlers.security:expire_delegation_token", _NO_TOKENS),
        Row(41, 1, 3, "handlers.security:describe_delegation_token", _NO_TOKENS),
        Row(55, 0, 2, "handlers.cluster:describe_quorum", "this node alone"),
        Row(64, 0, 0, "handlers.cluster:unregister_broker", "there is one node"),
        Row(35, 1, 5, "handlers.topics:describe_log_dirs"),
        Row(36, 0, 2, "handlers.security:sasl_authenticate", _NO_SECURITY),
        Row(37, 0, 3, "handlers.topics:create_partitions"),
        Row(43, 0, 2, "handlers.topics:elect_leaders", "one replica: ELECTION_NOT_NEEDED"),
        Row(44, 0, 1, "handlers.configs:incremental_alter_configs"),
        Row(45, 0, 1, "handlers.topics:alter_partition_reassignments", "to this node only"),
        Row(46, 0, 0, "handlers.topics:list_partition_reassignments", "there is never one"),
        Row(48, 0, 1, "handlers.configs:describe_client_quotas"),
        Row(49, 0, 1, "handlers.configs:alter_client_quotas", "enforced: byte rates of producers and consumers"),
        Row(50, 0, 0, "handlers.security:describe_user_scram_credentials"),
        Row(51, 0, 0, "handlers.security:alter_user_scram_credentials", _NO_SASL),
        Row(57, 0, 2, "handlers.cluster:update_features", "transaction.version, group.version"),
        Row(60, 0, 2, "handlers.metadata:describe_cluster"),
        Row(61, 0, 0, "handlers.logs:describe_producers"),
        Row(74, 0, 1, "handlers.configs:list_config_resources"),
        Row(75, 0, 0, "handlers.metadata:describe_topic_partitions"),
        Row(18, 0, 4, "handlers.cluster:api_versions"),
        Row(42, 0, 2, "groups.handlers:delete_groups"),
        Row(47, 0, 0, "groups.handlers:offset_delete"),
        Row(22, 0, 5, "transactions.handlers:init_producer_id", higher=("transaction.two.phase.commit.enable", 6)),
        Row(24, 0, 5, "transactions.handlers:add_partitions_to_txn", "from version 4 on meant for brokers"),
        Row(25, 0, 4, "transactions.handlers:add_offsets_to_txn"),
        Row(26, 0, 5, "transactions.handlers:end_txn"),
        Row(27, 1, 2, "transactions.handlers:write_txn_markers", "for operators: ends a hanging transaction"),
        Row(28, 0, 5, "transactions.handlers:txn_offset_commit"),
        Row(65, 0, 0, "transactions.handlers:describe_transactions"),
        Row(68, 0, 1, "groups.handlers:consumer_group_heartbeat", "KIP-848"),
        Row(69, 0, 1, "groups.handlers:consumer_group_describe"),
        Row(66, 0, 2, "transactions.handlers:list_transactions"),
        Row(
            20000,
            0,
            0,
            "transactions.handlers:describe_transaction_events",
            "not in Kafka: the last steps of transactions, for `semel trace`",
        ),
    )
}


# What Kafka serves to clients and this broker does not, and why. ApiVersions leaves them out.
NOT_SERVED: dict[int, tuple[str, str]] = {
    71: ("GetTelemetrySubscriptions", "client telemetry is not taken"),
    72: ("PushTelemetry", "client telemetry is not taken"),
    76: ("ShareGroupHeartbeat", "share groups are not served"),
    77: ("ShareGroupDescribe", "share groups are not served"),
    78: ("ShareFetch", "share groups are not served"),
    79: ("ShareAcknowledge", "share groups are not served"),
    88: ("StreamsGroupHeartbeat", "streams groups are not served"),
    89: ("StreamsGroupDescribe", "streams groups are not served"),
}


def markdown() -> str:
    """docs/protocol-support.md."""
    from semel.protocol.api import NAMES

    lines = [
        "# Protocol support",
        "",
        "Generated by `python -m semel.broker.dispatch`; do not edit.",
        "",
        "Versions are those of Apache Kafka 4.3. A request in another version closes the connection, as in Kafka; an",
        "ApiVersions request from the future gets UNSUPPORTED_VERSION and the versions that may be used.",
        "",
        "| key | API | versions | note |",
        "|---|---|---|---|",
    ]
    for key, row in sorted(TABLE.items()):
        notes = [row.note] if row.note else []
        if row.min_served is not None:
            notes.append(f"served from version {row.min_served} on; older ones are advertised as Kafka does")
        if row.higher is not None:
            notes.append(f"up to version {row.higher[1]} with `{row.higher[0]}=true`")
        lines.append(f"| {key} | {NAMES[key]} | {row.min_version}-{row.max_version} | {'; '.join(notes)} |")
    lines += ["", "## Not served", "", "| key | API | why |", "|---|---|---|"]
    lines += [f"| {key} | {name} | {why} |" for key, (name, why) in sorted(NOT_SERVED.items()) if key not in TABLE]
    return "\n".join(lines) + "\n"


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


if __name__ == "__main__":
    print(markdown(), end="")
