"""Who may write what a partition leads to, for sinks that keep the offsets beside the data."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from semel.client.types import TopicPartition

NO_TOPIC_ID = UUID(int=0)  # of brokers before Kafka 2.8


class Claim(NamedTuple):
    """What an instance knows about its partition. `next_offset` is None before the first commit."""

    generation: int
    next_offset: int | None


Claims = dict[TopicPartition, Claim]
