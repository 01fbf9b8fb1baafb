"""What is wrong: kinds of violations, each with the record, its place and its transaction."""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec


class Kind(Enum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    UNEXPECTED = "unexpected"
    REORDERED = "reordered"
    ABORTED_READ = "aborted data read"
    PARTIAL = "partial transaction"
    POSITIONS = "positions disagree with output"
    NON_MONOTONIC = "non-monotonic read"
    UNDECIDED = "transaction never ended"
    STUCK = "pipeline came to a halt"  # found by those who run a pipeline, not by reading topics


class Violation(msgspec.Struct, frozen=True):
    """One thing that must not be. Partition and offset are -1 where there is no such place."""

    kind: Kind
    topic: str
    partition: int
    offset: int
    record: str  # its id
    transaction: str  # "producer 4000 epoch 3", the workload's own name for it, or ""
    detail: str

    def __str__(self) -> str:
        place = f"{self.topic}-{self.partition}" if self.partition >= 0 else self.topic
        place += f" offset {self.offset}" if self.offset >= 0 else ""
        whose = f", {self.transaction}" if self.transaction else ""
        return f"{self.kind.value}: {self.record or '(no record)'} at {place}{whose}: {self.detail}"


class Verdict(msgspec.Struct, frozen=True):
    """What a check found, and how much it looked at."""

    violations: list[Violation]
    records_read: int = 0
    records_observed: int = 0  # by the watcher
    transactions: int = 0
    aborted_transactions: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(violation.kind for violation in self.violations)

    def summary(self) -> str:
        """One line."""
        if self.ok:
            return f"nothing violated in {self.records_read} records, {self.transactions} transactions"
        return ", ".join(f"{count} {kind.value}" for kind, count in self.counts.most_common())
