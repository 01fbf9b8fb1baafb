"""Producer ids that are never handed out twice: a block is durable before its first id is used."""

from __future__ import annotations

from collections.abc import Callable

from semel.broker import faults

BLOCK_SIZE = 1000


class ProducerIds:
    """Hands out ids. After a crash the rest of the block is lost, as on Kafka; there are 2^63 ids."""

    def __init__(self, reserve: Callable[[int], range]) -> None:
        """`reserve(count)` gives ids that nobody was or will be given, durably (Broker.reserve_producer_ids)."""
        self._reserve = reserve
        self._block = range(0)
        self._floor = 0

    def skip_to(self, first: int) -> None:
        """Never hands out an id below `first`: for ids found in the log, should the store have been lost."""
        self._floor = max(self._floor, first)

    def peek(self) -> int:
        """The id that `take` will give."""
        while not self._block or self._block[-1] < self._floor:
            self._block = self._next_block()
        return max(self._block[0], self._floor)

    def take(self) -> int:
        producer_id = self.peek()
        self._block = range(producer_id + 1, self._block.stop)
        return producer_id

    def _next_block(self) -> range:
        if faults.armed:
            faults.hit("producer_ids.before_store")
        size = max(BLOCK_SIZE, self._floor - self._block.stop + BLOCK_SIZE)
        block = self._reserve(size)
        if faults.armed:
            faults.hit("producer_ids.after_store")
        return block
