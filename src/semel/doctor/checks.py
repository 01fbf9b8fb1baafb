"""What is wrong in a snapshot: one pure function for each kind of finding."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec

from semel.client.admin.calls import AdminCalls
from semel.client.admin.transactions import TransactionInfo
from semel.client.types import TopicPartition
from semel.doctor.findings import AILMENTS, Certainty, Diagnosis, shell_word
from semel.doctor.snapshot import AUTHORIZER, OFFSETS_TOPIC, TRANSACTIONS_TOPIC, CommitSeen, Snapshot, take_snapshot
from semel.protocol.partitioning import coordinator_partition
from semel.spark.ledger import SUFFIX, LedgerEntry
from semel.spark.offsets import parse

FINISHING = ("PrepareCommit", "PrepareAbort")
SHOWN = 3  # partitions that a text names
POOL_AT_MOST = 1_000  # instances of one program
UUID = r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4,}){1,4}"
RECENT_MS = 10 * 60_000


class Name(str):
    """A name in a command line, which may begin with a dash, as options do."""


class Limits(msgspec.Struct, frozen=True):
    """From where on something is too much."""

    long_transaction_s: float | None = None  # None: 80 % of its own timeout, at most 15 minutes
    two_phase_s: float = 60.0
    unfinished_s: float = 60.0
    fenced_requests: int = 5  # of one id in ten minutes
    leaking_ids: int = 200  # with one pattern of names
    epoch: int = 30_000  # of 32,767
    part_of_timeout: float = 0.5
    changes_of_owner: int = 2  # of a committed offset, between transactions and plain commits


def find(snapshot: Snapshot, limits: Limits | None = None) -> list[Diagnosis]:
    """All findings, the surest first."""
    chosen = limits or Limits()
    found = [finding for check in CHECKS for finding in check(snapshot, chosen)]
    order = list(Certainty)
    return sorted(found, key=lambda finding: order.index(finding.certainty))


# --- transactions -----------------------------------------------------------------------------------------------------
def hanging_transactions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    away = snapshot.coordinators_away
    coordinators = f"{away} partitions of {TRANSACTIONS_TOPIC} have no leader" if away else ""
    known = {
        (each.producer_id, place)
        for each in snapshot.transactions.values()
        if _is_under_way(each)
        for place in each.partitions
    }
    for place, producer_id, epoch, start in sorted(snapshot.still_open):
        if (producer_id, place) in known or (producer_id, place) in snapshot.known_later:
            continue
        bounds = snapshot.bounds.get(place)
        held = "" if bounds is None else f"; {bounds.end - start} offsets from there on are held back"
        seen = (
            f"producer {producer_id} (epoch {epoch}) has a transaction open since offset {start}, and no coordinator "
            f"has one of this producer in this partition{held}"
        )
        cure = command_line(
            "txn", "abort", "--topic", Name(place.topic), "--partition", place.partition, "--start-offset", start
        )
        if coordinators:
            yield Diagnosis(
                "hanging-transaction",
                str(place),
                Certainty.POSSIBLE,
                f"{seen}. It may be alive: {coordinators}",
                "bring these partitions back and look again: to abort a transaction that is alive loses its records",
                is_command=False,
            )
            continue
        certainty, ids = Certainty.CERTAIN, ""
        if snapshot.settings.get(AUTHORIZER, ""):
            certainty, ids = (
                Certainty.LIKELY,
                ", if this user may describe all transactional ids (the others are hidden)",
            )
        yield Diagnosis("hanging-transaction", str(place), certainty, seen + ids, cure)


def long_transactions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for each in snapshot.transactions.values():
        age_s = (snapshot.now_ms - each.start_time_ms) / 1000
        if each.state != "Ongoing" or each.start_time_ms < 0 or each.is_two_phase:
            continue
        limit_s = limits.long_transaction_s
        if limit_s is None:
            limit_s = min(0.8 * each.timeout_ms / 1000, 900.0)
        if age_s > limit_s:
            yield Diagnosis(
                "long-transaction",
                each.transactional_id,
                Certainty.CERTAIN,
                f"open for {_seconds(age_s)} by producer {each.producer_id} (epoch {each.epoch}), its timeout is "
                f"{_seconds(each.timeout_ms / 1000)}; {_held(snapshot, each)}",
                command_line("txn", "abort", Name(each.transactional_id)),
            )


def prepared_transactions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for each in snapshot.transactions.values():
        age_s = (snapshot.now_ms - each.start_time_ms) / 1000
        if each.is_two_phase and each.state == "Ongoing" and each.start_time_ms >= 0 and age_s > limits.two_phase_s:
            yield Diagnosis(
                "prepared-transaction",
                each.transactional_id,
                Certainty.POSSIBLE,
                f"open for {_seconds(age_s)} without a timeout; {_held(snapshot, each)}. Start its application, which "
                "ends it as its database says. The command aborts it: only if nothing there names this transaction",
                command_line("txn", "abort", Name(each.transactional_id), "--force"),
            )


def unfinished_decisions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for each in snapshot.transactions.values():
        age_s = (snapshot.now_ms - each.start_time_ms) / 1000
        if each.state in FINISHING and each.start_time_ms >= 0 and age_s > limits.unfinished_s:
            yield Diagnosis(
                "unfinished-decision",
                each.transactional_id,
                Certainty.LIKELY,
                f"{each.state}, begun {_seconds(age_s)} ago; waiting for {_places(each.partitions)}",
                "see the log of the brokers that lead these partitions: they take no markers (a full disk, no leader)",
                is_command=False,
            )


def fenced_again(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    """Only where the broker lists its events."""
    since_ms = snapshot.now_ms - RECENT_MS
    refused = [step for step in snapshot.steps or () if _is_fenced(step.error) and step.time_ms >= since_ms]
    for transactional_id, count in Counter(step.transactional_id for step in refused).items():
        if count < limits.fenced_requests:
            continue
        last = [step for step in refused if step.transactional_id == transactional_id][-1]
        yield Diagnosis(
            "fenced-again",
            transactional_id,
            Certainty.LIKELY,
            f"{count} requests were refused in ten minutes, the last one a {last.api} with producer "
            f"{last.producer_id}, epoch {last.epoch}, of {last.client or 'an unknown client'}. Stop the program that "
            "should not run; the command shows who took the id from whom",
            command_line("trace", "--transactional-id", Name(transactional_id)),
        )


def leaking_ids(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    patterns: dict[str, list[str]] = {}
    for transactional_id in snapshot.ids:
        patterns.setdefault(_pattern(transactional_id), []).append(transactional_id)
    for pattern, ids in patterns.items():
        if len(ids) >= limits.leaking_ids and pattern != ids[0] and not _is_pool(ids):
            yield Diagnosis(
                "leaking-ids",
                pattern,
                Certainty.LIKELY,
                f"{len(ids):,} ids look like this, such as {ids[0]!r} and {ids[-1]!r}. Give each instance a name that "
                "stays the same (semel.process: instance=...). The ids expire by themselves; the command shows them",
                command_line("txn", "list"),
            )


def worn_out_epochs(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    """With transactions of the second generation every transaction takes an epoch: then they are no sign."""
    names = {each.producer_id: each.transactional_id for each in snapshot.transactions.values()}
    highest: dict[int, tuple[int, TopicPartition]] = {}
    for place, producers in snapshot.producers.items():
        for each in producers:
            if each.epoch >= limits.epoch and each.epoch > highest.get(each.producer_id, (-1, place))[0]:
                highest[each.producer_id] = (each.epoch, place)
    for producer_id, (epoch, place) in sorted(highest.items()):
        name = names.get(producer_id)
        if name is not None and snapshot.transaction_version >= 2:
            continue
        who = f"transactional id {name!r}" if name is not None else "a producer without a transactional id"
        yield Diagnosis(
            "worn-out-epoch",
            f"producer {producer_id}",
            Certainty.LIKELY,
            f"{who} is at epoch {epoch} of 32767 in {place}. See its log for what fails; a new start of it begins at "
            "epoch 0 with a new producer id. The command shows what it writes",
            command_line("consume", Name(place.topic), "-p", place.partition, "-o", -10, "-e"),
        )


# --- groups -----------------------------------------------------------------------------------------------------------
def unstable_offsets(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    """Only of transactions that are long open: each commit is pending for a moment."""
    count = sum(place.topic == OFFSETS_TOPIC for place in {*snapshot.bounds, *snapshot.leaderless}) or 1
    for group, state in snapshot.groups.items():
        if not state.unstable:
            continue
        kept_in = TopicPartition(OFFSETS_TOPIC, coordinator_partition(group, count))
        holders = _holders(snapshot, limits, {kept_in})
        if holders:
            name, cure = holders[0]
            yield Diagnosis(
                "unstable-offsets",
                group,
                Certainty.LIKELY if len(holders) == 1 else Certainty.POSSIBLE,
                f"the offsets of {_places(state.unstable)} are pending; {name} has a transaction open in {kept_in}, "
                "which keeps them",
                cure,
            )


def groups_behind_transactions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for group, state in snapshot.groups.items():
        for place, offset in sorted(state.committed.items()):
            bounds = snapshot.bounds.get(place)
            if bounds is None or not offset == bounds.stable < bounds.end:
                continue
            holders = _holders(snapshot, limits, {place})
            if holders:
                name, cure = holders[0]
                yield Diagnosis(
                    "group-behind-transaction",
                    f"{group}, {place}",
                    Certainty.LIKELY,
                    f"committed offset {offset} is the last stable offset, the log ends at {bounds.end}: {name} holds "
                    f"back {bounds.end - offset} offsets",
                    cure,
                )


def groups_out_of_range(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for group, state in snapshot.groups.items():
        for place, offset in sorted(state.committed.items()):
            bounds = snapshot.bounds.get(place)
            if bounds is None or bounds.start <= offset <= bounds.end:
                continue
            if offset < bounds.start:
                seen = f"records from offset {offset} to {bounds.start} were deleted before they were read"
                reset: tuple[object, ...] = ("--to-offset", bounds.start)
            else:
                seen = f"the log ends at {bounds.end}: the topic was made anew, or lost records"
                reset = ("--to-earliest",)
            where = f"{place.topic}:{place.partition}"
            yield Diagnosis(
                "group-out-of-range",
                f"{group}, {place}",
                Certainty.CERTAIN,
                f"committed offset {offset}; {seen}. Stop its members before the command",
                command_line("group", "reset", Name(group), "--topic", Name(where), *reset),
            )


def autocommit_beside_transactions(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    by_place: dict[tuple[str, str, int], list[CommitSeen]] = {}
    for commit in snapshot.commits:
        by_place.setdefault((commit.group, commit.topic, commit.partition), []).append(commit)
    found = set()
    for (group, topic, partition), commits in by_place.items():
        kinds = [commit.in_transaction for commit in commits]
        changes = sum(a != b for a, b in pairwise(kinds))
        if changes >= limits.changes_of_owner and group not in found:
            found.add(group)
            yield Diagnosis(
                "autocommit-beside-transactions",
                group,
                Certainty.LIKELY,
                f"of the last {len(kinds)} commits for {topic}-{partition} {kinds.count(True)} came with a transaction "
                f"and {kinds.count(False)} without. Set enable.auto.commit=false in the consumer of the pipeline; the "
                "command shows its members",
                command_line("group", "describe", Name(group)),
            )


# --- pipelines --------------------------------------------------------------------------------------------------------
def short_timeouts(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for name, entries in snapshot.ledgers.items():
        application = name.removesuffix(SUFFIX)
        found = snapshot.transactions.get(application)
        longest = max((entry for entry in entries), key=lambda entry: entry.took_ms)
        if found is None or found.is_two_phase or longest.took_ms <= limits.part_of_timeout * found.timeout_ms:
            continue
        yield Diagnosis(
            "timeout-too-short",
            application,
            Certainty.CERTAIN,
            f"batch {longest.batch_id} took {_seconds(longest.took_ms / 1000)}, the timeout is "
            f"{_seconds(found.timeout_ms / 1000)}. Raise transaction_timeout_ms of the sink (the broker's limit is "
            f"transaction.max.timeout.ms={snapshot.settings.get('transaction.max.timeout.ms', 'unknown')}), or lower "
            "maxOffsetsPerTrigger. The command shows all batches",
            command_line("audit", "--app", Name(application)),
        )


def ledger_misfits(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for name, problem in snapshot.ledger_problems.items():
        yield Diagnosis(
            "ledger-misfit",
            name,
            Certainty.CERTAIN,
            problem,
            command_line("topic", "alter", Name(name), "--config", "cleanup.policy=compact")
            if "cleanup.policy" in problem
            else "choose another application id: another program made this topic",
            is_command="cleanup.policy" in problem,
        )
    for name, entries in snapshot.ledgers.items():
        last = max(entries, key=lambda entry: entry.sequence)
        application = name.removesuffix(SUFFIX)
        for certainty, misfit in _misfits(snapshot, last):
            yield Diagnosis(
                "ledger-misfit",
                application,
                certainty,
                f"entry {last.sequence} (batch {last.batch_id}) says {misfit}. Restore the topic, or start over under "
                "another application id; the command shows what the ledger says",
                command_line("audit", "--app", Name(application)),
            )


def _misfits(snapshot: Snapshot, last: LedgerEntry) -> Iterator[tuple[Certainty, str]]:
    for written in last.written:
        place = TopicPartition(written.topic, written.partition)
        bounds = snapshot.bounds.get(place)
        if place in snapshot.leaderless:
            continue
        if bounds is None:
            hidden = bool(snapshot.settings.get(AUTHORIZER, ""))
            yield (
                Certainty.POSSIBLE if hidden else Certainty.CERTAIN,
                f"that it wrote {written.count} rows to {place}, which does not exist"
                f"{', or is hidden from this user' if hidden else ''}",
            )
        elif written.last_offset >= bounds.end:
            yield (
                Certainty.CERTAIN,
                f"that it wrote offset {written.last_offset} of {place}, but that ends at {bounds.end}",
            )
    for text in last.ends:
        for topic, parts in (parse(text) or {}).items():
            for index, offset in parts.items():
                bounds = snapshot.bounds.get(TopicPartition(topic, index))
                if bounds is not None and offset > bounds.end:
                    yield (
                        Certainty.POSSIBLE,
                        f"that it read {topic}-{index} up to offset {offset}, but that ends at {bounds.end}, unless it "
                        "reads a topic of this name in another cluster",
                    )


# --- settings ---------------------------------------------------------------------------------------------------------
def unverified_writes(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    name = "transaction.partition.verification.enable"
    if snapshot.settings.get(name) == "false":
        yield Diagnosis(
            "unverified-writes",
            "the brokers",
            Certainty.CERTAIN,
            f"{name} is false",
            f"kafka-configs.sh --bootstrap-server BROKER --alter --entity-type brokers --entity-default --add-config "
            f"{name}=true (and take it out of server.properties)",
            is_command=False,
        )


def risky_settings(snapshot: Snapshot, limits: Limits) -> Iterator[Diagnosis]:
    for risk in snapshot.risks:
        seen, _, cure = risk.rpartition(". ")
        topic = re.search(r"topic '([^']*)'", risk)
        yield Diagnosis(
            "at-risk", topic[1] if topic else "the cluster", Certainty.CERTAIN, seen or risk, cure, is_command=False
        )


CHECKS: tuple[Callable[[Snapshot, Limits], Iterable[Diagnosis]], ...] = (
    hanging_transactions,
    long_transactions,
    prepared_transactions,
    unfinished_decisions,
    fenced_again,
    leaking_ids,
    worn_out_epochs,
    unstable_offsets,
    groups_behind_transactions,
    groups_out_of_range,
    autocommit_beside_transactions,
    short_timeouts,
    ledger_misfits,
    unverified_writes,
    risky_settings,
)


# --- pieces -----------------------------------------------------------------------------------------------------------
def _is_under_way(txn: TransactionInfo) -> bool:
    return txn.state in ("Ongoing", *FINISHING, "PrepareEpochFence")


def _is_fenced(error: str) -> bool:
    return error in ("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")


def _holders(snapshot: Snapshot, limits: Limits, places: set[TopicPartition]) -> list[tuple[str, str]]:
    """(who, cure) of transactions that are findings themselves and hold one of these partitions."""
    names = {str(place) for place in places}
    open_ones = [*long_transactions(snapshot, limits), *prepared_transactions(snapshot, limits)]
    found = [
        (f"transactional id {finding.where!r}", finding.cure)
        for finding in open_ones
        if places & set(snapshot.transactions[finding.where].partitions)
    ]
    hanging = (finding for finding in hanging_transactions(snapshot, limits) if finding.where in names)
    return found + [("a hanging transaction", finding.cure) for finding in hanging]


def _held(snapshot: Snapshot, txn: TransactionInfo) -> str:
    held = [place for place in txn.partitions if (at := snapshot.bounds.get(place)) is not None and at.stable < at.end]
    lag = sum(snapshot.bounds[place].end - snapshot.bounds[place].stable for place in held)
    return f"it holds back {lag} offsets of {_places(held)}" if held else "it holds back no records now"


def _pattern(name: str) -> str:
    """A name with its changing parts replaced: hexadecimal digits (uuids) and numbers."""
    return re.sub(f"{UUID}|[0-9]+", "*", name)


def _is_pool(ids: list[str]) -> bool:
    """Instances with numbers from 0 or 1 on, few of which are missing; a program that counts its starts makes more."""
    if len(ids) > POOL_AT_MOST or any(re.search(UUID, name) for name in ids):
        return False
    columns = list(zip(*([int(number) for number in re.findall("[0-9]+", name)] for name in ids), strict=True))
    varying = [column for column in columns if min(column) != max(column)]
    spans = math.prod(max(column) - min(column) + 1 for column in varying)
    return all(min(column) <= 1 for column in varying) and spans <= 2 * len(ids)


def _places(places: Iterable[TopicPartition]) -> str:
    names = [str(place) for place in places]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or "no partition"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def command_line(*words: object) -> str:
    """A command line of semel, as a shell takes it. The doctor adds how to reach the cluster."""
    line, names = ["semel"], []
    for word in words:
        if not isinstance(word, Name) or not word.startswith("-"):
            line.append(str(word))
        elif line[-1].startswith("--"):
            line[-1] += f"={word}"
        else:
            names.append(str(word))
    return " ".join(map(shell_word, [*line, *(["--", *names] if names else [])]))


# --- One examination: a snapshot of the cluster, and what is wrong in it ---


class Examination(msgspec.Struct, frozen=True):
    findings: list[Diagnosis]
    not_looked_at: list[str]
    took_ms: float


async def examine(
    calls: AdminCalls,
    limits: Limits | None = None,
    timeout_ms: float = 10_000,
    on_step: Callable[[int, str], None] = lambda number, what: None,
) -> Examination:
    """Looks at a whole cluster. Changes nothing. `on_step` is that of `take_snapshot`."""
    started_s = time.monotonic()
    snapshot = await take_snapshot(calls, timeout_ms, on_step)
    missing = list(snapshot.not_looked_at)
    if snapshot.steps is None:
        missing.append("fenced-again: only semel's broker lists who was fenced")
    found = find(snapshot, limits)
    return Examination(found, missing, (time.monotonic() - started_s) * 1000)


def as_json(finding: Diagnosis) -> dict[str, object]:
    """A finding with all its texts."""
    return {
        "name": finding.name,
        "where": finding.where,
        "certainty": finding.certainty.value,
        "title": AILMENTS[finding.name].title,
        "seen": finding.seen,
        "meaning": AILMENTS[finding.name].meaning,
        "cure": finding.cure,
        "is_command": finding.is_command,
    }
