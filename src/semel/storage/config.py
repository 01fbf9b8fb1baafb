"""The settings of a topic that the storage obeys: Kafka's names, meanings, limits and defaults, in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from semel.protocol.errors import ErrorCode
from semel.storage.results import StorageError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """A topic's settings. A field is Kafka's name with underscores for dots; `parse` reads Kafka's names."""

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    compression_type: str = "producer"  # other values: batches in another compression are compressed again
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9  # shown only: lz4 is used without levels
    compression_zstd_level: int = 3
    delete_retention_ms: int = DAY_MS
    file_delete_delay_ms: int = 60_000
    flush_messages: int = INT64_MAX
    flush_ms: int = INT64_MAX
    index_interval_bytes: int = 4096
    max_compaction_lag_ms: int = INT64_MAX
    max_message_bytes: int = 1_048_588
    message_timestamp_after_max_ms: int = 3_600_000
    message_timestamp_before_max_ms: int = INT64_MAX
    message_timestamp_type: str = "CreateTime"
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    retention_bytes: int = -1
    retention_ms: int = 7 * DAY_MS
    segment_bytes: int = 1_073_741_824
    segment_index_bytes: int = 10_485_760
    segment_jitter_ms: int = 0
    segment_ms: int = 7 * DAY_MS
    # A broker's setting, not a topic's: `parse` does not know it.
    producer_id_expiration_ms: int = DAY_MS

    @property
    def compact(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def delete(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def log_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    def with_settings(self, settings: Mapping[str, str]) -> LogConfig:
        """A copy with settings by Kafka's names applied. INVALID_CONFIG names the setting that is wrong or unknown."""
        values: dict[str, Any] = {_field(name): parse_setting(name, text) for name, text in settings.items()}
        return dataclasses.replace(self, **values)

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> LogConfig:
        return cls().with_settings(settings)

    def to_settings(self) -> dict[str, str]:
        """Every setting by Kafka's name, as text, as DescribeConfigs shows it."""
        return {name: _as_text(getattr(self, _field(name))) for name in SETTINGS}


class LogSetting(NamedTuple):
    """How one setting is read: its type, and its range or its choices."""

    kind: str  # "int", "long", "double", "string", "list"
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


SETTINGS: dict[str, LogSetting] = {
    "cleanup.policy": LogSetting("list", choices=("compact", "delete")),
    "compression.type": LogSetting("string", choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")),
    "compression.gzip.level": LogSetting("int", -1, 9),
    "compression.lz4.level": LogSetting("int", 1, 17),
    "compression.zstd.level": LogSetting("int", -131_072, 22),
    "delete.retention.ms": LogSetting("long", 0, INT64_MAX),
    "file.delete.delay.ms": LogSetting("long", 0, INT64_MAX),
    "flush.messages": LogSetting("long", 1, INT64_MAX),
    "flush.ms": LogSetting("long", 0, INT64_MAX),
    "index.interval.bytes": LogSetting("int", 0, INT32_MAX),
    "max.compaction.lag.ms": LogSetting("long", 1, INT64_MAX),
    "max.message.bytes": LogSetting("int", 0, INT32_MAX),
    "message.timestamp.after.max.ms": LogSetting("long", 0, INT64_MAX),
    "message.timestamp.before.max.ms": LogSetting("long", 0, INT64_MAX),
    "message.timestamp.type": LogSetting("string", choices=("CreateTime", "LogAppendTime")),
    "min.cleanable.dirty.ratio": LogSetting("double", 0, 1),
    "min.compaction.lag.ms": LogSetting("long", 0, INT64_MAX),
    "retention.bytes": LogSetting("long", -(2**63), INT64_MAX),
    "retention.ms": LogSetting("long", -1, INT64_MAX),
    "segment.bytes": LogSetting("int", 1_048_576, INT32_MAX),
    "segment.index.bytes": LogSetting("int", 4, INT32_MAX),
    "segment.jitter.ms": LogSetting("long", 0, INT64_MAX),
    "segment.ms": LogSetting("long", 1, INT64_MAX),
}


def parse_setting(name: str, text: str) -> int | float | str | frozenset[str]:
    """The value of one setting from its text. Raises INVALID_CONFIG with the name, the text and what is allowed."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise StorageError(ErrorCode.INVALID_CONFIG, f"Unknown topic config name: {name}")
    if setting.kind == "list":
        words = frozenset(word.strip() for word in text.split(",") if word.strip())
        if not words <= frozenset(setting.choices):
            raise _invalid(name, text, f"expected a list of {', '.join(setting.choices)}")
        return words
    if setting.kind == "string":
        if text not in setting.choices:
            raise _invalid(name, text, f"expected one of {', '.join(setting.choices)}")
        return text
    return _parse_number(name, text, setting)


def _parse_number(name: str, text: str, setting: LogSetting) -> int | float:
    try:
        value = float(text) if setting.kind == "double" else int(text)
    except ValueError:
        raise _invalid(name, text, f"not a number of type {setting.kind}") from None
    if setting.minimum is not None and value < setting.minimum:
        raise _invalid(name, text, f"Value must be at least {setting.minimum}")
    if setting.maximum is not None and value > setting.maximum:
        raise _invalid(name, text, f"Value must be no more than {setting.maximum}")
    return value


def _invalid(name: str, text: str, why: str) -> StorageError:
    return StorageError(ErrorCode.INVALID_CONFIG, f"Invalid value {text} for configuration {name}: {why}")


def _field(name: str) -> str:
    return name.replace(".", "_")


def _as_text(value: Any) -> str:
    return ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)
