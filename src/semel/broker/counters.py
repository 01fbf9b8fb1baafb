"""What the broker counts while it works: per request and per batch, never per record.

Counting must not be felt on the hot paths, so these are plain numbers of one thread; `metrics` reads them from another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from semel.protocol.errors import ErrorCode

# Upper bounds in seconds. A request that waits for an fsync takes some milliseconds, a long poll up to its own limit.
LATENCY_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

FENCED = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH})


class Latencies:
    """A histogram of how long requests took, waiting included."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)  # the last one: above all bounds
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1


class Counters:
    """What became of batches and of requests of transactions, since the start."""

    __slots__ = ("duplicates", "ends", "fenced", "out_of_order")

    def __init__(self) -> None:
        self.duplicates = 0  # batches that were there already
        self.out_of_order = 0  # batches with a sequence that is not the next one
        self.fenced: Counter[str] = Counter()  # requests of a producer with an older epoch, by API
        self.ends: Counter[tuple[bool, str]] = Counter()  # transactions: (is commit, reason)

    def batch_refused(self, code: ErrorCode) -> None:
        if code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            self.out_of_order += 1
        elif code in FENCED:
            self.fenced["Produce"] += 1
