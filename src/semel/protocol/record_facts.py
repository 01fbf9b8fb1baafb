"""What the check of a batch's records finds out about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RecordFacts(NamedTuple):
    """What is known of the records of a batch that was checked."""

    min_timestamp_delta: int  # or a lower bound of it, where `is_exact` is False
    max_timestamp_delta: int
    is_exact: bool
    keyless: Sequence[int]  # numbers of the records without a key


def facts_of(timestamp_bytes: int, keyless: Sequence[int]) -> RecordFacts:
    """By the bytes of the longest timestamp delta."""
    bound = 1 << (7 * timestamp_bytes - 1)
    return RecordFacts(-bound, bound - 1, False, keyless)
