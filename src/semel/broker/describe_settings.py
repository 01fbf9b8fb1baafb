"""Settings as DescribeConfigs shows them: value, where it comes from, and what else could have given it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.broker import named_settings, settings, topic_configs
from semel.broker.settings import as_text
from semel.broker.topic_configs import (
    SOURCE_BROKER_DEFAULT,
    SOURCE_BROKER_DYNAMIC,
    SOURCE_BROKER_STATIC,
    SOURCE_DEFAULT,
    SOURCE_TOPIC,
    Origin,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.topics import Topic

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


def of_topic(broker: BrokerNode, topic: Topic, names: Collection[str] | None = None) -> list[DescribedConfig]:
    return [_topic_entry(broker, topic, name) for name in topic_configs.NAMES if not names or name in names]


def _topic_entry(broker: BrokerNode, topic: Topic, name: str) -> DescribedConfig:
    origins = topic_configs.broker_origins(broker.settings, name)
    if name in topic.configs:
        origins.insert(0, Origin(name, topic.configs[name], SOURCE_TOPIC, topic.configs[name]))
    entry = _entry(name, origins, topic_configs.row_of(name), is_read_only=False)
    return entry._replace(origins=[origin for origin in origins if _is_listed(name, origin)])


def _is_listed(name: str, origin: Origin) -> bool:
    """Of the broker's defaults Kafka names one only, that of the strongest synonym, if it has one."""
    if name in topic_configs.NO_EFFECT:
        return True
    strongest = topic_configs.SYNONYMS[name][0][0]
    is_default = origin.source == SOURCE_DEFAULT
    return not is_default or (origin.name == strongest and settings.TABLE[strongest].default is not None)


def of_broker(broker: BrokerNode, names: Collection[str] | None = None) -> list[DescribedConfig]:
    rows = [row for name, row in sorted(settings.TABLE.items()) if not names or name in names]
    return [_entry(row.name, _broker_origins(broker, row), row, is_read_only=not row.dynamic) for row in rows]


def of_cluster(broker: BrokerNode, names: Collection[str] | None = None) -> list[DescribedConfig]:
    """Only what was altered for all brokers, as Kafka shows it."""
    altered = broker.altered_settings(for_cluster=True)
    return [
        _entry(name, [Origin(name, text, SOURCE_BROKER_DEFAULT, text)], settings.TABLE[name], is_read_only=False)
        for name, text in sorted(altered.items())
        if not names or name in names
    ]


def of_named(broker: BrokerNode, kind: int, name: str, names: Collection[str] | None = None) -> list[DescribedConfig]:
    """A group's, or a client metrics subscription's. They need not exist."""
    own, source = named_settings.own(broker.store, kind, name), named_settings.KINDS[kind].source
    entries = []
    for row in named_settings.KINDS[kind].rows:
        if names and row.name not in names:
            continue
        default = as_text(named_settings.default_of(broker.settings, kind, row))
        name_of_default = f"group.{row.name}" if kind == named_settings.GROUP else row.name
        origins = [Origin(name_of_default, default, SOURCE_DEFAULT, default)]
        if row.name in own:
            origins.insert(0, Origin(row.name, own[row.name], source, own[row.name]))
        entries.append(_entry(row.name, origins, row, is_read_only=False))
    return entries


def _broker_origins(broker: BrokerNode, row: settings.Setting) -> list[Origin]:
    own = broker.settings
    layers: tuple[tuple[Any, int], ...] = (
        (own.altered(row.name), SOURCE_BROKER_DYNAMIC),
        (own.altered_for_cluster(row.name), SOURCE_BROKER_DEFAULT),
        (own.given(row.name), SOURCE_BROKER_STATIC),
        (row.default, SOURCE_DEFAULT),
    )
    if row.name in ("broker.id", "node.id"):  # two names of one setting
        layers = ((broker.node_id, SOURCE_BROKER_STATIC),)
    texts = [(as_text(value), source) for value, source in layers if value is not None]
    return [Origin(row.name, text, source, text) for text, source in texts]


def _entry(name: str, origins: list[Origin], row: settings.Setting, *, is_read_only: bool) -> DescribedConfig:
    value, source = (origins[0].value, origins[0].source) if origins else (None, SOURCE_DEFAULT)
    if row.kind == "password":  # nobody is shown one
        origins = [origin._replace(value=None, shown=None) for origin in origins]
        value = None
    return DescribedConfig(
        name, value, source, is_read_only, origins, _TYPES[row.kind], row.doc, row.kind == "password"
    )
