"""The values that producer, consumer and admin take and return, and the errors of a consumer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from semel.client.errors import ConfigError, FatalError, IllegalStateError, RetriableError
from semel.protocol.errors import ErrorCode

# --- times as Kafka has them, in milliseconds since 1970, and as Python has them ---


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_END_MS = 2**63


def timestamp_ms(at: Any, what: str = "a timestamp") -> int:
    """A time as milliseconds since 1970: a number of them, or a datetime that knows its time zone (microseconds are
    dropped). `what` begins the message if it is neither."""
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            raise ConfigError(
                f"{what} is {at!r}, which has no time zone and so names no moment; give it one, such as "
                "datetime.now(timezone.utc) or at.astimezone()"
            )
        at = (at - EPOCH) // _MILLISECOND
    number = -1 if isinstance(at, bool) else number_of(at)
    if not 0 <= number < _END_MS:
        raise ConfigError(f"{what} is a datetime or a number of milliseconds since 1970, from 0 up, not {at!r}")
    return number


def number_of(given: Any) -> int:
    """A whole number of any type, also of numpy's, which columns give; -1 for what is none."""
    try:
        return operator.index(given)
    except TypeError:
        return -1


def datetime_of(at_ms: int) -> datetime | None:
    """In UTC; None for -1, which stands for no timestamp, and for times that Python cannot name."""
    try:
        return EPOCH + timedelta(milliseconds=at_ms) if at_ms >= 0 else None
    except OverflowError:
        return None


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def checked_topic(name: Any) -> str:
    """Refuses what names no topic; a broker would say that it does not exist (yet)."""
    if not isinstance(name, str):
        raise ConfigError(f"a topic is named by text, not {name!r}")
    return name


class OffsetAndMetadata(NamedTuple):
    """An offset to commit: that of the next record to read."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


# Keys are TopicPartition or plain pairs; a Mapping's key type says nothing of subclasses, hence both.
CheckedOffsets = Mapping[TopicPartition, OffsetAndMetadata] | Mapping[tuple[str, int], OffsetAndMetadata]


def checked_partitions(partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """Pairs as TopicPartition; says what is wrong with anything else."""
    checked = []
    for entry in partitions:
        try:
            topic, partition = entry
        except (TypeError, ValueError):
            raise IllegalStateError(f"expected (topic, partition) pairs, got {entry!r}") from None
        if not isinstance(topic, str) or number_of(partition) < 0:
            raise IllegalStateError(f"expected a topic name and a partition number from 0 up, got {entry!r}")
        checked.append(TopicPartition(topic, number_of(partition)))
    return checked


def checked_offsets(
    offsets: Mapping[tuple[str, int], Any] | Mapping[TopicPartition, Any],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Offsets to commit: numbers, or what OffsetAndMetadata consists of."""
    return dict(zip(checked_partitions(offsets), map(_checked_offset, offsets.values()), strict=True))


def _checked_offset(at: Any) -> OffsetAndMetadata:
    given = OffsetAndMetadata(*at) if isinstance(at, tuple) and 1 <= len(at) <= 3 else OffsetAndMetadata(at)
    offset = number_of(given.offset)
    if not 0 <= offset < 2**63:
        raise ConfigError(f"a committed offset is that of the next record to read, a number from 0 up, not {at!r}")
    if not isinstance(given.metadata, str | None):
        raise ConfigError(f"the metadata of a committed offset is text, not {given.metadata!r}")
    if not isinstance(given.leader_epoch, int) or not -1 <= given.leader_epoch < 2**31:
        raise ConfigError(
            f"the leader epoch of a committed offset is a number, or -1 for none, not {given.leader_epoch!r}"
        )
    return given._replace(offset=offset)


class OffsetAndTimestamp(NamedTuple):
    """The first record at or after a time."""

    offset: int
    timestamp: int


class GroupMetadata(msgspec.Struct, frozen=True):
    """The identity that commits: a transaction that carries it is refused once the member is not in its generation."""

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
    """One record as it was read: key and value are bytes, or what the consumer's deserializers made of them."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def datetime(self) -> datetime | None:
        """The timestamp in UTC; None if the record has none, or one after the year 9999."""
        return datetime_of(self.timestamp)


class PartitionError(FatalError):
    """Something is wrong with one partition; the consumer stays usable: seek, or leave the partition out."""

    def __init__(
        self, message: str, code: ErrorCode | None = None, partition: TopicPartition | None = None, offset: int = -1
    ) -> None:
        super().__init__(message, code)
        self.partition = partition
        self.offset = offset


class OffsetOutOfRangeError(PartitionError):
    """The offset is no longer (or not yet) in the log, and auto.offset.reset=none forbids to jump."""


class NoOffsetError(PartitionError):
    """The group has no committed offset for a partition, and auto.offset.reset=none forbids to choose one."""


class CorruptRecordError(PartitionError):
    """A batch whose checksum or content does not hold."""


class DeserializationError(PartitionError):
    """A record that a deserializer could not read; `record` has its bytes. The consumer's position is that record's:
    the next poll tries it again, a seek past it skips it."""

    def __init__(
        self,
        message: str,
        code: ErrorCode | None = None,
        partition: TopicPartition | None = None,
        offset: int = -1,
        record: ConsumerRecord | None = None,
    ) -> None:
        super().__init__(message, code, partition, offset)
        self.record = record


class UnknownPartitionError(PartitionError):
    """A partition does not exist (any more)."""


class RebalanceError(RetriableError):
    """The group is being rebalanced; call poll() to take part, then go on with the new assignment."""


class CommitFailedError(RetriableError):
    """Offsets were not committed: the group went on without this member, and others may own its partitions."""
