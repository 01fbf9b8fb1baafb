"""The values that a consumer takes and gives."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from semel.client.errors import ConfigError


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetAndMetadata(NamedTuple):
    """A position to commit: the offset of the next record to read."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class OffsetAndTimestamp(NamedTuple):
    """The first record at or after a time."""

    offset: int
    timestamp: int


class GroupMetadata(msgspec.Struct, frozen=True):
    """Who commits: a transaction that carries it is refused once this member is no longer in its generation."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None
    commits_itself: bool = False  # whether the consumer it comes from has enable.auto.commit

    @classmethod
    def for_transaction(cls, group: GroupMetadata | str) -> GroupMetadata:
        """Whose offsets a transaction is to commit. Refuses a consumer that commits them by itself: its commits come
        before the transaction's, and if that is aborted, the records are lost."""
        metadata = cls(group) if isinstance(group, str) else group
        if metadata.commits_itself:
            raise ConfigError(
                f"a transaction is to commit the offsets of group {metadata.group_id!r}, but its consumer has "
                "enable.auto.commit=true and commits them by itself: after an abort their records would be skipped. "
                "Set enable_auto_commit=False in the consumer"
            )
        return metadata


class ConsumerRecord(NamedTuple):
    """One record as it was read."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
