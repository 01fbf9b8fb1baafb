"""What an application has done, by its ledger and its topics alone.

    result = audit("localhost:9092", "payments")
    for finding in result.findings:
        print(finding)

The ledger says which input each committed batch covered and what it wrote where; this reads it, looks for gaps and
overlaps, and counts the records that are really there. It shares no code with what it looks at: topics are read by
confluent-kafka, ledger entries by their documented JSON; import-linter keeps it so.
"""

from __future__ import annotations

import difflib
import json
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import Enum
from functools import partial
from io import StringIO
from itertools import pairwise
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from semel.progress import ProgressBar

# --- What can be wrong with a ledger and what it says, one rule each ---
SUFFIX = ".ledger"
KNOWN_FORMAT = 1
Place = tuple[str, int]
Offsets = dict[Place, int]


class UnreadableEntryError(ValueError):
    """What is in the ledger is no entry of a known format."""


class AuditedWrite(msgspec.Struct, frozen=True):
    """What a batch says that it wrote into one partition."""

    topic: str
    partition: int
    count: int
    first_offset: int
    last_offset: int


class AuditEntry(msgspec.Struct, frozen=True):
    """One committed batch. A source's start or end is a text: offsets in topics as JSON, or whatever it uses."""

    sequence: int
    query_id: str
    batch_id: int
    starts: list[str | None]
    ends: list[str | None]
    run_id: str = ""
    written: list[AuditedWrite] = []
    rows: int = 0  # all that was written, dead letters among them
    dead_letters: int = 0
    attempts: int = 1
    committed_at_ms: int = 0
    format: int = 0

    @property
    def has_sources(self) -> bool:
        """A batch job has none: it is no link of the chain."""
        return bool(self.starts or self.ends)


_decode_entry = msgspec.json.Decoder(AuditEntry).decode


def decode(value: bytes, offset: int) -> AuditEntry:
    try:
        entry = _decode_entry(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableEntryError(f"offset {offset} of the ledger is no entry: {error}") from error
    if entry.format != KNOWN_FORMAT:
        raise UnreadableEntryError(
            f"offset {offset} of the ledger has format {entry.format}, this version reads {KNOWN_FORMAT}; use the "
            "semel that wrote it, or a newer one"
        )
    return entry


def offsets_in(text: str | None) -> Offsets | None:
    """{"topic": {"0": 23}} as offsets; None for a source that is not Kafka. Names with "$" are the source's notes."""
    value = _parsed(text)
    if not _are_offsets(value):
        return None
    return {
        (topic, int(partition)): int(offset)
        for topic, parts in value.items()
        if not topic.startswith("$")
        for partition, offset in parts.items()
    }


def topic_ids(text: str | None) -> dict[str, str]:
    """Which topics the offsets are of; nothing where the source does not say it."""
    value = _parsed(text)
    found = value.get("$ids") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except ValueError:
        return None


def _are_offsets(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    parts = [parts for topic, parts in value.items() if not topic.startswith("$")]
    return bool(parts) and all(isinstance(part, dict) and all(p.isdecimal() for p in part) for part in parts)


# --- the rules ---
class FindingKind(Enum):
    GAP = "gap"
    OVERLAP = "overlap"
    COUNT = "count"
    LEDGER = "ledger"
    OFFSETS = "offsets"


class Finding(msgspec.Struct, frozen=True):
    """One thing that must not be. `sequence` is the ledger's number of the batch, -1 if it is about no batch."""

    kind: FindingKind
    sequence: int
    place: str
    detail: str

    def __str__(self) -> str:
        batch = f"entry {self.sequence}, " if self.sequence >= 0 else ""
        return f"{self.kind.value}: {batch}{self.place}: {self.detail}"


def named(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def chain(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """Every batch starts where the one before ended, and no number is there twice or missing."""
    for before, entry in pairwise(entries):
        if entry.sequence == before.sequence:
            detail = f"batch {before.batch_id} and batch {entry.batch_id} have the same number: two writers"
            yield Finding(FindingKind.LEDGER, entry.sequence, "the ledger", detail)
        elif entry.sequence != before.sequence + 1:
            detail = f"the entry before it is {before.sequence}; those in between are gone"
            yield Finding(FindingKind.LEDGER, entry.sequence, "the ledger", detail)
    for before, entry in pairwise([entry for entry in entries if entry.has_sources]):
        yield from _between(before, entry)


def _between(before: AuditEntry, entry: AuditEntry) -> Iterator[Finding]:
    if len(before.ends) != len(entry.starts):
        detail = f"{len(entry.starts)} sources, the batch before had {len(before.ends)}"
        yield Finding(FindingKind.LEDGER, entry.sequence, "sources", detail)
        return
    for number, (end, start) in enumerate(zip(before.ends, entry.starts, strict=True)):
        old, new = offsets_in(end), offsets_in(start)
        if old is not None and new is not None:
            yield from _between_offsets(before, entry, _of_the_same_topics(old, end, start), new)
        elif end != start and start is not None:
            detail = f"starts at {start}, the batch before ended at {end}"
            yield Finding(FindingKind.GAP, entry.sequence, f"source {number}", detail)


def _of_the_same_topics(ends: Offsets, end: str | None, start: str | None) -> Offsets:
    """Without topics that were created anew since: those begin anywhere."""
    before, now = topic_ids(end), topic_ids(start)
    others = {topic for topic, topic_id in before.items() if now.get(topic, topic_id) != topic_id}
    return {place: at for place, at in ends.items() if place[0] not in others}


def _between_offsets(before: AuditEntry, entry: AuditEntry, old: Offsets, new: Offsets) -> Iterator[Finding]:
    for place, end in sorted(old.items()):
        start = new.get(place)
        if start is None:
            detail = f"entry {before.sequence} ended at {end}, this one does not read the partition"
            yield Finding(FindingKind.GAP, entry.sequence, named(place), detail)
        elif start > end:
            detail = f"offsets {end} to {start - 1} were skipped: entry {before.sequence} ended at {end}"
            yield Finding(FindingKind.GAP, entry.sequence, named(place), detail)
        elif start < end:
            detail = f"offsets {start} to {end - 1} were read before: entry {before.sequence} ended at {end}"
            yield Finding(FindingKind.OVERLAP, entry.sequence, named(place), detail)


def backwards(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """No batch ends before it starts."""
    for entry in entries:
        for start, end in zip(entry.starts, entry.ends, strict=False):
            old, new = offsets_in(start) or {}, offsets_in(end) or {}
            for place, offset in sorted(old.items()):
                if new.get(place, offset) < offset:
                    detail = f"starts at {offset} and ends at {new[place]}"
                    yield Finding(FindingKind.LEDGER, entry.sequence, named(place), detail)


def by_place(entries: Sequence[AuditEntry]) -> dict[Place, list[tuple[AuditEntry, AuditedWrite]]]:
    found: dict[Place, list[tuple[AuditEntry, AuditedWrite]]] = defaultdict(list)
    for entry in entries:
        for part in entry.written:
            if part.count:
                found[part.topic, part.partition].append((entry, part))
    return dict(found)


def output_ranges(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """What batches wrote into a partition lies one behind the other."""
    for place, parts in sorted(by_place(entries).items()):
        for (before, old), (entry, new) in pairwise(parts):
            if new.first_offset <= old.last_offset:
                detail = (
                    f"says that it wrote offsets {new.first_offset} to {new.last_offset}, entry {before.sequence} says "
                    f"{old.first_offset} to {old.last_offset}"
                )
                yield Finding(FindingKind.OVERLAP, entry.sequence, named(place), detail)


def sums(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """The rows of a batch are the sum of its partitions."""
    for entry in entries:
        total = sum(part.count for part in entry.written)
        if total != entry.rows:
            detail = f"says {entry.rows} rows, its partitions add up to {total}"
            yield Finding(FindingKind.COUNT, entry.sequence, "the ledger", detail)


def counts(place: Place, parts: Sequence[tuple[AuditEntry, AuditedWrite]], found: Sequence[int]) -> Iterator[Finding]:
    """The records between a batch's offsets are as many as it says."""
    for (entry, part), there in zip(parts, found, strict=True):
        if there == part.count:
            continue
        why = (
            "records are missing"
            if there < part.count
            else "another producer writes to this partition, or rows were written twice"
        )
        detail = f"offsets {part.first_offset} to {part.last_offset} hold {there} records, it says {part.count}: {why}"
        yield Finding(FindingKind.COUNT, entry.sequence, named(place), detail)


def group(ends: Offsets, committed: Offsets) -> Iterator[Finding]:
    """The consumer group stands where the ledger ends."""
    for place, end in sorted(ends.items()):
        if committed.get(place, end) != end:
            detail = f"the group stands at {committed[place]}, the ledger ends at {end}: somebody moved the group"
            yield Finding(FindingKind.OFFSETS, -1, named(place), detail)


RULES = (chain, backwards, output_ranges, sums)


# --- The audit of one application, from its ledger to what is in its topics ---
CHUNK = 5_000
COORDINATOR_MOVES = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


class CannotLookError(Exception):
    """The cluster, or what is to be looked at, cannot be reached: nothing can be said. The message says what to do."""


class AuditedCluster:
    """A connection for looking only. `options` are librdkafka's, such as security.protocol."""

    def __init__(self, brokers: str, options: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
        self.brokers = brokers
        self.timeout_s = timeout_s
        self._settings: dict[str, Any] = {
            "bootstrap.servers": brokers,
            "log_level": 0,
            "reconnect.backoff.max.ms": 500,
            **(options or {}),
        }
        try:
            self._admin = AdminClient(self._settings)
        except KafkaException as error:
            raise CannotLookError(f"the options are wrong: {error.args[0].str()}") from error
        self._reader = self._open("semel-audit")

    def close(self) -> None:
        self._reader.close()

    def topics(self) -> dict[str, list[int]]:
        """Every topic with its partitions."""
        with self._trouble("its topics cannot be listed"):
            found = self._admin.list_topics(timeout=self.timeout_s).topics
        return {name: sorted(topic.partitions) for name, topic in found.items()}

    def is_compacted(self, topic: str) -> bool:
        """Whether records may go when newer ones have their key. Where the rights to ask are missing: no."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answer = self._admin.describe_configs([resource], request_timeout=self.timeout_s)[resource].result()
        except KafkaException:
            return False
        return "compact" in (answer["cleanup.policy"].value or "")

    def group_offsets(self, group: str, places: Iterable[Place]) -> Offsets:
        """The committed offsets of a group; partitions without one are left out."""
        wanted = [TopicPartition(*place) for place in places]
        if not wanted:
            return {}
        with closing(self._open(group)) as consumer, self._trouble(f"group {group} cannot be read"):
            found = self._committed(consumer, wanted)
        return {
            (place.topic, place.partition): place.offset for place in found if place.offset >= 0 and not place.error
        }

    def _committed(self, consumer: Any, wanted: list[Any]) -> list[Any]:
        """Retries while the group's coordinator is moving or starting."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                found: list[Any] = consumer.committed(wanted, timeout=max(0.1, deadline_s - time.monotonic()))
                return found
            except KafkaException as error:
                if error.args[0].code() not in COORDINATOR_MOVES or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    def ends(self, places: Iterable[Place]) -> dict[Place, tuple[int, int]]:
        """(first offset that is still there, end of what is decided) of partitions."""
        found = {}
        with self._trouble("the ends of partitions cannot be read"):
            for place in places:
                low, high = self._reader.get_watermark_offsets(TopicPartition(*place), timeout=self.timeout_s)
                found[place] = (low, high)
        return found

    def records(self, place: Place, first: int, last: int) -> Iterator[Any]:
        """Committed records from one offset to another, both included."""
        self._reader.assign([TopicPartition(*place, first)])
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            for message in self._some():
                if self._passed(message, place, last):
                    return
                if message.error() is None:
                    deadline_s = time.monotonic() + self.timeout_s
                    yield message
            if time.monotonic() > deadline_s:
                raise CannotLookError(
                    f"{place[0]}-{place[1]} cannot be read up to offset {last}: nothing came for {self.timeout_s:.0f} "
                    "s. An open transaction may hold readers back (`semel txn list --state Ongoing`); or give more "
                    "time with --timeout"
                )

    def _some(self) -> list[Any]:
        """What is there, after waiting a moment for the first."""
        message = self._reader.poll(0.2)
        more: list[Any] = self._reader.consume(CHUNK, 0)
        return more if message is None else [message, *more]

    def _passed(self, message: Any, place: Place, last: int) -> bool:
        """Whether this is behind the last one that is wanted. Markers have offsets too, so an end can come instead."""
        error = message.error()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            return bool(message.offset() > last)
        if not error.retriable() and error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            raise CannotLookError(f"{place[0]}-{place[1]} cannot be read: {error.str()}")
        return False

    def _open(self, group: str) -> Consumer:
        return Consumer(
            {
                "group.id": group,  # never joined: partitions are assigned by hand
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                **self._settings,
            }
        )

    @contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise CannotLookError(
                f"{self.brokers}: {what} ({error.args[0].str()}). Is the address right (--brokers), is a broker "
                "running there, are rights or security options missing (-X)?"
            ) from error


Range = tuple[int, int]  # first and last offset, both included


def count(
    cluster: AuditedCluster, place: Place, ranges: Sequence[Range], passed: Callable[[int], None] = lambda offsets: None
) -> tuple[list[int], int]:
    """(how many records each range holds, how many in between belong to none). `passed` is called with how many offsets
    were read so far, now and then."""
    firsts = [first for first, _ in ranges]
    found, foreign = [0] * len(ranges), 0
    start = min(firsts)
    for number, message in enumerate(cluster.records(place, start, max(last for _, last in ranges))):
        if number % CHUNK == 0:
            passed(message.offset() - start)
        at = bisect_right(firsts, message.offset()) - 1
        if at >= 0 and message.offset() <= ranges[at][1]:
            found[at] += 1
        else:
            foreign += 1
    return found, foreign


# --- the audit of one application ---
LOOKS = 3  # at a ledger that grows meanwhile


class Audit(msgspec.Struct, frozen=True):
    application_id: str
    entries: list[AuditEntry]
    findings: list[Finding]
    notes: list[str]
    counted: int  # records of the output that were counted
    lag: dict[str, int]  # source partition -> offsets that no batch has covered yet

    @property
    def clean(self) -> bool:
        return not self.findings


def audit(
    brokers: str,
    application_id: str,
    *,
    last: int = 0,
    counting: bool = True,
    options: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    progress: ProgressBar | None = None,
) -> Audit:
    """Looks at the last so many batches (0: at all that the ledger has). CannotLookError if that is not possible."""
    with closing(AuditedCluster(brokers, options, timeout_s)) as cluster:
        return _look(cluster, application_id, last, counting, progress or ProgressBar("auditing", out=StringIO()))


def _look(cluster: AuditedCluster, application_id: str, last: int, counting: bool, progress: ProgressBar) -> Audit:
    progress.show(0, "reading the ledger")
    topics = cluster.topics()
    entries, committed = _settled(cluster, application_id, topics)
    chosen = entries[-last:] if last else entries
    found = [finding for rule in RULES for finding in rule(chosen)]
    ends = _ends(chosen)
    found += group({place: end for place, end in ends.items() if place[0] in topics}, committed)
    counted, notes = 0, list[str]()
    if counting:
        counted, more, notes = _count(cluster, chosen, topics, progress)
        found += more
    lag = _lag(cluster, ends, topics)
    return Audit(application_id, chosen, sorted(found, key=lambda f: f.sequence), notes, counted, lag)


def _settled(
    cluster: AuditedCluster, application_id: str, topics: Mapping[str, list[int]]
) -> tuple[list[AuditEntry], Offsets]:
    """The ledger and the group's committed offsets of the same moment, although the application may go on meanwhile."""
    ledger = (f"{application_id}{SUFFIX}", 0)
    if ledger[0] not in topics:
        raise CannotLookError(_no_ledger(application_id, cluster.brokers, topics))
    entries: list[AuditEntry] = []
    for _ in range(LOOKS):
        low, high = cluster.ends([ledger])[ledger]
        entries = _entries(cluster, ledger, low, high)
        sources = [place for place in _ends(entries) if place[0] in topics]
        committed = cluster.group_offsets(application_id, sources)
        if cluster.ends([ledger])[ledger][1] == high:
            return entries, committed
    return entries, {}  # it writes too fast for its offsets to be compared


def _entries(cluster: AuditedCluster, ledger: Place, low: int, high: int) -> list[AuditEntry]:
    messages = cluster.records(ledger, low, high - 1) if high > low else ()
    found = [_decoded(ledger[0], message) for message in messages if message.value() is not None]
    if not found:
        raise CannotLookError(f"the ledger {ledger[0]} is empty: the application has not committed a batch yet")
    return sorted(found, key=lambda entry: entry.sequence)


def _decoded(name: str, message: Any) -> AuditEntry:
    try:
        return decode(message.value(), message.offset())
    except UnreadableEntryError as error:
        raise CannotLookError(f"{name}: {error}") from error


def _no_ledger(application_id: str, brokers: str, topics: Mapping[str, list[int]]) -> str:
    known = sorted(name.removesuffix(SUFFIX) for name in topics if name.endswith(SUFFIX))
    near = difflib.get_close_matches(application_id, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    there = f"Applications that have one: {', '.join(known[:10])}" if known else "No application has one there"
    return (
        f"{brokers} has no ledger topic {application_id}{SUFFIX}. {hint}{there}. A ledger is written by Spark queries "
        "with semel.sink(application_id=..., guarantee='exactly_once') and by df.write.format('semel'). "
        f"semel.process keeps no ledger: `semel group describe {application_id}` shows what it has read"
    )


def _ends(entries: list[AuditEntry]) -> Offsets:
    """Where the sources stand after the last batch; the lower offset where two sources share a topic."""
    merged: Offsets = {}
    linked = [entry for entry in entries if entry.has_sources]
    for text in linked[-1].ends if linked else []:
        for place, end in (offsets_in(text) or {}).items():
            merged[place] = min(end, merged.get(place, end))
    return merged


def _lag(cluster: AuditedCluster, ends: Offsets, topics: Mapping[str, list[int]]) -> dict[str, int]:
    there = {place: end for place, end in ends.items() if place[1] in topics.get(place[0], ())}
    return {named(place): max(0, high - there[place]) for place, (_, high) in cluster.ends(there).items()}


def _count(
    cluster: AuditedCluster, entries: list[AuditEntry], topics: Mapping[str, list[int]], progress: ProgressBar
) -> tuple[int, list[Finding], list[str]]:
    """Counts what is between the offsets that the entries state."""
    counted, found, notes = 0, list[Finding](), list[str]()
    written = by_place(entries)
    sizes = {
        place: max(part.last_offset for _, part in parts) + 1 - min(part.first_offset for _, part in parts)
        for place, parts in written.items()
    }
    progress.total, progress.unit, passed = sum(sizes.values()), "offsets", 0
    for place, parts in sorted(written.items()):
        progress.show(passed, named(place))
        before, passed = passed, passed + sizes[place]
        if place[1] not in topics.get(place[0], ()):
            found.append(Finding(FindingKind.COUNT, parts[-1][0].sequence, named(place), "is not there any more"))
            continue
        present, note = _still_there(cluster, place, parts)
        notes += note
        if not present:
            continue
        ranges = [(part.first_offset, part.last_offset) for _, part in present]
        there, foreign = count(cluster, place, ranges, partial(_show, progress, named(place), before))
        counted += sum(there)
        if foreign:
            notes.append(f"{named(place)}: {foreign} records between the batches are not this application's")
        wrong = list(counts(place, present, there))
        if wrong and cluster.is_compacted(place[0]):
            notes.append(f"{named(place)}: the topic is compacted, so records may be gone; counts are not compared")
        else:
            found += wrong
    return counted, found, notes


def _show(progress: ProgressBar, note: str, before: int, more: int) -> None:
    progress.show(before + more, note)


def _still_there(
    cluster: AuditedCluster, place: Place, parts: list[tuple[AuditEntry, AuditedWrite]]
) -> tuple[list[tuple[AuditEntry, AuditedWrite]], list[str]]:
    """What retention has left. A log that ends before what was written has lost it: that is counted as missing."""
    low, _ = cluster.ends([place])[place]
    kept = [(entry, part) for entry, part in parts if part.first_offset >= low]
    gone = len(parts) - len(kept)
    if not gone:
        return kept, []
    return kept, [f"{named(place)}: {gone} batches are older than what the topic keeps (offset {low}); not counted"]
