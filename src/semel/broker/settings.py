"""The settings of a running broker: what it was started with, and what was altered since."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple


# --- One setting: how it is read, what it may be, and how it is written ---
class SettingError(Exception):
    """A setting that is unknown, means nothing here, or has a value that cannot be."""


class Setting(NamedTuple):
    """One row: how a setting is read and what it does."""

    name: str
    kind: str  # "int", "long", "short", "double", "boolean", "string", "list", "class", "password"
    default: Any  # None: not set
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    dynamic: bool = False  # may be altered while the broker runs
    topic: str | None = None  # the topic setting whose default this is
    no_effect: str = ""  # why Kafka's setting is accepted, kept and shown, but does nothing here

    def parse(self, text: str) -> Any:
        text = text.strip()
        try:
            value = _PARSERS[self.kind](text)
        except ValueError:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {self._expected()}") from None
        self._check_choices(value)
        problem = self._problem(value)
        if problem:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {problem}")
        return value

    def _expected(self) -> str:
        if self.kind == "boolean":
            return "Expected value to be either true or false"
        return f"Not a number of type {self.kind.upper()}"

    def _check_choices(self, value: Any) -> None:
        """Of a list the first wrong item is named, as Kafka does."""
        for word in value if isinstance(value, tuple) else (value,):
            if self.choices and str(word) not in self.choices:
                problem = f"String must be one of: {', '.join(self.choices)}"
                raise SettingError(f"Invalid value {word} for configuration {self.name}: {problem}")

    def _problem(self, value: Any) -> str | None:
        if self.minimum is not None and value < self.minimum:
            return f"Value must be at least {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"Value must be no more than {self.maximum}"
        return None


def _parse_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _parse_int(text: str) -> int:
    if not text.isascii() or "_" in text:  # Python would take them
        raise ValueError(text)
    return int(text)


def _parse_double(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[str, Any] = {
    "int": _parse_int,
    "long": _parse_int,
    "short": _parse_int,
    "double": _parse_double,
    "boolean": _parse_boolean,
    "string": str,
    "class": str,
    "password": str,
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


# --- Every setting that has an effect here: Kafka's name, type, limits and default. And Kafka's that have none ---
#
# Defaults differ from Kafka's only where one node on a laptop wants another; those rows say so.
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


def _int(
    name: str, default: int | None, doc: str, minimum: int, topic: str | None = None, *, dynamic: bool = False
) -> Setting:
    return Setting(name, "int", default, doc, minimum, INT32_MAX, dynamic=dynamic, topic=topic)


def _long(
    name: str, default: int | None, doc: str, minimum: int, topic: str | None = None, *, dynamic: bool = False
) -> Setting:
    return Setting(name, "long", default, doc, minimum, INT64_MAX, dynamic=dynamic, topic=topic)


_COMPRESSIONS = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_ONE_REPLICA = "There is one node: the only possible value is 1 (Kafka's default is 3)."


_GENERAL = (
    _int("node.id", 1, "The broker's id in metadata.", 0),
    _int("broker.id", None, "Older name of node.id.", 0),
    Setting("broker.rack", "string", None, "The rack that metadata shows for the broker."),
    Setting("listeners", "list", ("PLAINTEXT://127.0.0.1:9092",), "Where the broker listens; PLAINTEXT only."),
    Setting("advertised.listeners", "list", None, "Host and port that clients get; by default the listener."),
    Setting("controller.listener.names", "list", None, "Listeners that are a controller's: they are left out."),
    Setting(
        "listener.security.protocol.map",
        "string",
        "SASL_SSL:SASL_SSL,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
        "The protocol of each listener by its name; that of the broker must be PLAINTEXT.",
    ),
    Setting("log.dirs", "string", None, "The data folder (one)."),
    Setting("log.dir", "string", None, "Other name of log.dirs."),
    Setting(
        "fsync",
        "string",
        "commit",
        "commit: on disk before it is acknowledged; os: as a stock Kafka node.",
        choices=("commit", "os"),
    ),
    _int("num.partitions", 1, "Partitions of a topic that is created without a number.", 1),
    Setting("default.replication.factor", "int", 1, _ONE_REPLICA, 1, 1),
    Setting("auto.create.topics.enable", "boolean", True, "Create a topic when a client asks for its metadata."),
    Setting("delete.topic.enable", "boolean", True, "Allow topics to be deleted."),
    _int("message.max.bytes", 1_048_588, "The largest record batch that a topic takes.", 0, "max.message.bytes"),
    _int(
        "min.insync.replicas", 1, "As in Kafka never more than a topic's replicas, so here 1.", 1, "min.insync.replicas"
    ),
    Setting(
        "unclean.leader.election.enable",
        "boolean",
        False,
        "One replica: no election ever happens.",
        topic="unclean.leader.election.enable",
    ),
    _int("fetch.max.bytes", 57_671_680, "The most that one fetch response holds.", 1024),
    _int("max.incremental.fetch.session.cache.slots", 1000, "Fetch sessions that are remembered.", 0),
    _int("max.request.partition.size.limit", 2000, "The most partitions in one DescribeTopicPartitions response.", 1),
)

_SOCKET = (
    _int("socket.request.max.bytes", 104_857_600, "A larger request closes its connection.", 1),
    _int("socket.send.buffer.bytes", -1, "SO_SNDBUF; -1: the system's (Kafka: 102400).", -1),
    _int("socket.receive.buffer.bytes", -1, "SO_RCVBUF; -1: the system's (Kafka: 102400).", -1),
    _int("socket.listen.backlog.size", 50, "Connections waiting to be accepted.", 1),
    _long("connections.max.idle.ms", 600_000, "Idle connections are closed after this time; -1: never.", -1),
    _int("max.connections", INT32_MAX, "More connections are closed at once.", 0, dynamic=True),
    _int("max.connections.per.ip", INT32_MAX, "The same, for each client address.", 0, dynamic=True),
)

_LOG = (
    _int("log.segment.bytes", 1_073_741_824, "Size at which a new segment starts.", 1_048_576, "segment.bytes"),
    _int("log.roll.hours", 168, "Age at which a new segment starts.", 1),
    _long("log.roll.ms", None, "The same in milliseconds.", 1, "segment.ms"),
    _int("log.roll.jitter.hours", 0, "Random part of the rolling time.", 0),
    _long("log.roll.jitter.ms", None, "The same in milliseconds.", 0, "segment.jitter.ms"),
    _int("log.retention.hours", 168, "How long records are kept; -1: for ever.", -1),
    _int("log.retention.minutes", None, "The same in minutes.", -1),
    _long("log.retention.ms", None, "The same in milliseconds.", -1, "retention.ms"),
    _long(
        "log.retention.bytes",
        -1,
        "Size of a partition above which old segments go; -1: no limit.",
        -INT64_MAX - 1,
        "retention.bytes",
    ),
    _long("log.retention.check.interval.ms", 300_000, "How often retention and compaction look.", 1),
    Setting(
        "log.cleanup.policy",
        "list",
        ("delete",),
        "This config designates the retention policy to use on log segments.",
        choices=("compact", "delete"),
        topic="cleanup.policy",
    ),
    Setting("log.cleaner.enable", "boolean", True, "Compact topics whose policy says so."),
    _long("log.cleaner.backoff.ms", 15_000, "Pause between looks for logs to compact.", 0, dynamic=True),
    _long("log.cleaner.delete.retention.ms", DAY_MS, "How long tombstones are kept.", 0, "delete.retention.ms"),
    _long(
        "log.cleaner.min.compaction.lag.ms",
        0,
        "Age before which a record is not compacted.",
        0,
        "min.compaction.lag.ms",
    ),
    _long(
        "log.cleaner.max.compaction.lag.ms",
        INT64_MAX,
        "Age at which a record must be compacted.",
        1,
        "max.compaction.lag.ms",
    ),
    Setting(
        "log.cleaner.min.cleanable.ratio",
        "double",
        0.5,
        "Part of a log that must be dirty to compact it.",
        0,
        1,
        topic="min.cleanable.dirty.ratio",
    ),
    _int("log.index.interval.bytes", 4096, "Bytes between two index entries.", 0, "index.interval.bytes"),
    _int("log.index.size.max.bytes", 10_485_760, "The largest index.", 4, "segment.index.bytes"),
    Setting(
        "log.message.timestamp.type",
        "string",
        "CreateTime",
        "Whose time records carry.",
        choices=("CreateTime", "LogAppendTime"),
        topic="message.timestamp.type",
    ),
    _long(
        "log.message.timestamp.before.max.ms",
        INT64_MAX,
        "How far a timestamp may lie in the past.",
        0,
        "message.timestamp.before.max.ms",
    ),
    _long(
        "log.message.timestamp.after.max.ms",
        HOUR_MS,
        "How far a timestamp may lie in the future.",
        0,
        "message.timestamp.after.max.ms",
    ),
    _long("log.segment.delete.delay.ms", 60_000, "How long files of deleted segments stay.", 0, "file.delete.delay.ms"),
    _long(
        "log.flush.interval.messages",
        INT64_MAX,
        "With fsync=os: records after which a log is flushed.",
        1,
        "flush.messages",
    ),
    _long("log.flush.interval.ms", None, "With fsync=os: time after which a log is flushed.", 0, "flush.ms"),
    Setting(
        "compression.type",
        "string",
        "producer",
        "How batches are stored: as the producer compressed them, or all in one way.",
        choices=_COMPRESSIONS,
        topic="compression.type",
    ),
    *(
        Setting(f"compression.{codec}.level", "int", default, doc, low, high, topic=f"compression.{codec}.level")
        for codec, default, low, high, doc in (
            ("gzip", -1, -1, 9, "Level for batches that are compressed anew with gzip."),
            ("lz4", 9, 1, 17, "Shown only: lz4 is used without levels."),
            ("zstd", 3, -131_072, 22, "Level for batches that are compressed anew with zstd."),
        )
    ),
    _int("producer.id.expiration.ms", DAY_MS, "Idle producers are forgotten after this time.", 1, dynamic=True),
    _int("producer.id.expiration.check.interval.ms", 600_000, "How often idle producers are looked for.", 1),
)

_GROUP = (
    _int(
        "group.initial.rebalance.delay.ms",
        0,
        "Wait for more members before the first rebalance (Kafka's default is 3000).",
        0,
    ),
    _int("group.min.session.timeout.ms", 6000, "The shortest session timeout.", 0),
    _int("group.max.session.timeout.ms", 1_800_000, "The longest session timeout.", 0),
    _int("group.max.size", INT32_MAX, "The most members of a group.", 1),
    Setting(
        "group.consumer.migration.policy",
        "string",
        "bidirectional",
        "Which groups with members may change their protocol: classic ones (upgrade), consumer groups (downgrade).",
        choices=("bidirectional", "upgrade", "downgrade", "disabled"),
    ),
    Setting(
        "group.coordinator.rebalance.protocols",
        "list",
        ("classic", "consumer"),
        "Group protocols that are served.",
        choices=("classic", "consumer"),
    ),
    Setting("group.version", "short", 1, "Feature level: 1 offers the consumer protocol (KIP-848).", 0, 1),
    _int("group.consumer.session.timeout.ms", 45_000, "KIP-848: session timeout.", 1),
    _int("group.consumer.min.session.timeout.ms", 45_000, "KIP-848: its lower limit.", 1),
    _int("group.consumer.max.session.timeout.ms", 60_000, "KIP-848: its upper limit.", 1),
    _int("group.consumer.heartbeat.interval.ms", 5000, "KIP-848: heartbeat interval.", 1),
    _int("group.consumer.min.heartbeat.interval.ms", 5000, "KIP-848: its lower limit.", 1),
    _int("group.consumer.max.heartbeat.interval.ms", 15_000, "KIP-848: its upper limit.", 1),
    _int("group.consumer.max.size", INT32_MAX, "KIP-848: the most members of a group.", 1),
    Setting(
        "group.consumer.assignors",
        "list",
        ("uniform", "range"),
        "KIP-848: assignors, the first by default.",
        choices=("uniform", "range"),
    ),
    _int("offset.metadata.max.bytes", 4096, "The largest metadata with a committed offset.", 0),
    Setting("offsets.retention.minutes", "int", 10_080, "How long committed offsets of an empty group are kept.", 1),
    _long("offsets.retention.check.interval.ms", 600_000, "How often expired offsets are looked for.", 1),
    _int("offsets.topic.num.partitions", 50, "Partitions of __consumer_offsets.", 1),
    _int("offsets.topic.segment.bytes", 104_857_600, "Segment size of __consumer_offsets.", 1_048_576),
    Setting("offsets.topic.replication.factor", "short", 1, _ONE_REPLICA, 1, 1),
)

_TRANSACTION = (
    _int("transaction.max.timeout.ms", 900_000, "The longest timeout of a transaction.", 1),
    _int("transactional.id.expiration.ms", 7 * DAY_MS, "Idle transactional ids are forgotten after this time.", 1),
    _int("transaction.state.log.num.partitions", 50, "Partitions of __transaction_state.", 1),
    _int("transaction.state.log.segment.bytes", 104_857_600, "Segment size of __transaction_state.", 1_048_576),
    Setting("transaction.state.log.replication.factor", "short", 1, _ONE_REPLICA, 1, 1),
    Setting("transaction.state.log.min.isr", "int", 1, _ONE_REPLICA.replace("3", "2"), 1, 1),
    _int(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        10_000,
        "How often transactions beyond their timeout are looked for.",
        1,
    ),
    _int(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        3_600_000,
        "How often expired transactional ids are looked for.",
        1,
    ),
    Setting(
        "transaction.partition.verification.enable",
        "boolean",
        True,
        "Ask the coordinator before the first write of a transaction to a partition.",
        dynamic=True,
    ),
    Setting(
        "transaction.two.phase.commit.enable",
        "boolean",
        False,
        "Producers may open transactions that have no timeout and that a new owner can keep (KIP-939).",
    ),
    Setting("transaction.version", "short", 2, "Feature level: 2 is TV2 (KIP-890), below that TV1.", 0, 2),
)

_ONE_NODE = "there is one node"
_NO_THREADS = "the broker is one event loop"
_NO_SECURITY = "there is no security layer; listen on loopback or put a proxy in front"
# Why settings of Kafka have no effect here: name or prefix (ending in a dot), and the reason. Those that Kafka 4.3 does
# not know, or that promise a protection which does not exist, are refused.
MEANINGLESS: dict[str, str] = {
    "zookeeper.": "there is no ZooKeeper",
    "controller.": _ONE_NODE,
    "process.roles": "one process is broker and controller",
    "inter.broker.": _ONE_NODE,
    "security.inter.broker.protocol": _ONE_NODE,
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
    "client.quota.": "there are no plug-ins",
    "quota.": "quotas are averaged over ten seconds",
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
    "group.coordinator.append.linger.ms": "offsets are written at once; the fsync is shared",
    "offsets.commit.timeout.ms": _ONE_NODE,
    "offsets.load.buffer.size": "offsets are read in fixed steps",
    "offsets.topic.compression.codec": "internal topics are not compressed",
    "transaction.state.log.load.buffer.size": "transactions are read in fixed steps",
    "max.connection.creation.rate": "quotas are for bytes, not for connections",
    "max.connections.per.ip.overrides": "one limit holds for every address",
    "connection.failed.authentication.delay.ms": _NO_SECURITY,
    "connections.max.reauth.ms": _NO_SECURITY,
    "request.timeout.ms": _ONE_NODE,
    "unstable.": "there are no unstable versions",
}


def reason_of(name: str) -> str | None:
    """Why a setting of Kafka has no effect here; None if that is not known."""
    for prefix, reason in MEANINGLESS.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return reason
    return None


def _without_effect() -> Iterator[Setting]:
    """Kafka's settings that do nothing here, from the list beside this file."""
    for line in Path(__file__).with_name("settings_without_effect.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        words, _, default = line.partition(" =")
        name, kind, change = words.split()
        reason = reason_of(name) or "there is nothing like it in this broker"
        row = Setting(name, kind, None, f"No effect: {reason}.", dynamic=change == "dynamic", no_effect=reason)
        yield row._replace(default=row.parse(default)) if _ else row


# How fast replicas may be moved: kafka-reassign-partitions sets it. Kafka shows them only where they were set.
THROTTLES = tuple(
    _long(name, None, f"No effect: {_ONE_NODE}.", 0, dynamic=True)._replace(no_effect=_ONE_NODE)
    for name in (
        "leader.replication.throttled.rate",
        "follower.replication.throttled.rate",
        "replica.alter.log.dirs.io.max.bytes.per.second",
    )
)
TABLE: dict[str, Setting] = {
    row.name: row._replace(dynamic=row.dynamic or row.topic is not None)  # a default of topics can be altered
    for row in (*_GENERAL, *_SOCKET, *_LOG, *_GROUP, *_TRANSACTION, *_without_effect(), *THROTTLES)
}


log = logging.getLogger(__name__)

MIN_INSYNC_REPLICAS = "min.insync.replicas"


def row_of(name: str) -> Setting:
    """The row of a setting, or SettingError that says by name what is wrong with it."""
    row = TABLE.get(name)
    if row is not None:
        return row
    reason = reason_of(name)
    if reason is not None:
        raise SettingError(f"setting {name} means nothing to this broker: {reason}; take it out")
    from difflib import get_close_matches

    close = get_close_matches(name, TABLE, 1)
    raise SettingError(f"unknown setting {name}" + (f"; did you mean {close[0]}?" if close else ""))


class Settings:
    """The settings of a running broker. The strongest first: altered for this broker, altered for the cluster, given
    at the start, default."""

    def __init__(self, given: Mapping[str, str] | None = None, *, strict: bool = False) -> None:
        self._strict = strict  # settings without effect are refused
        self._noted: set[str] = set()  # settings without effect that were logged
        self.accept(map(row_of, given or {}))
        self.given: dict[str, Any] = {name: row_of(name).parse(text) for name, text in (given or {}).items()}
        self.altered: dict[str, Any] = {}  # since the start, for this broker
        self.altered_for_cluster: dict[str, Any] = {}  # for all brokers
        self._features: dict[str, int] = {}

    def __getitem__(self, name: str) -> Any:
        """The value, in its own type; None where there is none. An unknown name is a bug."""
        for layer in (self.altered, self.altered_for_cluster, self._features, self.given):
            if name in layer:
                return layer[name]
        return TABLE[name].default

    def accept(self, rows: Iterable[Setting]) -> None:
        """Logs, once, which settings that somebody gives have no effect. SettingError: --strict refuses them."""
        for row in rows:
            if row.no_effect and self._strict:
                raise SettingError(
                    f"setting {row.name} has no effect here: {row.no_effect}; take it out, or start without --strict"
                )
            if row.no_effect and row.name not in self._noted:
                self._noted.add(row.name)
                log.warning("setting %s has no effect: %s", row.name, row.no_effect)

    def replace_altered(self, texts: Mapping[str, str], *, for_cluster: bool = False) -> None:
        """Takes over all settings that were altered at run time. SettingError: nothing changed."""
        values = parse_dynamic(texts)
        if for_cluster:
            self.altered_for_cluster = values
        else:
            self.altered = values

    def always_for_cluster(self) -> dict[str, str]:
        """A new Kafka cluster keeps it for all brokers since 4.1, from its eligible leader replicas on (KIP-966)."""
        name = MIN_INSYNC_REPLICAS
        return {name: str(self.given.get(name, TABLE[name].default))}

    def finalize(self, levels: Mapping[str, int]) -> None:
        """Takes over the feature levels that were made final at run time."""
        self._features = dict(levels)

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
