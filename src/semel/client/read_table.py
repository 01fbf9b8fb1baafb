"""A topic as one Arrow table: everything up to the end offsets of the moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from semel.client.consumer import Consumer
from semel.client.consumer.decode import Form, output_schema
from semel.client.errors import ConfigError, TableTooLargeError, TimedOutError
from semel.client.timing import Deadline
from semel.client.types import OffsetOutOfRangeError, TopicPartition, UnknownPartitionError, timestamp_ms
from semel.protocol.arrow_numbers import to_numpy
from semel.protocol.errors import ErrorCode

GIB = 1024**3
LOOKUP_MS = 5000.0  # for a topic that was created a moment ago
POLL_MS = 100.0  # the last offsets of a log may be markers and aborted records, of which poll returns nothing
FORM = Form(headers=True)

Offsets = Mapping[TopicPartition, int]


def read_table(
    topic: str,
    *,
    bootstrap_servers: str | Iterable[str],
    partitions: Iterable[int] | None = None,
    start: Mapping[int, int] | datetime | None = None,
    isolation_level: str = "read_committed",
    limit_bytes: int = GIB,
    **options: Any,
) -> pa.Table:
    """The records of a topic up to the end offsets as of the call, by partition and offset, as an Arrow table: topic,
    partition, offset, timestamp (milliseconds since 1970), key, value and headers.

    partitions        only these
    start             where to begin: {partition: offset}, or a datetime with a time zone; by default, and in partitions
                      that are not named, with the first record
    isolation_level   read_committed ends before the first open transaction
    limit_bytes       a table that would be larger is an error
    options           of the consumer, such as security_protocol
    """
    settings = {"client_id": "semel-read-table", **options}
    fixed = {
        "bootstrap_servers": bootstrap_servers,
        "isolation_level": isolation_level,
        "auto_offset_reset": "none",
        "allow_auto_create_topics": False,
        "enable_auto_commit": False,  # with the options of a group's consumer, the group would go on behind the table
    }
    consumer = Consumer({**settings, **fixed})
    with consumer:
        wanted = _partitions(consumer, topic, partitions)
        ends = consumer.settled_ends(wanted)
        starts = _starts(consumer, topic, start, ends)
        consumer.assign(wanted)
        for partition, offset in starts.items():
            consumer.seek(partition, offset)
        batches = _read(consumer, ends, limit_bytes)
    return pa.Table.from_batches([each for row in batches.values() for each in row], output_schema(FORM))


def _partitions(consumer: Consumer, topic: str, wanted: Iterable[int] | None) -> list[TopicPartition]:
    try:
        known = consumer.partitions_for(topic, timeout_ms=LOOKUP_MS)
    except TimedOutError as error:
        if error.code in (ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT):
            raise  # nothing is known of the topic
        raise UnknownPartitionError(f"topic {topic!r} cannot be read: {error}", error.code) from error
    numbers = sorted(known if wanted is None else set(wanted))
    missing = [number for number in numbers if number not in known]
    if missing:
        raise UnknownPartitionError(
            f"{topic!r} has no partition {missing[0]!r}; it has 0 to {max(known)}",
            None,
            TopicPartition(topic, missing[0]),
        )
    return [TopicPartition(topic, number) for number in numbers]


def _starts(
    consumer: Consumer, topic: str, start: Mapping[int, int] | datetime | None, ends: Offsets
) -> dict[TopicPartition, int]:
    if isinstance(start, datetime):
        at_ms = timestamp_ms(start, "start")
        found = consumer.offsets_for_times(dict.fromkeys(ends, at_ms))
        return {partition: ends[partition] if at is None else at.offset for partition, at in found.items()}
    if start is not None and not isinstance(start, Mapping):
        raise ConfigError(f"start is {start!r}; it must be {{partition: offset}}, or a datetime with a time zone")
    given = {TopicPartition(topic, number): offset for number, offset in (start or {}).items()}
    unknown = sorted(given.keys() - ends.keys())
    if unknown:
        raise ConfigError(f"start names partition {unknown[0].partition}, which is not read")
    for partition, offset in given.items():
        if offset > ends[partition]:
            raise OffsetOutOfRangeError(
                f"start names offset {offset} of {partition}, where what can be read ends at {ends[partition]}",
                None,
                partition,
                offset,
            )
    return consumer.beginning_offsets(ends) | given


def _read(consumer: Consumer, ends: Offsets, limit_bytes: int) -> dict[int, list[pa.RecordBatch]]:
    """Polls until every partition is at its end."""
    batches: dict[int, list[pa.RecordBatch]] = {partition.partition: [] for partition in sorted(ends)}
    size_bytes = 0
    quiet = Deadline(consumer.settings.default_api_timeout_ms / 1000)
    while left := _unread(consumer, ends):
        before = sum(left.values())
        for batch in consumer.poll_table(POLL_MS, headers=True).to_batches():
            number = batch.column("partition")[0].as_py()
            end = ends[TopicPartition(batch.column("topic")[0].as_py(), number)]
            kept = batch.slice(0, int(np.searchsorted(to_numpy(batch.column("offset")), end)))
            size_bytes += kept.nbytes
            if size_bytes > limit_bytes:
                raise TableTooLargeError(
                    f"the table would be larger than limit_bytes ({limit_bytes}), with {before} offsets still to be "
                    "read; raise it, or read fewer partitions or from a later start"
                )
            batches[number].append(kept)
        if sum(_unread(consumer, ends).values()) < before:
            quiet = Deadline(quiet.total_s)
        elif quiet.expired:
            raise TimedOutError(f"nothing was read for {quiet.total_s:.3g} s, with {before} offsets still to be read")
    return batches


def _unread(consumer: Consumer, ends: Offsets) -> dict[TopicPartition, int]:
    """How many offsets each partition is from its end. One that is there is read no further."""
    left: dict[TopicPartition, int] = {}
    for partition, end in ends.items():
        count = end - consumer.position(partition)
        if count > 0:
            left[partition] = count
        elif partition not in consumer.paused():
            consumer.pause(partition)
    return left
