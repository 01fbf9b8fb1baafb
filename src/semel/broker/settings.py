"""The broker's settings: Kafka's names, types, limits and defaults, in one table. What means nothing here is refused.

Defaults differ from Kafka's only where one node on a laptop wants another; those rows say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


class SettingError(Exception):
    """A setting that is unknown, means nothing here, or has a value that cannot be."""


class Setting(NamedTuple):
    """One row: how a setting is read and what it does."""

    name: str
    kind: str  # "int", "long", "short", "double", "boolean", "string", "list"
    default: Any  # None: not set
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    dynamic: bool = False  # may be altered while the broker runs
    topic: str | None = None  # the topic setting whose default this is

    def parse(self, text: str) -> Any:
        text = text.strip()
        try:
            value = _PARSERS[self.kind](text)
        except ValueError:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {self._expected()}") from None
        problem = self._problem(value)
        if problem:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {problem}")
        return value

    def _expected(self) -> str:
        if self.kind == "boolean":
            return "Expected value to be either true or false"
        return f"Not a number of type {self.kind.upper()}"

    def _problem(self, value: Any) -> str | None:
        if self.choices:
            words = value if isinstance(value, tuple) else (value,)
            is_right = all(str(word) in self.choices for word in words)
            return None if is_right else f"String must be one of: {', '.join(self.choices)}"
        if self.minimum is not None and value < self.minimum:
            return f"Value must be at least {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"Value must be no more than {self.maximum}"
        return None


def _parse_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_PARSERS: dict[str, Any] = {
    "int": int,
    "long": int,
    "short": int,
    "double": float,
    "boolean": _parse_boolean,
    "string": str,
    "list": lambda text: tuple(word.strip() for word in text.split(",") if word.strip()),
}


def as_text(value: Any) -> str | None:
    """A value as configuration files and DescribeConfigs write it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


_COMPRESSIONS = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_ONE_REPLICA = "There is one node: the only possible value is 1 (Kafka's default is 3)."


_GENERAL = (
    Setting("node.id", "int", 1, "The broker's id in metadata.", 0, INT32_MAX),
    Setting("broker.id", "int", None, "Older name of node.id.", 0, INT32_MAX),
    Setting("broker.rack", "string", None, "The rack that metadata shows for the broker."),
    Setting("listeners", "list", ("PLAINTEXT://127.0.0.1:9092",), "Where the broker listens; PLAINTEXT only."),
    Setting("advertised.listeners", "list", None, "Host and port that clients are told; by default the listener."),
    Setting("log.dirs", "string", None, "The data folder (one)."),
    Setting("log.dir", "string", None, "Other name of log.dirs."),
    Setting(
        "fsync",
        "string",
        "commit",
        "commit: on disk before it is acknowledged; os: as a stock Kafka node.",
        choices=("commit", "os"),
    ),
    Setting("num.partitions", "int", 1, "Partitions of a topic that is created without a number.", 1, INT32_MAX),
    Setting("default.replication.factor", "int", 1, _ONE_REPLICA, 1, 1),
    Setting("auto.create.topics.enable", "boolean", True, "Create a topic when a client asks for its metadata."),
    Setting("delete.topic.enable", "boolean", True, "Allow topics to be deleted."),
    Setting(
        "message.max.bytes",
        "int",
        1_048_588,
        "The largest record batch that a topic takes.",
        0,
        INT32_MAX,
        dynamic=True,
        topic="max.message.bytes",
    ),
    Setting(
        "min.insync.replicas",
        "int",
        1,
        "As in Kafka never more than a topic's replicas, so here 1.",
        1,
        INT32_MAX,
        dynamic=True,
        topic="min.insync.replicas",
    ),
    Setting(
        "unclean.leader.election.enable",
        "boolean",
        False,
        "One replica: no election ever happens.",
        dynamic=True,
        topic="unclean.leader.election.enable",
    ),
    Setting("fetch.max.bytes", "int", 57_671_680, "The most that one fetch answer holds.", 1024, INT32_MAX),
    Setting(
        "max.incremental.fetch.session.cache.slots", "int", 1000, "Fetch sessions that are remembered.", 0, INT32_MAX
    ),
    Setting(
        "max.request.partition.size.limit",
        "int",
        2000,
        "The most partitions in one DescribeTopicPartitions answer.",
        1,
        INT32_MAX,
    ),
)

_SOCKET = (
    Setting("socket.request.max.bytes", "int", 104_857_600, "A larger request closes its connection.", 1, INT32_MAX),
    Setting("socket.send.buffer.bytes", "int", -1, "SO_SNDBUF; -1: the system's (Kafka: 102400).", -1, INT32_MAX),
    Setting("socket.receive.buffer.bytes", "int", -1, "SO_RCVBUF; -1: the system's (Kafka: 102400).", -1, INT32_MAX),
    Setting("socket.listen.backlog.size", "int", 50, "Connections waiting to be accepted.", 1, INT32_MAX),
    Setting(
        "connections.max.idle.ms",
        "long",
        600_000,
        "Idle connections are closed after this time; -1: never.",
        -1,
        INT64_MAX,
    ),
    Setting("max.connections", "int", INT32_MAX, "More connections are closed at once.", 0, INT32_MAX, dynamic=True),
    Setting(
        "max.connections.per.ip", "int", INT32_MAX, "The same, for each client address.", 0, INT32_MAX, dynamic=True
    ),
)

_LOG = (
    Setting(
        "log.segment.bytes",
        "int",
        1_073_741_824,
        "Size at which a new segment starts.",
        1_048_576,
        INT32_MAX,
        dynamic=True,
        topic="segment.bytes",
    ),
    Setting("log.roll.hours", "int", 168, "Age at which a new segment starts.", 1, INT32_MAX),
    Setting("log.roll.ms", "long", None, "The same in milliseconds.", 1, INT64_MAX, dynamic=True, topic="segment.ms"),
    Setting("log.roll.jitter.hours", "int", 0, "Random part of the rolling time.", 0, INT32_MAX),
    Setting(
        "log.roll.jitter.ms",
        "long",
        None,
        "The same in milliseconds.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="segment.jitter.ms",
    ),
    Setting("log.retention.hours", "int", 168, "How long records are kept; -1: for ever.", -1, INT32_MAX),
    Setting("log.retention.minutes", "int", None, "The same in minutes.", -1, INT32_MAX),
    Setting(
        "log.retention.ms",
        "long",
        None,
        "The same in milliseconds.",
        -1,
        INT64_MAX,
        dynamic=True,
        topic="retention.ms",
    ),
    Setting(
        "log.retention.bytes",
        "long",
        -1,
        "Size of a partition above which old segments go; -1: no limit.",
        dynamic=True,
        topic="retention.bytes",
    ),
    Setting(
        "log.retention.check.interval.ms", "long", 300_000, "How often retention and compaction look.", 1, INT64_MAX
    ),
    Setting(
        "log.cleanup.policy",
        "list",
        ("delete",),
        "What happens to old segments.",
        choices=("compact", "delete"),
        dynamic=True,
        topic="cleanup.policy",
    ),
    Setting("log.cleaner.enable", "boolean", True, "Compact topics whose policy says so."),
    Setting("log.cleaner.backoff.ms", "long", 15_000, "Pause between looks for logs to compact.", 0, INT64_MAX),
    Setting(
        "log.cleaner.delete.retention.ms",
        "long",
        DAY_MS,
        "How long tombstones are kept.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="delete.retention.ms",
    ),
    Setting(
        "log.cleaner.min.compaction.lag.ms",
        "long",
        0,
        "Age before which a record is not compacted.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="min.compaction.lag.ms",
    ),
    Setting(
        "log.cleaner.max.compaction.lag.ms",
        "long",
        INT64_MAX,
        "Age at which a record must be compacted.",
        1,
        INT64_MAX,
        dynamic=True,
        topic="max.compaction.lag.ms",
    ),
    Setting(
        "log.cleaner.min.cleanable.ratio",
        "double",
        0.5,
        "Part of a log that must be dirty to compact it.",
        0,
        1,
        dynamic=True,
        topic="min.cleanable.dirty.ratio",
    ),
    Setting(
        "log.index.interval.bytes",
        "int",
        4096,
        "Bytes between two index entries.",
        0,
        INT32_MAX,
        dynamic=True,
        topic="index.interval.bytes",
    ),
    Setting(
        "log.index.size.max.bytes",
        "int",
        10_485_760,
        "The largest index.",
        4,
        INT32_MAX,
        dynamic=True,
        topic="segment.index.bytes",
    ),
    Setting(
        "log.message.timestamp.type",
        "string",
        "CreateTime",
        "Whose time records carry.",
        choices=("CreateTime", "LogAppendTime"),
        dynamic=True,
        topic="message.timestamp.type",
    ),
    Setting(
        "log.message.timestamp.before.max.ms",
        "long",
        INT64_MAX,
        "How far a timestamp may lie in the past.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="message.timestamp.before.max.ms",
    ),
    Setting(
        "log.message.timestamp.after.max.ms",
        "long",
        HOUR_MS,
        "How far a timestamp may lie in the future.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="message.timestamp.after.max.ms",
    ),
    Setting(
        "log.segment.delete.delay.ms",
        "long",
        60_000,
        "How long files of deleted segments stay.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="file.delete.delay.ms",
    ),
    Setting(
        "log.flush.interval.messages",
        "long",
        INT64_MAX,
        "With fsync=os: records after which a log is flushed.",
        1,
        INT64_MAX,
        dynamic=True,
        topic="flush.messages",
    ),
    Setting(
        "log.flush.interval.ms",
        "long",
        None,
        "With fsync=os: time after which a log is flushed.",
        0,
        INT64_MAX,
        dynamic=True,
        topic="flush.ms",
    ),
    Setting(
        "compression.type",
        "string",
        "producer",
        "Shown only: batches stay as the producer compressed them.",
        choices=_COMPRESSIONS,
        dynamic=True,
        topic="compression.type",
    ),
    Setting(
        "producer.id.expiration.ms",
        "int",
        DAY_MS,
        "Idle producers are forgotten after this time.",
        1,
        INT32_MAX,
        dynamic=True,
    ),
    Setting(
        "producer.id.expiration.check.interval.ms",
        "int",
        600_000,
        "How often idle producers are looked for.",
        1,
        INT32_MAX,
    ),
)

_GROUP = (
    Setting(
        "group.initial.rebalance.delay.ms",
        "int",
        0,
        "Wait for more members before the first rebalance (Kafka's default is 3000).",
        0,
        INT32_MAX,
    ),
    Setting("group.min.session.timeout.ms", "int", 6000, "The shortest session time-out.", 0, INT32_MAX),
    Setting("group.max.session.timeout.ms", "int", 1_800_000, "The longest session time-out.", 0, INT32_MAX),
    Setting("group.max.size", "int", INT32_MAX, "The most members of a group.", 1, INT32_MAX),
    Setting(
        "group.coordinator.rebalance.protocols",
        "list",
        ("classic", "consumer"),
        "Group protocols that are served.",
        choices=("classic", "consumer"),
    ),
    Setting("group.version", "short", 1, "Feature level: 1 offers the consumer protocol (KIP-848).", 0, 1),
    Setting("group.consumer.session.timeout.ms", "int", 45_000, "KIP-848: session time-out.", 1, INT32_MAX),
    Setting("group.consumer.min.session.timeout.ms", "int", 45_000, "KIP-848: its lower limit.", 1, INT32_MAX),
    Setting("group.consumer.max.session.timeout.ms", "int", 60_000, "KIP-848: its upper limit.", 1, INT32_MAX),
    Setting("group.consumer.heartbeat.interval.ms", "int", 5000, "KIP-848: heartbeat interval.", 1, INT32_MAX),
    Setting("group.consumer.min.heartbeat.interval.ms", "int", 5000, "KIP-848: its lower limit.", 1, INT32_MAX),
    Setting("group.consumer.max.heartbeat.interval.ms", "int", 15_000, "KIP-848: its upper limit.", 1, INT32_MAX),
    Setting("group.consumer.max.size", "int", INT32_MAX, "KIP-848: the most members of a group.", 1, INT32_MAX),
    Setting(
        "group.consumer.assignors",
        "list",
        ("uniform", "range"),
        "KIP-848: assignors, the first by default.",
        choices=("uniform", "range"),
    ),
    Setting("offset.metadata.max.bytes", "int", 4096, "The largest note with a committed position.", 0, INT32_MAX),
    Setting("offsets.retention.minutes", "int", 10_080, "How long positions of an empty group are kept.", 1),
    Setting(
        "offsets.retention.check.interval.ms", "long", 600_000, "How often old positions are looked for.", 1, INT64_MAX
    ),
    Setting("offsets.topic.num.partitions", "int", 50, "Partitions of __consumer_offsets.", 1, INT32_MAX),
    Setting(
        "offsets.topic.segment.bytes", "int", 104_857_600, "Segment size of __consumer_offsets.", 1_048_576, INT32_MAX
    ),
    Setting("offsets.topic.replication.factor", "short", 1, _ONE_REPLICA, 1, 1),
)

_TRANSACTION = (
    Setting("transaction.max.timeout.ms", "int", 900_000, "The longest time-out of a transaction.", 1, INT32_MAX),
    Setting(
        "transactional.id.expiration.ms",
        "int",
        7 * DAY_MS,
        "Idle transactional ids are forgotten after this time.",
        1,
        INT32_MAX,
    ),
    Setting("transaction.state.log.num.partitions", "int", 50, "Partitions of __transaction_state.", 1, INT32_MAX),
    Setting(
        "transaction.state.log.segment.bytes",
        "int",
        104_857_600,
        "Segment size of __transaction_state.",
        1_048_576,
        INT32_MAX,
    ),
    Setting("transaction.state.log.replication.factor", "short", 1, _ONE_REPLICA, 1, 1),
    Setting("transaction.state.log.min.isr", "int", 1, _ONE_REPLICA.replace("3", "2"), 1, 1),
    Setting(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        "int",
        10_000,
        "How often transactions beyond their time-out are looked for.",
        1,
        INT32_MAX,
    ),
    Setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        "int",
        3_600_000,
        "How often expired transactional ids are looked for.",
        1,
        INT32_MAX,
    ),
    Setting(
        "transaction.partition.verification.enable",
        "boolean",
        True,
        "Ask the coordinator before the first write of a transaction to a partition.",
        dynamic=True,
    ),
    Setting("transaction.version", "short", 2, "Feature level: 2 is TV2 (KIP-890), below that TV1.", 0, 2),
)

TABLE: dict[str, Setting] = {row.name: row for row in (*_GENERAL, *_SOCKET, *_LOG, *_GROUP, *_TRANSACTION)}

_ONE_NODE = "there is one node"
_NO_THREADS = "the broker is one event loop"
_NO_SECURITY = "there is no security layer; listen on loopback or put a proxy in front"
# Kafka has these, here they cannot mean anything: name or prefix (ending in a dot), and why.
MEANINGLESS: dict[str, str] = {
    "zookeeper.": "there is no ZooKeeper",
    "controller.": _ONE_NODE,
    "process.roles": "one process is broker and controller",
    "inter.broker.": _ONE_NODE,
    "security.inter.broker.protocol": _ONE_NODE,
    "listener.security.protocol.map": _NO_SECURITY,
    "listener.name.": _NO_SECURITY,
    "ssl.": _NO_SECURITY,
    "sasl.": _NO_SECURITY,
    "authorizer.class.name": _NO_SECURITY,
    "super.users": _NO_SECURITY,
    "delegation.token.": _NO_SECURITY,
    "password.": _NO_SECURITY,
    "principal.builder.class": _NO_SECURITY,
    "allow.everyone.if.no.acl.found": _NO_SECURITY,
    "replica.": _ONE_NODE,
    "num.replica.fetchers": _ONE_NODE,
    "num.replica.alter.log.dirs.threads": _ONE_NODE,
    "leader.": _ONE_NODE,
    "follower.": _ONE_NODE,
    "auto.leader.rebalance.enable": _ONE_NODE,
    "controlled.shutdown.": _ONE_NODE,
    "broker.heartbeat.interval.ms": _ONE_NODE,
    "broker.session.timeout.ms": _ONE_NODE,
    "initial.broker.registration.timeout.ms": _ONE_NODE,
    "reserved.broker.max.id": _ONE_NODE,
    "eligible.leader.replicas.enable": _ONE_NODE,
    "metadata.": "topics are kept in a file, not in a metadata log",
    "num.network.threads": _NO_THREADS,
    "num.io.threads": _NO_THREADS,
    "background.threads": _NO_THREADS,
    "num.recovery.threads.per.data.dir": _NO_THREADS,
    "log.cleaner.threads": _NO_THREADS,
    "log.cleaner.io.": "compaction works in small steps and needs no limits",
    "log.cleaner.dedupe.buffer.size": "compaction sizes its map by the log",
    "queued.max.": "back-pressure is per connection",
    "remote.": "there is no tiered storage",
    "remote.log.": "there is no tiered storage",
    "log.local.retention.": "there is no tiered storage",
    "log.preallocate": "files grow as they are written",
    "log.flush.scheduler.interval.ms": "flushing follows fsync and log.flush.interval",
    "log.flush.offset.checkpoint.interval.ms": "checkpoints are written by the maintenance round",
    "log.flush.start.offset.checkpoint.interval.ms": "checkpoints are written by the maintenance round",
    "log.dir.failure.timeout.ms": "there is one data folder",
    "early.start.listeners": "there is one listener",
    "client.quota.": "there are no quotas",
    "quota.": "there are no quotas",
    "alter.config.policy.class.name": "there are no plug-ins",
    "create.topic.policy.class.name": "there are no plug-ins",
    "metric.reporters": "metrics are Prometheus's (--metrics HOST:PORT)",
    "metrics.": "metrics are Prometheus's (--metrics HOST:PORT)",
    "auto.include.jmx.reporter": "there is no JMX",
    "telemetry.": "client telemetry is not taken",
    "group.share.": "share groups are not served",
    "share.": "share groups are not served",
    "group.streams.": "streams groups are not served",
    "group.coordinator.threads": _NO_THREADS,
    "group.coordinator.append.linger.ms": "positions are written at once; the fsync is shared",
    "group.consumer.migration.policy": "a group changes its protocol when it has no members",
    "offsets.commit.timeout.ms": _ONE_NODE,
    "offsets.load.buffer.size": "positions are read in fixed steps",
    "offsets.topic.compression.codec": "internal topics are not compressed",
    "transaction.state.log.load.buffer.size": "transactions are read in fixed steps",
    "transaction.two.phase.commit.enable": "two-phase commit by others is not served",
    "max.connection.creation.rate": "there are no quotas",
    "max.connections.per.ip.overrides": "one limit holds for every address",
    "connection.failed.authentication.delay.ms": _NO_SECURITY,
    "connections.max.reauth.ms": _NO_SECURITY,
    "request.timeout.ms": _ONE_NODE,
    "unstable.": "there are no unstable versions",
}


def refusal_of(name: str) -> str | None:
    """Why a setting of Kafka means nothing here; None if it is not in that list."""
    for prefix, reason in MEANINGLESS.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return reason
    return None


def row_of(name: str) -> Setting:
    """The row of a setting, or SettingError that says by name what is wrong with it."""
    row = TABLE.get(name)
    if row is not None:
        return row
    reason = refusal_of(name)
    if reason is not None:
        raise SettingError(f"setting {name} means nothing to this broker: {reason}; take it out")
    from difflib import get_close_matches

    close = get_close_matches(name, TABLE, 1)
    raise SettingError(f"unknown setting {name}" + (f"; did you mean {close[0]}?" if close else ""))


class Settings:
    """The settings of a running broker. The strongest first: altered for this broker, altered for the cluster, given
    at the start, default."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._given: dict[str, Any] = {name: row_of(name).parse(text) for name, text in (given or {}).items()}
        self._altered: dict[str, Any] = {}
        self._cluster: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The value, in its own type; None where there is none. An unknown name is a bug."""
        for layer in (self._altered, self._cluster, self._given):
            if name in layer:
                return layer[name]
        return TABLE[name].default

    def given(self, name: str) -> Any:
        """What the broker was started with, or None."""
        return self._given.get(name)

    def altered(self, name: str) -> Any:
        """What was altered since for this broker, or None."""
        return self._altered.get(name)

    def altered_for_cluster(self, name: str) -> Any:
        """What was altered since for all brokers, or None."""
        return self._cluster.get(name)

    def replace_altered(self, texts: Mapping[str, str], *, for_cluster: bool = False) -> None:
        """Takes over all settings that were altered at run time. SettingError: nothing changed."""
        values = parse_dynamic(texts)
        if for_cluster:
            self._cluster = values
        else:
            self._altered = values

    @property
    def node_id(self) -> int:
        value: int = self["broker.id"] if self["broker.id"] is not None else self["node.id"]
        return value


def parse_dynamic(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values of settings that may be altered at run time."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        row = row_of(name)
        if not row.dynamic:
            raise SettingError(f"setting {name} can only be given at the start of the broker")
        values[name] = row.parse(text)
    return values


def read_properties(lines: Iterable[str]) -> dict[str, str]:
    """A file of `name=value` lines, as server.properties; # and ! start comments."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text[0] in "#!":
            continue
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"line {number} is {text!r}; expected name=value")
        found[name.strip()] = value.strip()
    return found
