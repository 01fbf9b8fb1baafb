"""What the broker asks of its two coordinators. They live in `groups` and `transactions`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"

TopicPartition = tuple[str, int]


class Coordinator(Protocol):
    """Both are made with the broker as their only argument, before its topics are served."""

    async def start(self) -> None:
        """Replays the journal. Called once, when topics and logs are open, before the first request."""

    async def stop(self) -> None:
        """Ends timers and waiting requests."""


class Groups(Coordinator, Protocol):
    def on_marker(self, partition: int, producer_id: int, commit: bool) -> None:
        """A transaction that wrote positions into this partition of __consumer_offsets ended."""

    def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Topics are gone, and their positions with them."""
