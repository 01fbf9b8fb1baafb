"""When a processing loop ends by itself.

    stop_at_end    the end offsets are taken at the start; it ends when what this instance has to read is committed
                   up to them
    idle_stop_ms   it ends when every partition was read to its end, and nothing more came for so long

Neither may mistake a slow broker for an empty topic: what counts is offsets that a broker has returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from semel.client.consumer import Consumer
from semel.client.consumer_types import TopicPartition
from semel.client.errors import FatalError, KafkaError
from semel.protocol.errors import ErrorCode


class MissingSourceError(FatalError):
    """A source topic does not exist."""


def find_source(consumer: Consumer, topics: Iterable[str], timeout_s: float) -> list[TopicPartition]:
    """All partitions of the topics; waits for topics that are being created, up to the timeout."""
    deadline_s = time.monotonic() + timeout_s
    found = []
    for topic in topics:
        left_ms = max(1.0, (deadline_s - time.monotonic()) * 1000)
        try:
            found += [TopicPartition(topic, number) for number in sorted(consumer.partitions_for(topic, left_ms))]
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            raise MissingSourceError(
                f"source topic {topic!r} does not exist, and did not appear within {timeout_s:g} s; create it "
                f"(`semel topic create {topic}`), or correct its name",
                error.code,
            ) from error
    return found


class EndOffsets:
    """Where the partitions of the source ended at the start: under read_committed, before the first open transaction.

    Each instance answers for the partitions that it has. One that has none waits for some, or until the group has
    committed the end of all of them."""

    def __init__(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        starts = consumer.beginning_offsets(partitions)
        ends = consumer.end_offsets(partitions)
        self._ends = {partition: end for partition, end in ends.items() if end > starts[partition]}

    def reached(self, consumer: Consumer) -> bool:
        """Whether all has been read. Asks the brokers only where no partition is assigned."""
        assigned = consumer.assignment()
        if not assigned:
            at = consumer.committed(self._ends) if self._ends else {}
            wanted = self._ends
        else:
            at = consumer.consumed()
            wanted = {partition: self._ends.get(partition, 0) for partition in assigned}
        return all(partition in at and at[partition].offset >= end for partition, end in wanted.items())


class IdleClock:
    """Runs while all assigned partitions are known to be read to their end: not before the first fetch response of
    each, and not while records wait at the broker."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._idle_since_s: float | None = None

    def interrupt(self) -> None:
        """Something came."""
        self._idle_since_s = None

    def is_over(self, consumer: Consumer) -> bool:
        assigned = consumer.assignment()
        if not assigned or any(consumer.current_lag(partition) != 0 for partition in assigned):
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = self._clock()
        return self._clock() - self._idle_since_s >= self._limit_s
