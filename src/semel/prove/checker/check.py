"""The rules, one function each, and the table that names them."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import msgspec

from semel.prove.checker.reading import (
    CheckerError,
    Fate,
    LogBatch,
    Observation,
    Place,
    Seen,
    ends,
    group_offsets,
    partitions_of,
    read,
    read_log,
)


class ViolationKind(Enum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    UNEXPECTED = "unexpected"
    REORDERED = "reordered"
    ABORTED_READ = "aborted data read"
    PARTIAL = "partial transaction"
    OFFSETS = "offsets disagree with output"
    NON_MONOTONIC = "non-monotonic read"
    UNDECIDED = "transaction never ended"
    STUCK = "pipeline came to a halt"  # found by those who run a pipeline, not by reading topics


class Violation(msgspec.Struct, frozen=True):
    """One thing that must not be. Partition and offset are -1 where there is no such place."""

    kind: ViolationKind
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


class CheckResult(msgspec.Struct, frozen=True):
    """What a check found, and how many committed records it looked at."""

    violations: list[Violation]
    records_read: int


# --- what should have come out of a pipeline ---
def value_text(record: Seen) -> str:
    return (record.value or b"").decode(errors="replace")


class OffsetsRule(NamedTuple):
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
    offsets       groups that must agree with the output
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
    offsets: tuple[OffsetsRule, ...] = ()


# --- the rules ---
SETTLE_S = 20.0
UNSEEN = (Fate.ABORTED, Fate.OPEN)


class NoRecord(NamedTuple):
    """Where something is wrong that is not a record of the topics which are checked."""

    topic: str
    partition: int = -1
    offset: int = -1
    record: str = ""


Finding = tuple[Seen | NoRecord, str]  # where, and what is wrong


@dataclass
class Evidence:
    """Everything that was read, for the rules to look at."""

    expectation: Expectation
    committed: list[Seen]
    everything: list[Seen]  # also what was aborted
    logs: dict[Place, list[LogBatch]]
    observation: Observation
    offsets: list[tuple[OffsetsRule, list[Seen], dict[Place, int]]]

    def id_of(self, record: Seen) -> str:
        return self.expectation.identify(record)

    def batch_of(self, record: Seen) -> LogBatch | None:
        batches = self.logs.get((record.topic, record.partition), [])
        at = bisect_right(batches, record.offset, key=lambda batch: batch.first_offset) - 1
        return batches[at] if at >= 0 and batches[at].last_offset >= record.offset else None

    def transaction_of(self, record: Seen) -> str:
        """What to call its transaction in a message."""
        named = self.expectation.transaction(record) if self.expectation.transaction else None
        batch = self.batch_of(record)
        known = batch.transaction if batch is not None else ""
        return f"{named} ({known})" if named and known else named or known

    @cached_property
    def by_id(self) -> dict[str, list[Seen]]:
        return _grouped(self.committed, self.id_of)

    @cached_property
    def all_by_id(self) -> dict[str, list[Seen]]:
        return _grouped(self.everything, self.id_of)

    def violation(self, kind: ViolationKind, at: Seen | NoRecord, detail: str) -> Violation:
        if isinstance(at, NoRecord):
            return Violation(kind, *at, "", detail)
        return Violation(kind, *at[:3], self.id_of(at), self.transaction_of(at), detail)


def _grouped(records: Iterable[Seen], key: Callable[[Seen], str]) -> dict[str, list[Seen]]:
    groups: dict[str, list[Seen]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(groups)


def check(
    expectation: Expectation, brokers: str, observation: Observation | None = None, *, settle_s: float = SETTLE_S
) -> CheckResult:
    """Reads everything and applies all rules. Waits up to `settle_s` for open transactions to end."""
    settled = _await_decisions(brokers, expectation.topics, settle_s)
    evidence = _gather(expectation, brokers, observation or Observation())
    rules = RULES if settled else (*RULES, (ViolationKind.UNDECIDED, _undecided))
    violations = [evidence.violation(kind, *finding) for kind, rule in rules for finding in rule(evidence)]
    return CheckResult(violations, len(evidence.committed))


def _await_decisions(brokers: str, topics: tuple[str, ...], settle_s: float) -> bool:
    """Whether every transaction in the topics has ended."""
    places = partitions_of(brokers, topics)
    deadline_s = time.monotonic() + settle_s
    while True:
        try:
            if ends(brokers, places, stable=True) == ends(brokers, places, stable=False):
                return True
        except CheckerError:
            pass  # a broker that is coming back
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)


def _gather(expectation: Expectation, brokers: str, observation: Observation) -> Evidence:
    offsets = []
    for rule in expectation.offsets:
        places = partitions_of(brokers, [rule.source])
        offsets.append((rule, read(brokers, [rule.source]), group_offsets(brokers, rule.group, places)))
    logs = {
        (topic, partition): log for topic in expectation.topics for partition, log in read_log(brokers, topic).items()
    }
    committed = read(brokers, expectation.topics)
    everything = read(brokers, expectation.topics, committed=False)
    return Evidence(expectation, committed, everything, logs, _only(observation, expectation.topics), offsets)


def _only(observation: Observation, topics: tuple[str, ...]) -> Observation:
    """What the watcher saw of some topics."""
    chosen = [number for number, record in enumerate(observation.records) if record.topic in topics]
    return Observation(
        [observation.records[number] for number in chosen],
        [observation.times_s[number] for number in chosen],
        [
            (at_s, stable, {place: end for place, end in found.items() if place[0] in topics})
            for at_s, stable, found in list(observation.ends)
        ],
        [(place, error) for place, error in observation.out_of_range if place[0] in topics],
    )


# --- the rules ---
def _lost(evidence: Evidence) -> Iterator[Finding]:
    expectation = evidence.expectation
    for record_id, wanted in (expectation.ids or {}).items():
        found = len(evidence.by_id.get(record_id, ()))
        if found < wanted:
            yield _missing(evidence, record_id, f"it should be there {wanted}x and is there {found}x")
    for name, wanted, last in _last_totals(evidence):
        if last is None or last < wanted:
            yield _missing(evidence, name, f"the output says {last}, it should end with {wanted}")


def _missing(evidence: Evidence, record_id: str, detail: str) -> Finding:
    """Names the aborted record that would have been it, if there is one."""
    traces = [
        record for record in evidence.all_by_id.get(record_id, ()) if record not in evidence.by_id.get(record_id, ())
    ]
    if not traces:
        return NoRecord("/".join(evidence.expectation.topics), record=record_id), detail
    batch = evidence.batch_of(traces[-1])
    fate = f"; what is at this offset is {batch.fate.value}" if batch is not None else ""
    return traces[-1], detail + fate


def _duplicated(evidence: Evidence) -> Iterator[Finding]:
    ids = evidence.expectation.ids
    for record_id, found in evidence.by_id.items():
        wanted = 1 if ids is None else ids.get(record_id, 1)
        for record in found[max(wanted, 1) :]:
            whose = evidence.transaction_of(found[0]) or "no transaction"
            yield record, f"it is also at {_where(found[0])} ({whose})"
    for name, wanted, last in _last_totals(evidence):
        if last is not None and last > wanted:
            detail = f"the output says {last}, it should end with {wanted}: inputs were counted twice"
            yield NoRecord("/".join(evidence.expectation.topics), record=name), detail


def _last_totals(evidence: Evidence) -> Iterator[tuple[str, int, int | None]]:
    """(name, wanted, what the output says last)."""
    expectation = evidence.expectation
    if expectation.totals is None or expectation.total_of is None:
        return
    last = dict(expectation.total_of(record) for record in evidence.committed)
    for name, wanted in expectation.totals.items():
        yield name, wanted, last.get(name)


def _unexpected(evidence: Evidence) -> Iterator[Finding]:
    ids = evidence.expectation.ids
    for record_id, found in evidence.by_id.items():
        if ids is not None and record_id not in ids and record_id not in evidence.expectation.forbidden:
            yield from ((record, "nobody expected it") for record in found)


def _reordered(evidence: Evidence) -> Iterator[Finding]:
    order = evidence.expectation.order
    if order is None:
        return
    watched = sorted(evidence.observation.records, key=lambda record: record[:2])  # as seen, by partition
    for source in (evidence.committed, watched):
        highest: dict[tuple[str, int, str], tuple[int, Seen]] = {}
        for record in source:
            place = order(record)
            if place is None:
                continue
            stream, number = place
            before = highest.get((record.topic, record.partition, stream))
            if before is not None and number < before[0]:
                earlier = before[1]
                detail = f"it comes after {evidence.id_of(earlier)} at offset {earlier.offset} of stream {stream}"
                yield record, detail
            else:
                highest[record.topic, record.partition, stream] = (number, record)


def _aborted_read(evidence: Evidence) -> Iterator[Finding]:
    for who, records in (("a reader at the end", evidence.committed), ("the watcher", evidence.observation.records)):
        for record in records:
            batch = evidence.batch_of(record)
            if batch is not None and batch.fate in UNSEEN:
                yield record, f"{who} got it, but its transaction is {batch.fate.value}"
            elif evidence.id_of(record) in evidence.expectation.forbidden:
                yield record, f"{who} got it, but the workload aborted it"


def _group_of(evidence: Evidence, record: Seen) -> str | None:
    """Whose transaction it is, where that can be said for certain."""
    expectation = evidence.expectation
    named = expectation.transaction(record) if expectation.transaction else None
    if named is None and expectation.one_epoch_each:
        batch = evidence.batch_of(record)
        named = batch.transaction if batch is not None else None
    return named or None


def _mixed_fates(evidence: Evidence) -> Iterator[Finding]:
    """One transaction, two endings."""
    fates: dict[str, dict[Fate, Seen]] = defaultdict(dict)
    for record in evidence.everything:
        name, batch = _group_of(evidence, record), evidence.batch_of(record)
        if name is not None and batch is not None:
            fates[name].setdefault(batch.fate, record)
    for name, found in fates.items():
        if Fate.COMMITTED in found and (Fate.ABORTED in found or Fate.OPEN in found):
            other = found.get(Fate.ABORTED) or found[Fate.OPEN]
            yield other, f"{name} is committed at {_where(found[Fate.COMMITTED])}, and here it is not"


def _where(record: Seen) -> str:
    return f"{record.topic}-{record.partition} offset {record.offset}"


def _half_seen(evidence: Evidence) -> Iterator[Finding]:
    """The watcher passed records of a transaction without getting them. What it had not reached yet does not count."""
    reached: dict[Place, int] = {}
    seen = {record[:3] for record in evidence.observation.records}
    for record in evidence.observation.records:
        reached[record[:2]] = max(reached.get(record[:2], -1), record.offset)
    for record in evidence.committed:
        if reached.get(record[:2], -1) > record.offset and record[:3] not in seen:
            yield record, f"the watcher never got it, but read on to offset {reached[record[:2]]}"


def _incomplete(evidence: Evidence) -> Iterator[Finding]:
    """Of a transaction whose records the workload knows, some are there and some are not."""
    for name, ids in evidence.expectation.transactions.items():
        there = [record_id for record_id in ids if record_id in evidence.by_id]
        if there and len(there) < len(ids):
            missing = sorted(ids - set(there))
            detail = f"{len(there)} of {len(ids)} records of {name} are there; not {', '.join(missing[:5])}"
            yield evidence.by_id[there[0]][0], detail


def _offsets_disagree(evidence: Evidence) -> Iterator[Finding]:
    for rule, source, offsets in evidence.offsets:
        for record in source:
            committed_offset = offsets.get((record.topic, record.partition), 0)
            for record_id in rule.outputs_of(record):
                there = record_id in evidence.by_id
                if there != (record.offset < committed_offset):
                    done = "is in the output" if there else "is not in the output"
                    detail = f"group {rule.group} stands at {committed_offset}, and input offset {record.offset} {done}"
                    yield NoRecord(*record[:3], record_id), detail


def _out_of_range(evidence: Evidence) -> Iterator[Finding]:
    for place, error in evidence.observation.out_of_range:
        yield NoRecord(*place), f"the watcher had read further than the log goes now: {error}"


def _changed_records(evidence: Evidence) -> Iterator[Finding]:
    """The same place read twice gives the same record; and nobody gets one twice or backwards."""
    now = {record[:3]: record for record in evidence.everything}
    last: dict[Place, int] = {}
    for record in evidence.observation.records:
        place = (record.topic, record.partition)
        if record.offset <= last.get(place, -1):
            yield record, f"the watcher got it after it had read offset {last[place]}"
        last[place] = max(last.get(place, -1), record.offset)
        found = now.get((*place, record.offset))
        if found is None:
            yield record, "the watcher got it, and now it is gone"
        elif found[4:] != record[4:]:
            yield record, f"the watcher got it, and now there is {evidence.id_of(found)} at this offset"


def _ends_that_went_back(evidence: Evidence) -> Iterator[Finding]:
    highest: dict[tuple[Place, bool], int] = {}
    for _, stable, found in evidence.observation.ends:
        for place, offset in found.items():
            before = highest.get((place, stable), 0)
            if offset < before:
                what = "last stable offset" if stable else "high watermark"
                yield NoRecord(*place, offset), f"the {what} went back from {before}"
            highest[place, stable] = max(before, offset)


def _undecided(evidence: Evidence) -> Iterator[Finding]:
    for record in evidence.everything:
        batch = evidence.batch_of(record)
        if batch is not None and batch.fate is Fate.OPEN:
            yield record, "committed readers wait here for ever"


RULES: tuple[tuple[ViolationKind, Callable[[Evidence], Iterator[Finding]]], ...] = (
    (ViolationKind.LOST, _lost),
    (ViolationKind.DUPLICATED, _duplicated),
    (ViolationKind.UNEXPECTED, _unexpected),
    (ViolationKind.REORDERED, _reordered),
    (ViolationKind.ABORTED_READ, _aborted_read),
    (ViolationKind.PARTIAL, _mixed_fates),
    (ViolationKind.PARTIAL, _half_seen),
    (ViolationKind.PARTIAL, _incomplete),
    (ViolationKind.OFFSETS, _offsets_disagree),
    (ViolationKind.NON_MONOTONIC, _changed_records),
    (ViolationKind.NON_MONOTONIC, _ends_that_went_back),
    (ViolationKind.NON_MONOTONIC, _out_of_range),
)
