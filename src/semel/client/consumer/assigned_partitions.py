"""Where a consumer stands in each of its partitions. No I/O.

A partition is *new* (its committed offset must be fetched), *resetting* (the offset for a time, or for the begin or
end of the log, must be looked up), or *ready* (it has a position). `position` is the next record that the program will
get; `fetch_offset` runs ahead of it while records wait in memory. `version` changes with every jump, so that a
response to a request from before the jump can be recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from semel.client.errors import IllegalStateError
from semel.client.types import TopicPartition
from semel.protocol.schema import NO_UUID


class ResetTo(IntEnum):
    """Where to go, as ListOffsets wants it said."""

    LATEST = -1
    EARLIEST = -2


class PartitionState:
    __slots__ = (
        "fetch_epoch",
        "fetch_offset",
        "high_watermark",
        "last_stable_offset",
        "paused",
        "position",
        "reset_to",
        "retry_at_s",
        "topic_id",
        "topic_partition",
        "unknown_since_s",
        "version",
    )

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.position: int | None = None
        self.fetch_offset = -1
        self.fetch_epoch = -1  # leader epoch of the batch before `fetch_offset`
        self.reset_to: int | None = None
        self.paused = False
        self.high_watermark: int | None = None
        self.last_stable_offset: int | None = None
        self.version = 0
        self.retry_at_s = 0.0
        self.unknown_since_s: float | None = None
        self.topic_id = NO_UUID  # of the topic that the position is of, once it is fetched

    @property
    def is_new(self) -> bool:
        return self.position is None and self.reset_to is None

    @property
    def is_ready(self) -> bool:
        return self.position is not None

    @property
    def is_gone(self) -> bool:
        """Whether its topic was not there when it was last looked at, or is another one of that name."""
        return self.unknown_since_s is not None

    def seek(self, offset: int, leader_epoch: int = -1) -> None:
        self.position = self.fetch_offset = offset
        self.fetch_epoch = leader_epoch
        self.reset_to = None
        self.version += 1

    def seek_by_program(self, offset: int) -> None:
        """To an offset of the topic that has the name now."""
        self.topic_id = NO_UUID
        self.seek(offset)

    def reset(self, reset_to: int) -> None:
        self.position = None
        self.reset_to = reset_to
        self.topic_id = NO_UUID
        self.version += 1

    def forget(self) -> None:
        """Back to new: the committed offset is fetched again."""
        self.position = self.reset_to = None
        self.topic_id = NO_UUID
        self.version += 1

    def end_offset(self, read_committed: bool) -> int | None:
        """Where the readable part of the log ended when it was last fetched."""
        return self.last_stable_offset if read_committed else self.high_watermark


class AssignedPartitions:
    """The assigned partitions, each with its state."""

    def __init__(self) -> None:
        self._states: dict[TopicPartition, PartitionState] = {}

    def __contains__(self, partition: object) -> bool:
        return partition in self._states

    def __iter__(self) -> Iterator[PartitionState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    @property
    def partitions(self) -> set[TopicPartition]:
        return set(self._states)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """The new assignment; a partition that stays keeps its position."""
        before = self._states
        wanted = sorted(set(partitions))
        for partition in before.keys() - set(wanted):
            before[partition].version += 1
        self._states = {partition: before.get(partition) or PartitionState(partition) for partition in wanted}

    def get(self, partition: TopicPartition) -> PartitionState | None:
        return self._states.get(partition)

    def of(self, partition: TopicPartition) -> PartitionState:
        try:
            return self._states[partition]
        except KeyError:
            owned = ", ".join(map(str, self._states)) or "none"
            raise IllegalStateError(
                f"partition {TopicPartition(*partition)} is not assigned to this consumer (assigned: {owned}); "
                "assign() it, or subscribe() and poll() first"
            ) from None

    def rotate(self) -> list[PartitionState]:
        """All states, beginning with another one each time, so that none is always served last."""
        if self._states:
            first = next(iter(self._states))
            self._states[first] = self._states.pop(first)
        return list(self._states.values())

    def consumed(self) -> dict[TopicPartition, tuple[int, int]]:
        """(position, leader epoch) of every ready partition: what a commit without arguments commits."""
        return {
            state.topic_partition: (state.position, state.fetch_epoch if state.position == state.fetch_offset else -1)
            for state in self
            if state.position is not None
        }
