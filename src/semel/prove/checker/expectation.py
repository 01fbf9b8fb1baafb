"""What should have come out of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from semel.prove.checker.reading import Seen


def value_text(record: Seen) -> str:
    return (record.value or b"").decode(errors="replace")


class Positions(NamedTuple):
    """A consumer group that stands, in the source, exactly where the output ends."""

    group: str
    source: str
    outputs_of: Callable[[Seen], Iterable[str]]  # the ids in the output that come from an input record


@dataclass(frozen=True)
class Expectation:
    """What is to be true of some topics at the end.

    topics        the output topics that are read
    ids           record id -> how often it must be there; None: any id may be there, once
    identify      the id of a record; its value as text by default
    order         (stream, number) of a record: numbers of a stream must rise within a partition; None: not ordered
    totals        name -> the last number that the output must say for it (balances, counts); None: no such thing
    total_of      (name, number) of a record, for `totals`
    forbidden     ids of transactions that the workload aborted itself: nobody may ever see them
    transaction   the workload's own name for the transaction of a record (say, from a header); None: it has none
    transactions  name -> ids that belong to it: all of them are there, or none
    one_epoch_each  every transaction had a producer epoch of its own, so (producer id, epoch) names it too
    positions     groups that must agree with the output
    """

    topics: tuple[str, ...]
    ids: Mapping[str, int] | None = None
    identify: Callable[[Seen], str] = value_text
    order: Callable[[Seen], tuple[str, int] | None] | None = None
    totals: Mapping[str, int] | None = None
    total_of: Callable[[Seen], tuple[str, int]] | None = None
    forbidden: frozenset[str] = frozenset()
    transaction: Callable[[Seen], str | None] | None = None
    transactions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    one_epoch_each: bool = False
    positions: tuple[Positions, ...] = ()
