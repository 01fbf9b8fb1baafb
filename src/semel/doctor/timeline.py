"""One transaction step by step, with the numbers of the figure in KIP-98.

It has two sources. Semel's broker keeps the last steps of an id as events. Every broker keeps the decisions of
its coordinator as records of `__transaction_state`, until compaction takes the older ones; and each partition has the
transaction's records and its marker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from semel.client.admin.calls import AdminCalls
from semel.client.admin.observation import TransactionStep
from semel.client.admin.transactions import TransactionInfo
from semel.client.errors import KafkaError
from semel.client.log_view import records_between
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import DecodeError
from semel.protocol.messages.internal_topics import TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE, TransactionLogValue
from semel.protocol.partitioning import coordinator_partition

TRANSACTION_LOG = "__transaction_state"
STATES = (
    "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead", "PrepareEpochFence",
)  # fmt: skip
RECORDS_READ = 2_000  # of the coordinator's log, from its end
MARKERS_LOOKED_FOR = 500  # offsets of a partition, from its end
PARTITIONS_LOOKED_AT = 20
NAMES = {
    "1": "find the coordinator",
    "2": "get a producer id and epoch",
    "3": "begin",
    "4.1": "add partitions",
    "4.2": "write records",
    "4.3": "add a group's offsets",
    "4.4": "write a group's offsets",
    "5.1": "end",
    "5.1a": "the decision is in the log",
    "5.2": "markers",
    "5.3": "complete",
}
_OF_STATE = {
    "Empty": "2",
    "Ongoing": "4.1",
    "PrepareCommit": "5.1a",
    "PrepareAbort": "5.1a",
    "PrepareEpochFence": "5.1a",
    "CompleteCommit": "5.3",
    "CompleteAbort": "5.3",
}


class TimelineStep(msgspec.Struct, frozen=True):
    step: str  # number in KIP-98's figure
    what: str
    time_ms: int  # -1: not known
    text: str
    source: str  # event, log, partition, client
    error: str = ""
    client: str = ""


class Timeline(msgspec.Struct, frozen=True):
    """The steps of an id, oldest first; of `last` on, those of its last transaction."""

    transactional_id: str
    now: TransactionInfo
    has_events: bool
    steps: list[TimelineStep]
    last: int = 0


async def timeline(calls: AdminCalls, transactional_id: str, timeout_ms: float = 10_000) -> Timeline:
    """What is known of an id. FatalError if no coordinator has it."""
    deadline = calls.cluster.deadline(timeout_ms / 1000)
    now = await calls.describe_transaction(transactional_id, timeout_ms=deadline.remaining_s() * 1000)
    events = await calls.transaction_events([transactional_id], timeout_ms=deadline.remaining_s() * 1000)
    history = await _history(calls, transactional_id, deadline)
    if events:
        steps = _with_begins([_of_event(event) for event in _without_lookers(events)])
    else:
        steps = _with_begins([_of_record(at_ms, value) for at_ms, value in history])
    places = now.partitions or _last_partitions(value for _, value in history)
    steps += await _markers(calls, places[:PARTITIONS_LOOKED_AT], now, deadline)
    return Timeline(transactional_id, now, events is not None, steps, _begin_of_last(steps))


# --- semel's events ---
def _without_lookers(events: list[TransactionStep]) -> list[TransactionStep]:
    """Tools that describe a transaction look for its coordinator, too. A producer goes on to get its id."""
    return [
        event
        for event, following in zip(events, [*events[1:], None], strict=True)
        if event.step != "1" or (following is not None and following.step == "2")
    ]


def _of_event(event: TransactionStep) -> TimelineStep:
    parts = [event.note]
    if event.step == "2":
        parts.insert(0, f"producer {event.producer_id}, epoch {event.epoch}")
    if event.partition_count:
        shown = ", ".join(map(str, event.partitions))
        more = event.partition_count - len(event.partitions)
        parts.insert(0, shown + (f" and {more} more" if more else ""))
    what = f"{NAMES.get(event.step, event.api)} ({event.api})"
    return TimelineStep(
        event.step, what, event.time_ms, "; ".join(filter(None, parts)), "event", event.error, event.client
    )


# --- the coordinator's log ---
async def _history(
    calls: AdminCalls, transactional_id: str, deadline: Deadline
) -> list[tuple[int, TransactionLogValue]]:
    """The records of an id in the coordinator's log, as far as they are there and may be read."""
    try:
        partitions = await calls.cluster.partitions(TRANSACTION_LOG, deadline.remaining_s())
        place = TopicPartition(TRANSACTION_LOG, coordinator_partition(transactional_id, len(partitions)))
        bounds = await calls.list_offsets({place: -1}, timeout_ms=deadline.remaining_s() * 1000)
        starts = await calls.list_offsets({place: -2}, timeout_ms=deadline.remaining_s() * 1000)
        end, offset = bounds[place].offset, max(starts[place].offset, bounds[place].offset - RECORDS_READ)
        found: list[tuple[int, TransactionLogValue]] = []
        async for record in records_between(calls.cluster, place, offset, end, deadline):
            value = _decoded(record.key, record.value, transactional_id)
            if value is not None:
                found.append((record.timestamp, value))
        return found
    except KafkaError:
        return []  # the user may not read it: what DescribeTransactions says has to do


def _decoded(key: bytes | None, value: bytes | None, transactional_id: str) -> TransactionLogValue | None:
    if not key or not value:
        return None
    try:
        named, _ = TRANSACTION_LOG_KEY.decode_from(key, 0, 2)
        if named.transactional_id != transactional_id:
            return None
        return TRANSACTION_LOG_VALUE.decode_from(value, int.from_bytes(value[:2], "big"), 2)[0]
    except (DecodeError, ValueError):
        return None


def _of_record(at_ms: int, value: TransactionLogValue) -> TimelineStep:
    state = STATES[value.transaction_status] if 0 <= value.transaction_status < len(STATES) else "unknown"
    step = _OF_STATE.get(state, "")
    places = _places(value)
    parts = [f"{state}, producer {value.producer_id}, epoch {value.producer_epoch}"]
    if places:
        parts.append(", ".join(map(str, places[:8])) + (f" and {len(places) - 8} more" if len(places) > 8 else ""))
    return TimelineStep(step, NAMES.get(step, state), at_ms, "; ".join(parts), "log")


def _places(value: TransactionLogValue) -> list[TopicPartition]:
    return [
        TopicPartition(part.topic, index)
        for part in value.transaction_partitions or ()
        for index in sorted(part.partition_ids)
    ]


def _last_partitions(values: Iterable[TransactionLogValue]) -> list[TopicPartition]:
    last: list[TopicPartition] = []
    for value in values:
        last = _places(value) or last
    return last


# --- partitions ---
async def _markers(
    calls: AdminCalls, places: list[TopicPartition], now: TransactionInfo, deadline: Deadline
) -> list[TimelineStep]:
    """Where the last transaction is in its partitions: open since an offset, or its marker."""
    found = []
    producers = await calls.producers_of(places, timeout_ms=deadline.remaining_s() * 1000)
    for place in places:
        opened = [each for each in producers.get(place, ()) if each.producer_id == now.producer_id]
        if opened and opened[0].transaction_start >= 0:
            text = f"{place}: open since offset {opened[0].transaction_start}"
            found.append(TimelineStep("4.2", "in the partition", opened[0].last_timestamp, text, "partition"))
            continue
        try:
            marker = await _last_marker(calls, place, now.producer_id, deadline)
        except KafkaError:
            continue
        if marker is not None:
            found.append(marker)
    return found


async def _last_marker(
    calls: AdminCalls, place: TopicPartition, producer_id: int, deadline: Deadline
) -> TimelineStep | None:
    ends = await calls.list_offsets({place: -1}, timeout_ms=deadline.remaining_s() * 1000)
    end, marker = ends[place].offset, None
    starts = await calls.list_offsets({place: -2}, timeout_ms=deadline.remaining_s() * 1000)
    offset = max(starts[place].offset, end - MARKERS_LOOKED_FOR)
    async for record in records_between(calls.cluster, place, offset, end, deadline):
        if record.marker and record.producer_id == producer_id:
            text = f"{place}: {record.marker} at offset {record.offset}, epoch {record.epoch}"
            marker = TimelineStep("5.2", "marker in the partition", record.timestamp, text, "partition")
    return marker


# --- all of it ---
def _with_begins(steps: list[TimelineStep]) -> list[TimelineStep]:
    """A client begins a transaction by itself: the step has no request, and stands before the first one that has."""
    shown: list[TimelineStep] = []
    is_open = False
    for step in steps:
        if step.step.startswith("4") and not is_open:
            is_open = True
            shown.append(TimelineStep("3", NAMES["3"], -1, "in the client; no request", "client"))
        elif step.step in ("2", "5.3"):
            is_open = False
        shown.append(step)
    return shown


def _begin_of_last(steps: list[TimelineStep]) -> int:
    """Where the steps of the last transaction begin; with the InitProducerId and FindCoordinator right before it."""
    begins = [number for number, step in enumerate(steps) if step.step == "3"]
    if not begins:
        return 0
    at = begins[-1]
    while at > 0 and steps[at - 1].step in ("1", "2"):
        at -= 1
    return at


def clock(time_ms: int) -> str:
    """A time of day, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(time_ms / 1000)) + f".{time_ms % 1000:03d}" if time_ms >= 0 else ""
