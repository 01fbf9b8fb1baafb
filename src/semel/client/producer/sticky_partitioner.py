"""Partitions for rows without a key."""

from __future__ import annotations

from collections.abc import Callable


class StickyPartitioner:
    """Rows without a key stay with one partition until a batch is full, then move on to another one, which `choose`
    picks: a number below its argument."""

    def __init__(self, batch_size: int, choose: Callable[[int], int]) -> None:
        self._batch_size = batch_size
        self._choose = choose
        self._current: dict[str, tuple[int, int]] = {}  # topic: partition, bytes given to it

    def partition(self, topic: str, partitions: int, size_bytes: int) -> int:
        current, given = self._current.get(topic, (-1, 0))
        if current < 0 or given >= self._batch_size or current >= partitions:
            current, given = self._other(current, partitions), 0
        self._current[topic] = (current, given + size_bytes)
        return current

    def _other(self, current: int, partitions: int) -> int:
        if partitions == 1:
            return 0
        if not 0 <= current < partitions:
            return self._choose(partitions)
        return (current + 1 + self._choose(partitions - 1)) % partitions
