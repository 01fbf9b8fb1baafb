"""Small looks into a partition's log: the header at an offset, a producer's last sequence."""

from __future__ import annotations

from collections.abc import Iterable

from semel.client import log_view
from semel.client.cluster import Cluster
from semel.client.cluster_calls import Leader
from semel.client.errors import FatalError, TimedOutError, error_of
from semel.client.group.offset_requests import by_topic
from semel.client.immediate import blocking
from semel.client.producer.batches import Identity, Place
from semel.client.timing import Deadline
from semel.protocol.batch import BatchHeader, read_header
from semel.protocol.messages import transactions as messages

fetch_once = blocking(log_view.fetch_once)
find_end = blocking(log_view.find_end)


def header_at(cluster: Cluster, place: Place, offset: int, timeout_s: float) -> BatchHeader:
    """The header of the batch that holds an offset, read uncommitted. Fetches again while the response is empty."""
    deadline = Deadline(timeout_s)
    backoff = cluster.backoff(1)
    while True:
        data = fetch_once(cluster, place, offset, deadline, max_bytes=1)  # one byte brings the whole first batch
        if len(data):
            header = read_header(data)
            if header.base_offset <= offset <= header.last_offset:
                return header
            raise FatalError(f"{place[0]}-{place[1]} has offsets {header.base_offset} on, but {offset} was requested")
        if not cluster.pause(backoff, deadline):
            raise TimedOutError(f"{place[0]}-{place[1]} showed nothing at offset {offset} within {timeout_s:.3g} s")


def last_sequences(cluster: Cluster, places: Iterable[Place], identity: Identity, timeout_s: float) -> dict[Place, int]:
    """What the leaders hold of a producer: the last sequence of (id, epoch) per partition that has one."""
    found = _producer_states(cluster, places, identity, timeout_s)
    return {place: state.last_sequence for place, state in found.items() if state.last_sequence >= 0}


def opening_header(cluster: Cluster, place: Place, identity: Identity, timeout_s: float) -> BatchHeader | None:
    """The header of the first batch of a producer's open transaction in a partition; None if it has none there."""
    deadline = Deadline(timeout_s)
    state = _producer_states(cluster, [place], identity, timeout_s).get(place)
    if state is None or state.current_txn_start_offset < 0:
        return None
    return header_at(cluster, place, state.current_txn_start_offset, deadline.remaining_s())


def _producer_states(
    cluster: Cluster, places: Iterable[Place], identity: Identity, timeout_s: float
) -> dict[Place, messages.ProducerState]:
    """What the leaders hold of (id, epoch), per partition that has it."""
    deadline = Deadline(timeout_s)
    wanted = list(places)

    def attempt() -> dict[Place, messages.ProducerState]:
        found: dict[Place, messages.ProducerState] = {}
        for group in _by_leader(cluster, wanted, deadline).values():
            found.update(_states_at(cluster, group, identity, deadline))
        return found

    return cluster.retry(attempt, "reading the state of a producer", deadline)


def _by_leader(cluster: Cluster, places: list[Place], deadline: Deadline) -> dict[int, list[Place]]:
    groups: dict[int, list[Place]] = {}
    for topic, partition in places:
        groups.setdefault(cluster.partition(topic, partition, deadline).leader, []).append((topic, partition))
    return groups


def _states_at(
    cluster: Cluster, places: list[Place], identity: Identity, deadline: Deadline
) -> dict[Place, messages.ProducerState]:
    """Of partitions with one leader. If that has changed, the new leader of the first says which others it does not
    lead, and all are grouped again."""
    request = messages.DescribeProducersRequest([messages.ProducersTopic(*each) for each in by_topic(places).items()])
    response = cluster.call(
        Leader(*places[0]), messages.DESCRIBE_PRODUCERS, request, timeout_s=deadline.remaining_s(), errors=None
    )
    found: dict[Place, messages.ProducerState] = {}
    for described in response.topics:
        for part in described.partitions:
            if part.error_code:
                cluster.forget(Leader(described.name, part.partition_index))
                what = f"reading the producers of {described.name}-{part.partition_index}"
                raise error_of(part.error_code, what, part.error_message)
            for state in part.active_producers:
                if (state.producer_id, state.producer_epoch) == identity:
                    found[described.name, part.partition_index] = state
    return found
