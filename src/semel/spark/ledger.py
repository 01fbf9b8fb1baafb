"""The ledger: what an application has written, one record per committed micro-batch, in a topic of its own.

`<application id>.ledger` has one partition and is compacted. Every batch writes its entry inside its transaction, so
an entry is there if and only if the batch is. Keys go round, so that compaction keeps the last `KEPT_BATCHES` entries.
The ledger, not the checkpoint, says whether a batch may be written; `decide` is that rule.
"""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from typing import NamedTuple

import msgspec

from semel.spark.offsets import parse, parse_edge, ranges, recreated, to_json

KEPT_BATCHES = 1_000
FORMAT = 1


class LedgerWords(NamedTuple):
    """What refusals say about a ledger, by where it is."""

    ways_out: str
    continued: str  # how to go on with a new checkpoint
    restored: str  # what a ledger that has lost its last entries is
    without: str = ""  # how batches are written that are not in it


TOPIC_WORDS = LedgerWords(
    ways_out="Restore the right checkpoint, or start with a new one and startingOffsets=committed, which continues "
    "where the ledger ends",
    continued="to continue with a new checkpoint use startingOffsets=committed (for a source in another cluster than "
    "the ledger's: the offsets up to which the ledger goes)",
    restored="a topic that was restored from an older copy",
    without=" If they were written with guarantee at_least_once or at_most_once, which keep no ledger, keep the "
    "checkpoint and take a new application id with adopt_checkpoint=True; anything else would write them again.",
)
TABLE_WORDS = LedgerWords(
    ways_out="Restore the database or the checkpoint that belongs to the other; or start with a new checkpoint, "
    "startingOffsets=committed and committedOffsets=sink.committed_offsets(), which continues where the database ends",
    continued="to continue with a new checkpoint use startingOffsets=committed with "
    "committedOffsets=sink.committed_offsets()",
    restored="a database that was restored from an older backup, or a standby that took over without them",
)


SUFFIX = ".ledger"
JOB_PREFIX, UNNAMED_JOB = "job:", "batch"  # in place of a query's id: batch jobs


def topic_of(application_id: str) -> str:
    return f"{application_id}{SUFFIX}"


class Written(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    count: int
    first_offset: int
    last_offset: int


class LedgerEntry(msgspec.Struct, frozen=True):
    """One committed micro-batch. Starts and ends are one text per source, as Spark's offset log has them."""

    sequence: int  # counts entries of this application, whatever the query
    query_id: str
    run_id: str
    batch_id: int
    starts: list[str | None]  # None where nobody knows: batch 0 of a source that does not say
    ends: list[str | None]
    written: list[Written] = []
    rows: int = 0
    dead_letters: int = 0
    attempts: int = 1
    committed_at_ms: int = 0
    format: int = FORMAT
    plan: str = ""  # `plan_of` the batch; "" in entries of versions that did not store it
    dead_letter_topic: str | None = None  # of the sink: a source with a pattern leaves it out
    checksum: str = ""  # of the rows, where the query keeps state (see `checksums`)
    took_ms: int = 0  # since the transaction was begun; 0 in entries of versions that did not store it

    @property
    def key(self) -> bytes:
        """Keys go round; a job with an id has a key of its own, which compaction never takes away."""
        return (
            self.query_id.encode() if self.query_id.startswith(JOB_PREFIX) else b"%d" % (self.sequence % KEPT_BATCHES)
        )

    @property
    def is_job(self) -> bool:
        return self.query_id == UNNAMED_JOB or self.query_id.startswith(JOB_PREFIX)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class Versioned(msgspec.Struct, frozen=True):
    """What entries of every format have, and others hardly all of."""

    format: int
    sequence: int
    query_id: str


_decode_entry = msgspec.json.Decoder(LedgerEntry).decode
_decode_format = msgspec.json.Decoder(Versioned).decode
NO_ENTRY = (msgspec.MsgspecError, ValueError, RecursionError)  # anything may have been written to a topic


class LedgerError(RuntimeError):
    """An entry that this version cannot read."""


class NoEntryError(LedgerError):
    """A record in a ledger that no version of semel has written."""


class LostLedgerError(LedgerError):
    """A ledger that cannot be trusted to hold what was written: going on could write everything again."""


def decode(value: bytes, place: str = "the ledger") -> LedgerEntry:
    try:
        found = _decode_format(value).format
        if found != FORMAT:
            raise LedgerError(
                f"{place} has an entry of format {found}, this version of semel reads {FORMAT}; use the version that "
                "wrote it, or a newer one"
            )
        return _decode_entry(value)
    except NO_ENTRY as error:
        raise NoEntryError(
            f"{place} has a record that is no entry of a ledger ({error}), so another program writes to that topic. "
            "Nothing was written. Stop that program, and choose another application id or restore the ledger topic"
        ) from error


class Verdict(Enum):
    WRITE = "write"
    ALREADY_WRITTEN = "already written"
    REFUSE = "refuse"


class LedgerDecision(NamedTuple):
    verdict: Verdict
    reason: str = ""


class MicroBatch(NamedTuple):
    """What Spark wants to be written."""

    query_id: str
    batch_id: int
    starts: list[str | None]
    ends: list[str | None]
    plan: str = ""  # `plan_of` this batch
    plan_before: str = ""  # of the batch before it, where the checkpoint still has that


def plan_of(text: str) -> str:
    """A hash of the raw text of `offsets/N`. A replay reads the same file; a batch that Spark plans again has another
    time in it. Ends alone would not do: a source's offset may be a counter that says nothing about its input."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decide(
    last: LedgerEntry | None, batch: MicroBatch, *, adopt: bool = False, words: LedgerWords = TOPIC_WORDS
) -> LedgerDecision:
    """May this batch be written? `adopt` is the word that an existing checkpoint may go on with an empty ledger."""
    if last is None:
        return _first(batch, adopt)
    if last.query_id == batch.query_id:
        return _same_query(last, batch, words)
    return _other_query(last, batch, words)


def _first(batch: MicroBatch, adopt: bool) -> LedgerDecision:
    if batch.batch_id == 0 or adopt:
        return LedgerDecision(Verdict.WRITE)
    return LedgerDecision(
        Verdict.REFUSE,
        f"the checkpoint is at batch {batch.batch_id}, but the ledger is empty: earlier batches were written without "
        "semel, or under another application id, or a function in foreachBatch did not call the sink for them. If the "
        "output holds them, pass adopt_checkpoint=True once; else use the application id that wrote them, or a new "
        "checkpoint",
    )


def _same_query(last: LedgerEntry, batch: MicroBatch, words: LedgerWords) -> LedgerDecision:
    if last.batch_id == batch.batch_id and _agree(last.ends, batch.ends) and _agree(last.starts, batch.starts):
        return (
            LedgerDecision(Verdict.ALREADY_WRITTEN)
            if _same_plan(last.plan, batch.plan)
            else _planned_again(last, batch, words)
        )
    if batch.batch_id > last.batch_id and continues(last.ends, batch.starts):
        follows_directly = batch.batch_id == last.batch_id + 1
        if follows_directly and not _same_plan(last.plan, batch.plan_before):
            return _planned_again(last, batch, words)
        return LedgerDecision(Verdict.WRITE)
    return LedgerDecision(
        Verdict.REFUSE,
        f"batch {batch.batch_id} covers {describe(batch.starts, batch.ends)}, but the last batch in the ledger is "
        f"{last.batch_id} and covers {describe(last.starts, last.ends)}. {_why_apart(last, batch, words)}. "
        f"{words.ways_out}",
    )


def _why_apart(last: LedgerEntry, batch: MicroBatch, words: LedgerWords) -> str:
    """The likely reason why a batch of the same query does not start where the ledger ends."""
    left_out = range(last.batch_id + 1, batch.batch_id)
    if not left_out:
        return (
            "The checkpoint is not the one that the ledger grew with (an older copy, or the limit per batch changed "
            "after a crash)"
        )
    which = f"batch {left_out[0]}" if len(left_out) == 1 else f"batches {left_out[0]} to {left_out[-1]}"
    return (
        f"Spark has finished {which}, but the ledger has no entry of that. A function in foreachBatch must call the "
        "sink for every batch, also for one without rows (`if df.isEmpty(): return` leaves one out), and let its "
        f"errors pass.{words.without} Otherwise the ledger has lost its last entries ({words.restored})"
    )


def _same_plan(ours: str, theirs: str) -> bool:
    """Where one of them is not known, offsets alone decide."""
    return not ours or not theirs or ours == theirs


def _planned_again(last: LedgerEntry, batch: MicroBatch, words: LedgerWords) -> LedgerDecision:
    return LedgerDecision(
        Verdict.REFUSE,
        f"the checkpoint's batch {last.batch_id} is not the one in the ledger: the offsets are the same text "
        f"({describe(last.starts, last.ends)}), but the checkpoint planned the batch at another time, so it may cover "
        f"other input; batch {batch.batch_id} was not written. The checkpoint is not the one that the ledger grew with "
        f"(an older copy). {words.ways_out}. Sources other than topics cannot start there: give such a query a new "
        "application id, or leave out by hand what was written",
    )


def _other_query(last: LedgerEntry, batch: MicroBatch, words: LedgerWords) -> LedgerDecision:
    if batch.batch_id == 0 and continues(last.ends, batch.starts):
        return LedgerDecision(Verdict.WRITE)  # a new checkpoint that continues where the ledger ends
    return LedgerDecision(
        Verdict.REFUSE,
        f"the ledger was written by query {last.query_id} up to {describe(last.starts, last.ends)}, but this is query "
        f"{batch.query_id}, batch {batch.batch_id}, {describe(batch.starts, batch.ends)}. Two queries share one "
        "application id, or the checkpoint is of another query. Give each query its own application id; "
        f"{words.continued}",
    )


def refuse_lost_state(last: LedgerEntry | None, batch: MicroBatch, application_id: str) -> str | None:
    """Why a stateful query must not write this batch: its state is not the one that the earlier output came from."""
    if last is None or last.query_id == batch.query_id:
        return None
    return (
        f"application {application_id!r} has written {last.batch_id + 1} batches with another checkpoint. This query "
        "keeps state, and its state was lost with that checkpoint: what it writes would not agree with what is there. "
        "Restore the checkpoint; or start over under a new application id; or, if the query may go on with empty "
        "state, say so with accept_lost_state=True (acceptLostState for the stream writer), and let the source go on "
        "where the ledger ends, with startingOffsets=committed"
    )


def refuse_loop(batch: MicroBatch, application_id: str, dead_letter_topic: str | None) -> str | None:
    """Why a batch must not be written that reads what the application writes about itself."""
    own = {topic_of(application_id): "ledger"}
    if dead_letter_topic is not None:
        own[dead_letter_topic] = "dead-letter topic"
    for start, end in zip(batch.starts, batch.ends, strict=False):
        old, new = parse(start) or {}, parse(end) or {}
        found = next((r for r in ranges(old, new) if r.topic in own), None)
        if found is not None:
            return (
                f"the query reads {found.topic!r}, the {own[found.topic]} of its own application {application_id!r} "
                f"(offsets {found.start} to {found.end} of partition {found.partition}): each batch would make input "
                "for the next, without end. Leave the topic out of subscribe; or, with subscribePattern, use a pattern "
                f'that does not match it, such as "(?!{found.topic}$).*", or give the source .option("applicationId", '
                f'"{application_id}"), which leaves out both as soon as one batch is written. If it is a topic of the '
                "same name in another cluster, make the sink with source_cluster_is_other=True"
            )
    return None


def continues(ends: list[str | None], starts: list[str | None]) -> bool:
    """Whether reading goes on exactly where it ended. Partitions that are new since then, and topics that were created
    anew, may begin anywhere."""
    return len(ends) == len(starts) and all(_follows(end, start) for end, start in zip(ends, starts, strict=True))


def _follows(end: str | None, start: str | None) -> bool:
    if end == start:
        return True
    old, new = parse_edge(end), parse_edge(start)
    if old is None or new is None:
        return False
    others = recreated(old.ids, new.ids)
    return all(
        topic in others or new.offsets.get(topic, {}).get(p) == offset
        for topic, parts in old.offsets.items()
        for p, offset in parts.items()
    )


def _agree(ours: list[str | None], theirs: list[str | None]) -> bool:
    """Whether these are the same places, as far as both are known."""
    return len(ours) == len(theirs) and all(
        a is None or b is None or a == b or _same_place(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _same_place(a: str, b: str) -> bool:
    """Equal offsets of the same topics; an entry of an earlier version does not say of which."""
    ours, theirs = parse_edge(a), parse_edge(b)
    if ours is None or theirs is None:
        return False
    return ours.offsets == theirs.offsets and not recreated(ours.ids, theirs.ids)


def describe(starts: list[str | None], ends: list[str | None]) -> str:
    """Ranges for people: the ids of topics are shortened, and said once."""
    return ", ".join(_range_text(a, b) for a, b in zip(starts, ends, strict=False)) or "no source"


def _range_text(start: str | None, end: str | None) -> str:
    first, last = parse_edge(start), parse_edge(end)
    texts = [
        text if edge is None else json.dumps(to_json(edge.offsets), separators=(",", ":"))
        for text, edge in ((start, first), (end, last))
    ]
    ids = {**(first.ids if first else {}), **(last.ids if last else {})}
    named = ", ".join(f"{topic} {topic_id[:8]}" for topic, topic_id in sorted(ids.items()))
    return f"{texts[0] or '(start)'} to {texts[1]}" + (f" (topic ids: {named})" if named else "")
