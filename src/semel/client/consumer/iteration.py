"""An iteration over a consumer: which records were yielded, and which of them count as processed. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from semel.client.consumer.assigned_partitions import PartitionState
from semel.client.types import ConsumerRecord, TopicPartition


class RecordRun(NamedTuple):
    """Consecutive records of one partition."""

    state: PartitionState
    version: int
    records: list[ConsumerRecord]

    @property
    def is_current(self) -> bool:
        """False after a seek, a revocation or close(): what is left of it is not to be read."""
        return self.version == self.state.version


class Iteration:
    """Records that an iteration over a consumer got from one poll, yielded one by one.

    The consumer's offsets are already after all of them. What was not yielded has not been read, and what was yielded
    has been processed only when the caller wants the next record: an exception in the caller's loop leaves the last one
    unprocessed, and no automatic commit may cover it."""

    def __init__(self, runs: list[RecordRun]) -> None:
        self._runs = runs
        self._yielded = 0  # records of all runs, with those that were left out
        self._processed = 0

    def __iter__(self) -> Iterator[ConsumerRecord]:
        start = 0
        for run in self._runs:
            for record in run.records:
                if not run.is_current:
                    break
                self._yielded += 1
                yield record
                self._processed = self._yielded
            start += len(run.records)
            self._yielded = self._processed = start

    def unread(self) -> dict[TopicPartition, int]:
        """The first offset of each partition that was not yielded."""
        return self._first_offsets(self._yielded)

    def unprocessed(self) -> dict[TopicPartition, int]:
        """The same, with the record that was yielded last, while the caller works on it."""
        return self._first_offsets(self._processed)

    def _first_offsets(self, skip: int) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        for run in self._runs:
            if run.is_current and skip < len(run.records):
                offsets.setdefault(run.state.topic_partition, run.records[skip].offset)
            skip = max(0, skip - len(run.records))
        return offsets

    def give_back(self, partitions: set[TopicPartition] | None = None) -> None:
        """What was not yielded (of these partitions) is read again by the next poll."""
        unread = self.unread()
        for run in self._runs:
            partition = run.state.topic_partition
            if run.is_current and partition in unread and (partitions is None or partition in partitions):
                run.state.seek(unread[partition])
