"""Settings of topics, consumer groups and client metrics subscriptions: which there are, where their values come from,
and how DescribeConfigs shows them, those of the broker too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.broker.settings import HOUR_MS, MINUTE_MS, TABLE, THROTTLES, Setting, SettingError, Settings, as_text
from semel.protocol.errors import ErrorCode
from semel.storage import LogConfig

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.store import Store
    from semel.broker.topics import Topic

# --- Settings of topics: which there are, where their values come from, and which of Kafka's have no effect here ---


# What DescribeConfigs calls the origin of a value.
SOURCE_TOPIC, SOURCE_BROKER_DYNAMIC, SOURCE_BROKER_DEFAULT, SOURCE_BROKER_STATIC, SOURCE_DEFAULT = 1, 2, 3, 4, 5

_THROTTLED_REPLICA = re.compile(r"[0-9]+:[0-9]+")
_ONE_NODE, _NO_TIERS = "there is one node", "there is no tiered storage"


def _without_effect(name: str, kind: str, default: Any, reason: str) -> Setting:
    return Setting(name, kind, default, f"No effect: {reason}.", dynamic=True, no_effect=reason)


# Kafka's settings of topics that are accepted, kept and shown, and do nothing here.
NO_EFFECT: dict[str, Setting] = {
    row.name: row
    for row in (
        _without_effect("follower.replication.throttled.replicas", "list", (), _ONE_NODE),
        _without_effect("leader.replication.throttled.replicas", "list", (), _ONE_NODE),
        _without_effect("preallocate", "boolean", False, "files grow as they are written"),
        _without_effect("remote.storage.enable", "boolean", False, _NO_TIERS),
        _without_effect("remote.log.copy.disable", "boolean", False, _NO_TIERS),
        _without_effect("remote.log.delete.on.disable", "boolean", False, _NO_TIERS),
        _without_effect("local.retention.bytes", "long", -2, _NO_TIERS),
        _without_effect("local.retention.ms", "long", -2, _NO_TIERS),
    )
}
# The broker's settings that Kafka names as the origin of their defaults. The others have none.
_BROKERS_NAME = {
    "preallocate": "log.preallocate",
    "local.retention.bytes": "log.local.retention.bytes",
    "local.retention.ms": "log.local.retention.ms",
}

# Settings that are the broker's business; all others are the storage's (LogConfig).
BROKER_SIDE = ("min.insync.replicas", "unclean.leader.election.enable", *NO_EFFECT)

# Settings of older Kafkas, which Kafka 4.3 does not know.
MEANINGLESS: dict[str, str] = {
    "message.format.version": "there is one message format, version 2",
    "message.downconversion.enable": "there is one message format, version 2",
    "message.timestamp.difference.max.ms": "Kafka 4 took it away; use message.timestamp.before.max.ms and after.max.ms",
}

# Topic setting -> the broker's settings that give its default, the strongest first, each with its factor.
SYNONYMS: dict[str, tuple[tuple[str, int], ...]] = {
    **{row.topic: ((row.name, 1),) for row in TABLE.values() if row.topic is not None},
    "segment.ms": (("log.roll.ms", 1), ("log.roll.hours", HOUR_MS)),
    "segment.jitter.ms": (("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", HOUR_MS)),
    "retention.ms": (("log.retention.ms", 1), ("log.retention.minutes", MINUTE_MS), ("log.retention.hours", HOUR_MS)),
}
_DEFAULTS = {name: row.default for name, row in TABLE.items()}
NAMES = tuple(sorted((*SYNONYMS, *NO_EFFECT)))


class Origin(NamedTuple):
    """One place that gives, or could give, a topic's setting its value."""

    name: str
    value: str | None  # in the topic setting's unit
    source: int
    shown: str | None  # in its own: log.retention.hours=168


def topic_row(name: str) -> Setting:
    """How a topic setting is read: as the broker setting that gives its default."""
    if name in NO_EFFECT:
        return NO_EFFECT[name]
    if name in SYNONYMS:
        return TABLE[SYNONYMS[name][0][0]]._replace(name=name)
    if name in MEANINGLESS:
        raise SettingError(f"topic config {name} means nothing to this broker: {MEANINGLESS[name]}")
    raise SettingError(f"Unknown topic config name: {name}")


def validate(overrides: Mapping[str, str]) -> None:
    """Raises SettingError for the first setting that is unknown, meaningless or wrong, or that contradicts another."""
    for name, text in overrides.items():
        value = topic_row(name).parse(text)
        if name == "remote.storage.enable" and value:
            raise SettingError(f"topic config {name} cannot be true: {_NO_TIERS}")
        if (
            name.endswith(".throttled.replicas")
            and value != ("*",)
            and not all(map(_THROTTLED_REPLICA.fullmatch, value))
        ):
            raise SettingError(
                f"Invalid value {text} for configuration {name}: {name} must be the literal '*' or a list of replicas "
                "in the following format: [partitionId]:[brokerId],[partitionId]:[brokerId],..."
            )
    config = with_overrides(LogConfig(), overrides)
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise SettingError(
            f"conflict topic config setting min.compaction.lag.ms ({config.min_compaction_lag_ms}) > "
            f"max.compaction.lag.ms ({config.max_compaction_lag_ms})"
        )


def base_config(settings: Settings) -> LogConfig:
    """The LogConfig of a topic without settings of its own."""
    texts = {name: topic_default(settings, name) for name in NAMES if name not in BROKER_SIDE}
    config = with_overrides(LogConfig(), {name: text for name, text in texts.items() if text is not None})
    return replace(config, producer_id_expiration_ms=settings["producer.id.expiration.ms"])


def with_overrides(base: LogConfig, overrides: Mapping[str, str]) -> LogConfig:
    """The same for a topic that has some. A field of LogConfig is Kafka's name with underscores for dots."""
    values = {name: topic_row(name).parse(text) for name, text in overrides.items() if name not in BROKER_SIDE}
    fields: dict[str, Any] = {
        name.replace(".", "_"): frozenset(v) if isinstance(v, tuple) else v for name, v in values.items()
    }
    return replace(base, **fields) if fields else base


def topic_default(settings: Settings, name: str) -> str | None:
    """A topic setting's value where the topic itself says nothing."""
    origins = [origin for origin in broker_origins(settings, name) if origin.value is not None]
    return origins[0].value if origins else None


def broker_origins(settings: Settings, name: str) -> list[Origin]:
    """Where the broker's default of a topic setting comes from, the strongest first, in the topic setting's unit."""
    if name in NO_EFFECT:
        default = as_text(NO_EFFECT[name].default)
        return [Origin(_BROKERS_NAME.get(name, name), default, SOURCE_DEFAULT, default)]
    found = [
        Origin(synonym, _scaled(value, factor), source, as_text(value))
        for layer, source in _layers(settings)
        for synonym, factor in SYNONYMS[name]
        if (value := layer.get(synonym)) is not None
    ]
    if not found and name == "flush.ms":
        never = str(2**63 - 1)
        found.append(Origin("log.flush.interval.ms", never, SOURCE_DEFAULT, never))
    return found


def _layers(settings: Settings) -> tuple[tuple[Mapping[str, Any], int], ...]:
    """Where the broker's settings have values, the strongest first."""
    return (
        (settings.altered, SOURCE_BROKER_DYNAMIC),
        (settings.altered_for_cluster, SOURCE_BROKER_DEFAULT),
        (settings.given, SOURCE_BROKER_STATIC),
        (_DEFAULTS, SOURCE_DEFAULT),
    )


def _scaled(value: Any, factor: int) -> str | None:
    return as_text(value * factor if factor != 1 and value != -1 else value)


# --- Settings of what is only a name: consumer groups and client metrics subscriptions. The store keeps them ---
CLIENT_METRICS, GROUP = 16, 32
SESSION_TIMEOUT_MS = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL_MS = "consumer.heartbeat.interval.ms"


_NO_SHARE_GROUPS, _NO_STREAMS_GROUPS = "share groups are not served", "streams groups are not served"
# Kafka's settings of groups that are accepted, kept and shown, and do nothing here.
_OF_GROUPS_WITHOUT_EFFECT = (
    _without_effect("consumer.assignment.interval.ms", "int", 1000, "partitions are assigned at once"),
    _without_effect("consumer.assignor.offload.enable", "boolean", None, "partitions are assigned at once"),
    _without_effect("share.session.timeout.ms", "int", 45_000, _NO_SHARE_GROUPS),
    _without_effect("share.heartbeat.interval.ms", "int", 5000, _NO_SHARE_GROUPS),
    _without_effect("share.record.lock.duration.ms", "int", 30_000, _NO_SHARE_GROUPS),
    _without_effect("share.delivery.count.limit", "int", 5, _NO_SHARE_GROUPS),
    _without_effect("share.partition.max.record.locks", "int", 2000, _NO_SHARE_GROUPS),
    _without_effect("share.auto.offset.reset", "string", "latest", _NO_SHARE_GROUPS),
    _without_effect("share.isolation.level", "string", "read_uncommitted", _NO_SHARE_GROUPS),
    _without_effect("share.renew.acknowledge.enable", "boolean", True, _NO_SHARE_GROUPS),
    _without_effect("share.assignment.interval.ms", "int", 1000, _NO_SHARE_GROUPS),
    _without_effect("share.assignor.offload.enable", "boolean", None, _NO_SHARE_GROUPS),
    _without_effect("streams.session.timeout.ms", "int", 45_000, _NO_STREAMS_GROUPS),
    _without_effect("streams.heartbeat.interval.ms", "int", 5000, _NO_STREAMS_GROUPS),
    _without_effect("streams.num.standby.replicas", "int", 0, _NO_STREAMS_GROUPS),
    _without_effect("streams.initial.rebalance.delay.ms", "int", 3000, _NO_STREAMS_GROUPS),
    _without_effect("streams.assignment.interval.ms", "int", 1000, _NO_STREAMS_GROUPS),
    _without_effect("streams.assignor.offload.enable", "boolean", None, _NO_STREAMS_GROUPS),
)
# Those for which the broker has no default of its own.
_OF_GROUPS_ALONE = ("share.auto.offset.reset", "share.isolation.level", "share.renew.acknowledge.enable")


class ResourceKind(NamedTuple):
    """A kind of thing that has settings."""

    key: str  # where the store has them
    source: int  # what DescribeConfigs calls the origin of a value that was set
    what: str
    refusal: ErrorCode  # of a bad setting
    rows: tuple[Setting, ...]


KINDS: dict[int, ResourceKind] = {
    GROUP: ResourceKind(
        "group-settings/",
        8,
        "group",
        ErrorCode.INVALID_CONFIG,
        (
            Setting(SESSION_TIMEOUT_MS, "int", None, "KIP-848: session timeout of this group.", 1),
            Setting(HEARTBEAT_INTERVAL_MS, "int", None, "KIP-848: heartbeat interval of this group.", 1),
            *_OF_GROUPS_WITHOUT_EFFECT,
        ),
    ),
    # Kafka keeps subscriptions also where no plugin takes metrics; its clients are not asked for any then.
    CLIENT_METRICS: ResourceKind(
        "client-metrics/",
        7,
        "client metrics",
        ErrorCode.INVALID_REQUEST,
        (
            Setting("interval.ms", "int", 300_000, "How often clients would push their metrics.", 100, 3_600_000),
            Setting("match", "list", (), "Which clients would be asked."),
            Setting("metrics", "list", (), "Which metrics they would send."),
        ),
    ),
}


def own_settings(store: Store, kind: int, name: str) -> dict[str, str]:
    """What was set for a group or a subscription, without defaults."""
    return dict(store.get(KINDS[kind].key + name) or {})


def replace_named_settings(store: Store, kind: int, name: str, texts: Mapping[str, str]) -> None:
    """Sets exactly these, which were checked. Durable on return; OSError: nothing changed."""
    store.put(KINDS[kind].key + name, dict(texts) or None)
    store.commit()


def named_row(kind: int, name: str) -> Setting:
    for row in KINDS[kind].rows:
        if row.name == name:
            return row
    raise SettingError(f"Unknown {KINDS[kind].what} config name: {name}")


def check_named_settings(settings: Settings, kind: int, texts: Mapping[str, str]) -> None:
    """SettingError unless these can be the settings of a group or a subscription."""
    rows = [named_row(kind, name) for name in texts]
    values = {row.name: row.parse(texts[row.name]) for row in rows}
    settings.accept(rows)
    if kind == GROUP:
        for name in values.keys() & {SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS}:
            _check_limits(settings, name, values[name])
        timing = group_timing(settings, texts)
        if timing.session_timeout_ms <= timing.heartbeat_interval_ms:
            raise SettingError(f"{SESSION_TIMEOUT_MS} must be greater than {HEARTBEAT_INTERVAL_MS}")


def _check_limits(settings: Settings, name: str, value: int) -> None:
    lowest, highest = (f"group.{name}".replace("consumer.", f"consumer.{end}.", 1) for end in ("min", "max"))
    if value < settings[lowest]:
        raise SettingError(f"{name} must be greater than or equal to {lowest}")
    if value > settings[highest]:
        raise SettingError(f"{name} must be less than or equal to {highest}")


class GroupTiming(NamedTuple):
    """How a consumer group (KIP-848) shows that it lives."""

    session_timeout_ms: int
    heartbeat_interval_ms: int


def group_timing(settings: Settings, texts: Mapping[str, str]) -> GroupTiming:
    """By a group's own settings, else by the broker's."""
    return GroupTiming(
        *(
            int(texts[name]) if name in texts else settings[f"group.{name}"]
            for name in (SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS)
        )
    )


# --- Settings as DescribeConfigs shows them: value, where it comes from, and what else could have given it ---
_TYPES = {"boolean": 1, "string": 2, "int": 3, "short": 4, "long": 5, "double": 6, "list": 7, "class": 8, "password": 9}


class DescribedConfig(NamedTuple):
    """One setting of a topic or a broker."""

    name: str
    value: str | None
    source: int
    is_read_only: bool
    origins: list[Origin]  # the strongest first; its value is the one that holds
    type: int
    doc: str
    is_sensitive: bool


def describe_topic(broker: BrokerNode, topic: Topic, names: Collection[str] | None = None) -> list[DescribedConfig]:
    return [_topic_entry(broker, topic, name) for name in NAMES if not names or name in names]


def _topic_entry(broker: BrokerNode, topic: Topic, name: str) -> DescribedConfig:
    origins = broker_origins(broker.settings, name)
    if name in topic.configs:
        origins.insert(0, Origin(name, topic.configs[name], SOURCE_TOPIC, topic.configs[name]))
    entry = _entry(name, origins, topic_row(name), is_read_only=False)
    return entry._replace(origins=[origin for origin in origins if _is_listed(name, origin)])


def _is_listed(name: str, origin: Origin) -> bool:
    """Of the broker's defaults Kafka names one only, that of the strongest synonym, if it has one."""
    if name in NO_EFFECT:
        return origin.source != SOURCE_DEFAULT or name in _BROKERS_NAME
    strongest = SYNONYMS[name][0][0]
    is_default = origin.source == SOURCE_DEFAULT
    return not is_default or (origin.name == strongest and TABLE[strongest].default is not None)


def describe_broker(broker: BrokerNode, names: Collection[str] | None = None) -> list[DescribedConfig]:
    rows = [row for name, row in sorted(TABLE.items()) if not names or name in names]
    found = [(row, _broker_origins(broker, row)) for row in rows]
    return [
        _entry(row.name, origins, row, is_read_only=not row.dynamic)
        for row, origins in found
        if origins or row not in THROTTLES
    ]


def describe_cluster_settings(broker: BrokerNode, names: Collection[str] | None = None) -> list[DescribedConfig]:
    """Only what was altered for all brokers, as Kafka shows it."""
    altered = broker.altered_settings(for_cluster=True)
    return [
        _entry(name, [Origin(name, text, SOURCE_BROKER_DEFAULT, text)], TABLE[name], is_read_only=False)
        for name, text in sorted(altered.items())
        if not names or name in names
    ]


def describe_named(
    broker: BrokerNode, kind: int, name: str, names: Collection[str] | None = None
) -> list[DescribedConfig]:
    """A group's, or a client metrics subscription's. They need not exist."""
    own, source = own_settings(broker.store, kind, name), KINDS[kind].source
    entries = []
    for row in KINDS[kind].rows:
        if names and row.name not in names:
            continue
        origins = [_default_of_named(broker.settings, kind, row)]
        if row.name in own:
            origins.insert(0, Origin(row.name, own[row.name], source, own[row.name]))
        if origins[0].value is not None:
            entries.append(_entry(row.name, origins, row, is_read_only=False))
    return entries


def _default_of_named(settings: Settings, kind: int, row: Setting) -> Origin:
    name = row.name if kind != GROUP or row.name in _OF_GROUPS_ALONE else f"group.{row.name}"
    given = settings[name] if name in TABLE else None
    default = as_text(row.default if given is None else given)
    return Origin(name, default, SOURCE_DEFAULT, default)


def _broker_origins(broker: BrokerNode, row: Setting) -> list[Origin]:
    values = [(layer.get(row.name), source) for layer, source in _layers(broker.settings)]
    if row.name in ("broker.id", "node.id"):  # two names of one setting
        values = [(broker.node_id, SOURCE_BROKER_STATIC)]
    texts = [(as_text(value), source) for value, source in values if value is not None]
    return [Origin(row.name, text, source, text) for text, source in texts]


def _entry(name: str, origins: list[Origin], row: Setting, *, is_read_only: bool) -> DescribedConfig:
    value, source = (origins[0].value, origins[0].source) if origins else (None, SOURCE_DEFAULT)
    if row.kind == "password":  # nobody is shown one
        origins = [origin._replace(value=None, shown=None) for origin in origins]
        value = None
    return DescribedConfig(
        name, value, source, is_read_only, origins, _TYPES[row.kind], row.doc, row.kind == "password"
    )
