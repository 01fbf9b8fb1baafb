"""A partition log on disk, in Kafka's own layout: segments, indexes, producer state, recovery, compaction."""

from semel.storage.cleaner import Compactor
from semel.storage.config import LogConfig
from semel.storage.data_dir import DataDir
from semel.storage.files import DiskFiles, write_fully
from semel.storage.log import PartitionLog
from semel.storage.results import (
    AppendResult,
    DataDirLockedError,
    Isolation,
    ReadResult,
    StorageError,
    TimedBatch,
    TimestampOffset,
)
from semel.storage.sync import FsyncMode, SyncGroup
from semel.storage.validation import PARTITION_NAME, HeavyBatch

__all__ = [
    "PARTITION_NAME",
    "AppendResult",
    "Compactor",
    "DataDir",
    "DataDirLockedError",
    "DiskFiles",
    "FsyncMode",
    "HeavyBatch",
    "Isolation",
    "LogConfig",
    "PartitionLog",
    "ReadResult",
    "StorageError",
    "SyncGroup",
    "TimedBatch",
    "TimestampOffset",
    "write_fully",
]
