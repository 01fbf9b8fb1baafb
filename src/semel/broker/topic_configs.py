"""Settings of topics: which there are, where their values come from, and which of Kafka's have no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from semel.broker.settings import HOUR_MS, MINUTE_MS, TABLE, Setting, SettingError, Settings, as_text
from semel.storage import LogConfig, StorageError

# What DescribeConfigs calls the origin of a value.
SOURCE_TOPIC, SOURCE_BROKER_DYNAMIC, SOURCE_BROKER_DEFAULT, SOURCE_BROKER_STATIC, SOURCE_DEFAULT = 1, 2, 3, 4, 5

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
NAMES = tuple(sorted((*SYNONYMS, *NO_EFFECT)))


class Origin(NamedTuple):
    """One place that gives, or could give, a topic's setting its value."""

    name: str
    value: str | None  # in the topic setting's unit
    source: int
    shown: str | None  # in its own: log.retention.hours=168


def row_of(name: str) -> Setting:
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
        value = row_of(name).parse(text)
        if name == "remote.storage.enable" and value:
            raise SettingError(f"topic config {name} cannot be true: {_NO_TIERS}")
    try:
        config = LogConfig.parse({name: text for name, text in overrides.items() if name not in BROKER_SIDE})
    except StorageError as error:
        raise SettingError(error.message) from None
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise SettingError(
            f"conflict topic config setting min.compaction.lag.ms ({config.min_compaction_lag_ms}) > "
            f"max.compaction.lag.ms ({config.max_compaction_lag_ms})"
        )


def base_config(settings: Settings) -> LogConfig:
    """What the storage is told about a topic without settings of its own."""
    texts = {name: default_of(settings, name) for name in NAMES if name not in BROKER_SIDE}
    config = LogConfig.parse({name: text for name, text in texts.items() if text is not None})
    return replace(config, producer_id_expiration_ms=settings["producer.id.expiration.ms"])


def with_overrides(base: LogConfig, overrides: Mapping[str, str]) -> LogConfig:
    """The same for a topic that has some."""
    own = {name: text for name, text in overrides.items() if name not in BROKER_SIDE}
    return base.with_settings(own) if own else base


def value_of(settings: Settings, overrides: Mapping[str, str], name: str) -> Any:
    """The value of one setting of a topic, in its own type."""
    text = overrides.get(name)
    if text is None:
        text = default_of(settings, name)
    return None if text is None else row_of(name).parse(text)


def default_of(settings: Settings, name: str) -> str | None:
    """A topic setting's value where the topic itself says nothing."""
    origins = [origin for origin in broker_origins(settings, name) if origin.value is not None]
    return origins[0].value if origins else None


def broker_origins(settings: Settings, name: str) -> list[Origin]:
    """Where the broker's default of a topic setting comes from, the strongest first, in the topic setting's unit."""
    if name in NO_EFFECT:
        default = as_text(NO_EFFECT[name].default)
        return [Origin(name, default, SOURCE_DEFAULT, default)]
    found: list[Origin] = []
    layers = (
        (settings.altered, SOURCE_BROKER_DYNAMIC),
        (settings.altered_for_cluster, SOURCE_BROKER_DEFAULT),
        (settings.given, SOURCE_BROKER_STATIC),
    )
    for layer, source in layers:
        for synonym, factor in SYNONYMS[name]:
            value = layer(synonym)
            if value is not None:
                found.append(Origin(synonym, _scaled(value, factor), source, as_text(value)))
    for synonym, factor in SYNONYMS[name]:
        value = TABLE[synonym].default
        if value is not None:
            found.append(Origin(synonym, _scaled(value, factor), SOURCE_DEFAULT, as_text(value)))
    if not found and name == "flush.ms":
        never = str(2**63 - 1)
        found.append(Origin("log.flush.interval.ms", never, SOURCE_DEFAULT, never))
    return found


def _scaled(value: Any, factor: int) -> str | None:
    return as_text(value * factor if factor != 1 and value != -1 else value)
