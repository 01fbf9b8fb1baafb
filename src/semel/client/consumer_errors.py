"""What a consumer raises beyond the client's common errors. Each names the partition and the position."""

from __future__ import annotations

from semel.client.consumer_types import TopicPartition
from semel.client.errors import FatalError, RetriableError
from semel.protocol.errors import ErrorCode


class PartitionError(FatalError):
    """Something is wrong with one partition; the consumer stays usable: seek, or leave the partition out."""

    def __init__(
        self, message: str, code: ErrorCode | None = None, partition: TopicPartition | None = None, offset: int = -1
    ) -> None:
        super().__init__(message, code)
        self.partition = partition
        self.offset = offset

    def __reduce__(self) -> tuple[type[PartitionError], tuple[str, ErrorCode | None, TopicPartition | None, int]]:  # type: ignore[override]
        return type(self), (str(self), self.code, self.partition, self.offset)


class OffsetOutOfRangeError(PartitionError):
    """The position is no longer (or not yet) in the log, and auto.offset.reset=none forbids to jump."""


class NoOffsetError(PartitionError):
    """The group has no committed position for a partition, and auto.offset.reset=none forbids to choose one."""


class CorruptRecordError(PartitionError):
    """A batch whose checksum or content does not hold."""


class UnknownPartitionError(PartitionError):
    """A partition that was asked for does not exist (any more)."""


class RebalanceError(RetriableError):
    """The group is being rebalanced; call poll() to take part, then go on with the new assignment."""


class CommitFailedError(RetriableError):
    """Positions were not committed: the group went on without this member, and others may own its partitions."""
