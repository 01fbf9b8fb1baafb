"""The ledger as a topic: created at the start, read from its end."""

from __future__ import annotations

import time

from semel.client.cluster import Cluster, Controller
from semel.client.errors import KafkaError, error_of
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.create_topics import (
    CREATE_TOPICS,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from semel.spark.ledger import Entry, decode, topic_of
from semel.spark.planning import Range
from semel.spark.positions import list_offsets
from semel.spark.reading import RangeReader

EARLIEST, LATEST = -2, -1
MARKERS_S = 5.0
LOOK_AGAIN_S = 0.01
CONFIG = {"cleanup.policy": "compact", "retention.ms": "-1", "retention.bytes": "-1"}


def create(cluster: Cluster, application_id: str, replication_factor: int = -1) -> None:
    """Makes sure that the ledger is there, with one partition."""
    name = topic_of(application_id)
    topic = CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=replication_factor,
        configs=[CreatableTopicConfig(name=key, value=value) for key, value in CONFIG.items()],
    )
    answer = cluster.call(
        Controller(), CREATE_TOPICS, CreateTopicsRequest(topics=[topic], timeout_ms=30_000), errors=None
    )
    code = ErrorCode.of(answer.topics[0].error_code)
    if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
        raise error_of(code, f"creating the ledger topic {name!r}", answer.topics[0].error_message)
    partitions = cluster.partitions(name)
    if len(partitions) != 1:
        raise ValueError(
            f"topic {name!r} has {len(partitions)} partitions, a ledger has 1: another program made it. Choose another "
            "application id"
        )


def last_entry(cluster: Cluster, application_id: str) -> Entry | None:
    """The newest committed entry, or None if nothing was ever written (or there is no ledger)."""
    name = topic_of(application_id)
    try:
        cluster.topic(name)
    except KafkaError as error:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return None
        raise
    end = list_offsets(cluster, {(name, 0): LATEST}, True)[name][0]
    start = list_offsets(cluster, {(name, 0): EARLIEST}, True)[name][0]
    return _newest(cluster, name, start, end)


def wait_for_markers(cluster: Cluster, application_id: str, timeout_s: float = MARKERS_S) -> None:
    """The end of a transaction is answered before its marker is in the ledger; until then its entry is not visible.

    A transaction that a dead driver left open has no marker on its way: then the time-out ends the wait.
    """
    place, deadline_s = (topic_of(application_id), 0), time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        stable, end = (list_offsets(cluster, {place: LATEST}, committed)[place[0]][0] for committed in (True, False))
        if stable >= end:
            return
        time.sleep(LOOK_AGAIN_S)


def all_entries(cluster: Cluster, application_id: str) -> list[Entry]:
    """Everything that compaction has left."""
    name = topic_of(application_id)
    end = list_offsets(cluster, {(name, 0): LATEST}, True)[name][0]
    start = list_offsets(cluster, {(name, 0): EARLIEST}, True)[name][0]
    return entries(cluster, name, start, end)


def _newest(cluster: Cluster, name: str, start: int, end: int) -> Entry | None:
    """Looks backwards in growing steps: behind the newest entry there are only markers and aborted batches."""
    step, upper = 64, end
    while upper > start:
        lower = max(start, upper - step)
        found = entries(cluster, name, lower, upper)
        if found:
            return max(found, key=lambda entry: entry.sequence)
        upper, step = lower, step * 8
    return None


def entries(cluster: Cluster, name: str, start: int, end: int) -> list[Entry]:
    """Committed entries in a range of offsets, in order. All or an error: a batch's fate depends on them."""
    reader = RangeReader(cluster, Range(name, 0, start, end), read_committed=True, fail_on_data_loss=True)
    return [
        decode(value) for table in reader.tables(headers=False) for value in table.column("value").to_pylist() if value
    ]
