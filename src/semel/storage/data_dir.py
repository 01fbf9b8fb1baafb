"""The data folder: who may use it, which partitions are in it. (API under construction.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

from semel.storage.config import LogConfig
from semel.storage.log import PartitionLog
from semel.storage.sync import SyncGroup


class DataDir:
    """A locked data folder and its partition logs, keyed by (topic, partition). Logs open their files on first use."""

    path: Path
    logs: dict[tuple[str, int], PartitionLog]
    was_clean: bool  # the last run ended with close(); otherwise logs were recovered

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        sync: SyncGroup,
        config_of: Callable[[str], LogConfig] | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> DataDir:
        """Locks the folder (DataDirLockedError if it is in use) and finds its partitions.

        `config_of(topic)` gives the configuration of a topic found on disk.
        """
        raise NotImplementedError

    def create(self, topic: str, partition: int, topic_id: UUID, config: LogConfig) -> PartitionLog:
        """A new, empty partition. Its folder exists afterwards; its segment files come with the first append."""
        raise NotImplementedError

    def delete(self, topic: str, partition: int) -> None:
        """Takes a partition away at once; its files go later (`maintain`)."""
        raise NotImplementedError

    def sync_namespace(self) -> None:
        """fsyncs created and deleted partition folders (before CreateTopics is answered)."""
        raise NotImplementedError

    def maintain(self, now_ms: int) -> None:
        """Retention, expiry of producers, removal of deleted files, checkpoints: call it every few seconds."""
        raise NotImplementedError

    def properties(self) -> Mapping[str, str]:
        """meta.properties (cluster.id, node.id, ...); written once with `init_properties`."""
        raise NotImplementedError

    def init_properties(self, properties: Mapping[str, str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Clean shutdown: flushes and snapshots every log, writes the checkpoints and the clean-shutdown marker."""
        raise NotImplementedError
