"""Looks into a partition's log, over the connections of any driver: raw batches, and the marker of a transaction."""

from __future__ import annotations

from typing import Any

from semel.client.cluster_calls import ClusterCalls, Leader
from semel.client.errors import KafkaError
from semel.client.producer.batches import Place
from semel.client.timing import Deadline
from semel.protocol.batch import Buffer, check_batch, iter_headers
from semel.protocol.errors import Recovery
from semel.protocol.messages.records import FETCH, FetchPartition, FetchRequest, FetchTopic, PartitionData
from semel.protocol.rows import MarkerType, decode_batch, decode_marker

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
        errors=lambda answer: [answer.error_code, *(p.error_code for t in answer.responses for p in t.partitions)],
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
