"""The internal topics of the coordinators."""

from __future__ import annotations

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"

TopicPartition = tuple[str, int]
