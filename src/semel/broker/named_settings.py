"""Settings of things that are only a name: consumer groups, and client metrics subscriptions. The store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.broker.setting import Setting, SettingError
from semel.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from semel.broker.settings import Settings
    from semel.broker.store import Store

CLIENT_METRICS, GROUP = 16, 32
SESSION_TIMEOUT_MS = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL_MS = "consumer.heartbeat.interval.ms"


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
            Setting(SESSION_TIMEOUT_MS, "int", None, "KIP-848: session time-out of this group.", 1),
            Setting(HEARTBEAT_INTERVAL_MS, "int", None, "KIP-848: heartbeat interval of this group.", 1),
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
            Setting("metrics", "list", (), "Which metrics they would be asked for."),
        ),
    ),
}


def own(store: Store, kind: int, name: str) -> dict[str, str]:
    """What was set for a group or a subscription, without defaults."""
    return dict(store.get(KINDS[kind].key + name) or {})


def names(store: Store, kind: int) -> list[str]:
    return sorted(name for name, _ in store.items(KINDS[kind].key))


def replace(store: Store, kind: int, name: str, texts: Mapping[str, str]) -> None:
    """Sets exactly these, which were checked. Durable on return; OSError: nothing changed."""
    store.put(KINDS[kind].key + name, dict(texts) or None)
    try:
        store.commit()
    except OSError:
        store.discard_changes()
        raise


def row_of(kind: int, name: str) -> Setting:
    for row in KINDS[kind].rows:
        if row.name == name:
            return row
    raise SettingError(f"Unknown {KINDS[kind].what} config name: {name}")


def check(settings: Settings, kind: int, texts: Mapping[str, str]) -> None:
    """SettingError unless these can be the settings of a group or a subscription."""
    values = {name: row_of(kind, name).parse(text) for name, text in texts.items()}
    if kind == GROUP:
        for name, value in values.items():
            _check_limits(settings, name, value)
        timing = group_timing(settings, texts)
        if timing.session_timeout_ms <= timing.heartbeat_interval_ms:
            raise SettingError(f"{SESSION_TIMEOUT_MS} must be greater than {HEARTBEAT_INTERVAL_MS}")


def _check_limits(settings: Settings, name: str, value: int) -> None:
    lowest, highest = (f"group.{name}".replace("consumer.", f"consumer.{end}.", 1) for end in ("min", "max"))
    if value < settings[lowest]:
        raise SettingError(f"{name} must be greater than or equal to {lowest}")
    if value > settings[highest]:
        raise SettingError(f"{name} must be less than or equal to {highest}")


def default_of(settings: Settings, kind: int, row: Setting) -> Any:
    return settings[f"group.{row.name}"] if kind == GROUP else row.default


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
