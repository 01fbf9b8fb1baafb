"""The settings of a topic that the storage obeys, with Kafka's defaults. The broker reads and checks their texts."""

from __future__ import annotations

from dataclasses import dataclass

INT64_MAX = 2**63 - 1
DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """A topic's settings. A field is Kafka's name with underscores for dots."""

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
    # A broker's setting, not a topic's.
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
