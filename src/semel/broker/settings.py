"""The settings of a running broker: what it was started with, and what was altered since."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from semel.broker.settings_table import TABLE, Setting, SettingError, reason_of

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
