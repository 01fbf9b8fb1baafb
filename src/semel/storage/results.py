"""What a log answers, and what it shares with the other logs of its data folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from semel.storage.files import FileCache, Handle

if TYPE_CHECKING:
    from semel.storage.log import PartitionLog

Isolation = Literal["high_watermark", "last_stable", "log_end"]


class AppendResult(NamedTuple):
    """Where an append landed. Under fsync=commit it is visible and safe once `high_watermark > last_offset`."""

    base_offset: int
    last_offset: int
    append_time_ms: int  # -1 unless the topic uses LogAppendTime (for a duplicate: as Kafka, the batch's timestamp)
    duplicate: bool  # the batch was already there; offsets are those of the first time
    log_start_offset: int


class ReadResult(NamedTuple):
    """Whole batches, from the one that holds the offset asked for; empty where nothing may be read yet."""

    records: bytes | memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]] | None  # (producer id, first offset); only for up_to="last_stable"


class ProducerInfo(NamedTuple):
    """What DescribeProducers tells of a producer."""

    producer_id: int
    epoch: int
    last_sequence: int  # -1 if unknown
    last_timestamp_ms: int
    coordinator_epoch: int  # -1 if there never was a marker
    current_txn_start_offset: int  # -1 outside a transaction


class TimestampOffset(NamedTuple):
    timestamp_ms: int
    offset: int
    leader_epoch: int


class SyncJob(NamedTuple):
    """What one round of syncing does for one log: these files and folders, and then the end is durable."""

    log: PartitionLog
    handles: list[Handle]
    folders: list[str]
    end_offset: int
    segment_base: int
    position: int
    generation: int  # of the log's state: after a failure and a reload the job is about something else


class Syncer(Protocol):
    """What a log needs of the group commit."""

    @property
    def waits_for_disk(self) -> bool: ...

    def mark_dirty(self, log: PartitionLog) -> None: ...


@dataclass(slots=True)
class LogSurroundings:
    """What the logs of one data folder share."""

    cache: FileCache
    sync: Syncer
    now_ms: Callable[[], int]
    garbage: list[tuple[int, str]] = field(default_factory=list)  # (when it is due, file to remove)
    on_start_raised: Callable[[], None] = lambda: None  # records were deleted: remember where the log starts now
