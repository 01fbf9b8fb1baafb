"""A partition's records as they are, with what became of each: committed, aborted, open. For tools that show a log.

Readers of committed data get the aborted transactions of what they fetch from the broker; here the same list marks the
records, and nothing is left out. What lies beyond the last stable offset is decided by the producers that have an open
transaction, and by markers that are already there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import msgspec

from semel.client.cluster_calls import ClusterCalls, Leader
from semel.client.errors import KafkaError
from semel.client.producer.batches import Place
from semel.client.timing import Deadline
from semel.protocol.batch import BatchHeader, Buffer, check_batch, iter_headers
from semel.protocol.errors import CorruptBatchError, Recovery
from semel.protocol.messages import transactions as messages
from semel.protocol.messages.records import FETCH, FetchPartition, FetchRequest, FetchTopic, PartitionData
from semel.protocol.rows import MarkerType, decode_batch, decode_marker, records_from

# --- Looks into a partition's log, over the connections of any driver: raw batches, and the marker of a transaction ---


NAMES_UP_TO = 12  # later versions of Fetch name topics by id
READ_BYTES = 1024 * 1024
WAIT_MS = 500


async def fetch_once(
    calls: ClusterCalls[Any], place: Place, offset: int, deadline: Deadline, max_bytes: int = READ_BYTES
) -> Buffer:
    """The raw batches from an offset on, committed or not; waits up to half a second for some to come."""
    records = (await fetch_partition(calls, place, offset, deadline, max_bytes)).records
    if records is None:
        return b""
    return b"".join(records) if isinstance(records, list) else records


async def fetch_partition(
    calls: ClusterCalls[Any],
    place: Place,
    offset: int,
    deadline: Deadline,
    max_bytes: int = READ_BYTES,
    *,
    committed: bool = False,
    wait_ms: int = WAIT_MS,
) -> PartitionData:
    """What the leader has from an offset on; with `committed` up to the last stable offset, and which were aborted."""
    topic, partition = place
    request = FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=int(committed),
        topics=[FetchTopic(topic, partitions=[FetchPartition(partition, -1, offset, partition_max_bytes=max_bytes)])],
    )
    response = await calls.call(
        Leader(topic, partition),
        FETCH,
        request,
        timeout_s=deadline.remaining_s(),
        errors=lambda response: [
            response.error_code,
            *(p.error_code for t in response.responses for p in t.partitions),
        ],
        at_most=NAMES_UP_TO,
    )
    found: PartitionData = response.responses[0].partitions[0]
    return found


async def find_end(
    calls: ClusterCalls[Any], place: Place, first_offset: int, producer_id: int, deadline: Deadline
) -> bool | None:
    """How the transaction that wrote `first_offset` ended: its producer's first marker after it. None: the log has no
    marker up to its end, so the transaction may be open."""
    offset = first_offset
    while not deadline.expired:
        data = await fetch_once(calls, place, offset, deadline)
        if not len(data):
            return None
        found, offset = _first_marker(data, offset, producer_id)
        if found is not None:
            return found
    return None


def _first_marker(data: Buffer, offset: int, producer_id: int) -> tuple[bool | None, int]:
    """Whether the first marker of a producer commits, if there is one; and the offset after the batches."""
    for at, header in iter_headers(data):
        offset = header.next_offset
        if header.is_control and header.producer_id == producer_id:
            check_batch(data, header, at)
            marker = decode_marker(decode_batch(data, at).records[0])
            if marker is not None:
                return marker.type is MarkerType.COMMIT, offset
    return None, offset


async def find_decision(
    calls: ClusterCalls[Any], place: Place, first_offset: int, producer_id: int, deadline: Deadline
) -> bool | None:
    """Whether the transaction that wrote `first_offset` was committed: its producer's first marker after it. None: not
    known in time."""
    offset = first_offset
    while not deadline.expired:
        try:
            data = await fetch_once(calls, place, offset, deadline)
        except KafkaError as error:
            if error.recovery is Recovery.RETRY:
                return None
            raise
        found, offset = _first_marker(data, offset, producer_id)
        if found is not None:
            return found
    return None


COMMITTED, ABORTED, OPEN = "committed", "aborted", "open"
HELD = "held back"  # decided, but another transaction that is open holds the last stable offset before it
VIEW_BYTES = 1 << 20


class SeenRecord(msgspec.Struct, frozen=True):
    """A record, or the marker of a transaction (`marker` is COMMIT or ABORT)."""

    offset: int
    timestamp: int
    state: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    producer_id: int
    epoch: int
    sequence: int
    is_transactional: bool
    marker: str = ""


class LogView(msgspec.Struct, frozen=True):
    """A piece of a log; `next_offset` is where the next piece begins."""

    records: list[SeenRecord]
    next_offset: int
    start: int
    stable: int
    high_watermark: int


async def view_log(
    calls: ClusterCalls[Any],
    place: Place,
    offset: int,
    deadline: Deadline,
    *,
    most: int = 100,
) -> LogView:
    """Up to `most` records from an offset on, but whole batches are read: one of 10 MB is read whole."""
    committed = await fetch_partition(calls, place, offset, deadline, VIEW_BYTES, committed=True, wait_ms=0)
    settled = _seen(committed, committed, {}, offset, most)
    if len(settled.records) >= most:  # all below the last stable offset: what became of them is known
        return settled
    raw = await fetch_partition(calls, place, offset, deadline, VIEW_BYTES, wait_ms=0)
    # In this order: what is not open any more when it is requested is in the list of aborted transactions after that.
    open_starts: dict[int, int] = {}
    if any(header.is_transactional for _, header in iter_headers(_joined(raw))):
        open_starts = await _open_starts(calls, place, deadline)
        committed = await fetch_partition(calls, place, offset, deadline, VIEW_BYTES, committed=True, wait_ms=0)
    return _seen(raw, committed, open_starts, offset, most)


async def records_between(
    calls: ClusterCalls[Any], place: Place, start: int, end: int, deadline: Deadline
) -> AsyncIterator[SeenRecord]:
    """All records from one offset up to another, piece by piece."""
    while start < end:
        view = await view_log(calls, place, start, deadline, most=end - start)
        for record in view.records:
            yield record
        if view.next_offset <= start:
            return
        start = view.next_offset


def _seen(raw: PartitionData, committed: PartitionData, open_starts: dict[int, int], offset: int, most: int) -> LogView:
    """The records of `raw`, with what became of them by the response for readers of committed data."""
    data, stable = _joined(raw), committed.last_stable_offset
    found = list(iter_headers(data))
    aborted = [(entry.producer_id, entry.first_offset) for entry in committed.aborted_transactions or ()]
    states = _states(data, found, sorted(aborted, key=lambda entry: entry[1]), open_starts, stable)
    records: list[SeenRecord] = []
    next_offset = offset
    for (at, header), state in zip(found, states, strict=True):
        for record in islice(_records(data, at, header, state, offset), most - len(records)):
            records.append(record)
            next_offset = record.offset + 1
        if len(records) >= most:
            break
        next_offset = max(next_offset, header.next_offset)
    return LogView(records, next_offset, raw.log_start_offset, stable, raw.high_watermark)


def _joined(raw: PartitionData) -> Any:
    data = raw.records if raw.records is not None else b""
    return b"".join(data) if isinstance(data, list) else data


def _states(
    data: Any,
    found: list[tuple[int, BatchHeader]],
    aborted: list[tuple[int, int]],
    open_starts: dict[int, int],
    stable: int,
) -> list[str]:
    """What became of each batch. `aborted`: (producer, first offset) of aborted transactions, by offset."""
    decided = _decided_beyond(data, found)
    active: set[int] = set()  # producers in a transaction that was aborted
    states = []
    for number, (at, header) in enumerate(found):
        while aborted and aborted[0][1] <= header.last_offset:
            active.add(aborted.pop(0)[0])
        if header.is_control:
            active.discard(header.producer_id)
            marker = _marker(data, at)
            states.append(COMMITTED if marker == "COMMIT" else ABORTED)
        elif not header.is_transactional:
            states.append(COMMITTED)
        elif header.producer_id in active:
            states.append(ABORTED)
        elif open_starts.get(header.producer_id, header.next_offset) <= header.base_offset:
            states.append(OPEN)
        else:
            states.append(decided.get(number, COMMITTED if header.last_offset < stable else HELD))
    return states


def _decided_beyond(data: Any, found: list[tuple[int, BatchHeader]]) -> dict[int, str]:
    """By markers that follow in the same piece: counts where the list of aborted transactions does not reach yet."""
    decided: dict[int, str] = {}
    last: dict[int, str] = {}
    for number in range(len(found) - 1, -1, -1):
        at, header = found[number]
        if header.is_control:
            last[header.producer_id] = COMMITTED if _marker(data, at) == "COMMIT" else ABORTED
        elif header.is_transactional and header.producer_id in last:
            decided[number] = last[header.producer_id]
    return decided


def _marker(data: Any, at: int) -> str:
    try:
        marker = decode_marker(decode_batch(data, at).records[0])
    except CorruptBatchError:
        return ""
    return "" if marker is None else MarkerType(marker.type).name


def _records(data: Any, at: int, header: BatchHeader, state: str, offset: int) -> Iterator[SeenRecord]:
    """The records of a batch from an offset on. Of one with 60,000 a page shows 50: the others are not decoded."""
    producer = (header.producer_id, header.producer_epoch)
    try:
        if header.is_control:
            for row in decode_batch(data, at).records:
                if row.offset >= offset:
                    yield SeenRecord(
                        row.offset, row.timestamp, state, None, None, (), *producer, -1, True, _marker(data, at)
                    )
            return
        for row in records_from(data, at, offset):
            sequence = header.base_sequence + row.offset - header.base_offset if header.base_sequence >= 0 else -1
            yield SeenRecord(
                row.offset,
                row.timestamp,
                state,
                None if row.key is None else bytes(row.key),
                None if row.value is None else bytes(row.value),
                tuple((name, None if value is None else bytes(value)) for name, value in row.headers),
                *producer,
                sequence,
                header.is_transactional,
            )
    except CorruptBatchError as error:
        note = (("semel.unreadable", str(error).encode()),)
        first = max(header.base_offset, offset)
        yield SeenRecord(first, -1, state, None, None, note, *producer, -1, header.is_transactional)


async def _open_starts(calls: ClusterCalls[Any], place: Place, deadline: Deadline) -> dict[int, int]:
    """Where the open transactions of a partition begin, by producer."""
    response = await calls.call(
        Leader(*place),
        messages.DESCRIBE_PRODUCERS,
        messages.DescribeProducersRequest([messages.ProducersTopic(place[0], [place[1]])]),
        timeout_s=deadline.remaining_s(),
        errors=lambda response: (part.error_code for topic in response.topics for part in topic.partitions),
    )
    states = response.topics[0].partitions[0].active_producers
    return {each.producer_id: each.current_txn_start_offset for each in states if each.current_txn_start_offset >= 0}
