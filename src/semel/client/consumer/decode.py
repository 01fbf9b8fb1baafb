"""Fetched chunks to Arrow tables and to rows.

A chunk is decoded once, as columns; rows are made from slices of them. Where a chunk is damaged, what stands before
the damage is still delivered, and the next read names the offset of the damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from semel.client.consumer.fetcher import Chunk
from semel.client.types import ConsumerRecord, CorruptRecordError, TopicPartition
from semel.protocol.arrow_binary import binary_parts
from semel.protocol.arrow_numbers import texts, to_arrow, to_numpy
from semel.protocol.batch import check_batch, iter_headers
from semel.protocol.columns_decode import DecodedRecords, Wanted, decode_record_sets
from semel.protocol.decode_runs import RecordSet
from semel.protocol.errors import DecodeError

COLUMNS = ("offset", "timestamp", "key", "value")
TOPIC_TYPE = pa.dictionary(pa.int32(), pa.string())
ROWS_AT_ONCE = 1024  # made of columns together; they fit the processor's cache
_LISTS_ARE_FAST = int(pa.__version__.partition(".")[0]) >= 26  # before, `to_pylist` made a scalar of each value
_new_record = partial(tuple.__new__, ConsumerRecord)  # `ConsumerRecord._make`, which is a function in Python


class Form(NamedTuple):
    """What a reader wants its records as."""

    headers: bool = False
    views: bool = False

    def covers(self, wanted: Form) -> bool:
        """Whether records in this form can be returned where another is wanted."""
        return self.views == wanted.views and (self.headers or not wanted.headers)


ROWS = Form(headers=True)


def output_schema(form: Form) -> pa.Schema:
    """topic, partition, offset, timestamp, key, value and, if wanted, headers."""
    source = Wanted(form.headers, form.views).schema()
    names = [*COLUMNS, "headers"] if form.headers else list(COLUMNS)
    place = [pa.field("topic", TOPIC_TYPE, nullable=False), pa.field("partition", pa.int32(), nullable=False)]
    return pa.schema([*place, *(source.field(name) for name in names)])


class DecodedChunk:
    """The visible records of a chunk, read from the front. `position` is the next offset of the reader."""

    __slots__ = ("at", "chunk", "form", "next_offset", "table")

    def __init__(self, chunk: Chunk, form: Form, decoded: DecodedRecords) -> None:
        self.chunk = chunk
        self.form = form
        self.table, self.next_offset = decoded.table, decoded.next_offset
        self.at = 0

    @property
    def partition(self) -> TopicPartition:
        return self.chunk.state.topic_partition

    @property
    def rows_left(self) -> int:
        return int(self.table.num_rows) - self.at

    @property
    def bytes_left(self) -> int:
        return len(self.chunk.records) * self.rows_left // max(int(self.table.num_rows), 1)

    def take(self, count: int) -> pa.Table:
        """The next rows; moves the consumer's position past them."""
        part = self.table.slice(self.at, count)
        self.at += part.num_rows
        state = self.chunk.state
        state.position = self.table.column("offset")[self.at].as_py() if self.rows_left else self.next_offset
        return part


def decode_all(chunks: list[Chunk], read_committed: bool, form: Form) -> list[DecodedChunk]:
    """Several chunks at once, which costs less than one by one. Raises DecodeError if one of them is damaged."""
    decoded = decode_record_sets([_record_set(chunk, read_committed) for chunk in chunks], **form._asdict())
    return [DecodedChunk(chunk, form, records) for chunk, records in zip(chunks, decoded, strict=True)]


def decode(chunk: Chunk, read_committed: bool, form: Form) -> DecodedChunk:
    """One chunk, up to where it is damaged."""
    try:
        return decode_all([chunk], read_committed, form)[0]
    except DecodeError as error:
        good = _record_set(chunk, read_committed)._replace(data=_undamaged(chunk, error))
        (decoded,) = decode_record_sets([good], **form._asdict())
        chunk.state.fetch_offset = decoded.next_offset  # the next fetch starts at the damage
        chunk.state.version += 1
        chunk.version = chunk.state.version
        return DecodedChunk(chunk, form, decoded)


def _record_set(chunk: Chunk, read_committed: bool) -> RecordSet:
    aborted = [(entry.producer_id, entry.first_offset) for entry in chunk.aborted] if read_committed else None
    return RecordSet(chunk.records, chunk.start, aborted)


def _undamaged(chunk: Chunk, error: DecodeError) -> memoryview:
    """The batches before the first damaged one; raises if that is the first."""
    partition = chunk.state.topic_partition
    end, offset, after = 0, chunk.start, None
    try:
        for at, header in iter_headers(chunk.records):
            offset, after = header.base_offset, header.next_offset
            check_batch(chunk.records, header, at)
            decode_record_sets([RecordSet(chunk.records[at : at + header.size])])
            end = at + header.size
    except DecodeError:
        pass
    if end:
        return chunk.records[:end]
    chunk.state.fetch_offset = chunk.start
    chunk.state.version += 1
    remedy = f"seek({partition!r}, {after}) passes over it" if after is not None else "seek() past it"
    raise CorruptRecordError(
        f"{partition}: the batch at offset {offset} is damaged: {error}; {remedy}, and the broker's disk needs a look",
        getattr(error, "code", None),
        partition,
        offset,
    ) from error


def joined(parts: list[tuple[TopicPartition, pa.Table]], form: Form) -> pa.Table:
    """One table of all parts, each row with its topic and partition. Copies no record."""
    schema = output_schema(form)
    topics = sorted({partition.topic for partition, _ in parts})
    names = texts(topics)
    batches = []
    for (topic, index), table in parts:
        for batch in table.to_batches():
            place = np.full(batch.num_rows, topics.index(topic), np.int32)
            columns = [
                pa.DictionaryArray.from_arrays(to_arrow(place), names),
                to_arrow(np.full(batch.num_rows, index, np.int32)),
                *(batch.column(name) for name in schema.names[2:]),
            ]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema)


def rows(partition: TopicPartition, table: pa.Table) -> list[ConsumerRecord]:
    """The rows of a decoded part that has headers."""
    return [*chain.from_iterable(_rows(*partition, batch) for batch in table.to_batches())]


class Records:
    """The rows of a table of `joined` that has headers, each made when it is its turn: one that nobody keeps has died
    before the next ones are made, and the garbage collector, which counts those that live, finds nothing to do."""

    __slots__ = ("table",)

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return chain.from_iterable(records for _, records in self.parts())

    def parts(self) -> Iterator[tuple[pa.RecordBatch, Iterator[ConsumerRecord]]]:
        """Some rows of one partition at a time: as columns, and one by one."""
        for batch in self.table.to_batches():
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                part = batch.slice(start, ROWS_AT_ONCE)
                yield part, _rows(part.column("topic")[0].as_py(), part.column("partition")[0].as_py(), part)


def _rows(topic: str, partition: int, batch: pa.RecordBatch) -> Iterator[ConsumerRecord]:
    columns = zip(
        repeat(topic),
        repeat(partition),
        to_numpy(batch.column("offset")).tolist(),
        to_numpy(batch.column("timestamp")).tolist(),
        _values(batch.column("key")),
        _values(batch.column("value")),
        _headers(batch.column("headers")),
        strict=False,  # the first two never end
    )
    return map(_new_record, columns)


def _values(column: Any) -> list[bytes | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    if _LISTS_ARE_FAST:
        return column.to_pylist()  # type: ignore[no-any-return]
    data, starts, ends, valid = binary_parts(column)
    first, last = int(starts[0]), int(ends[-1])
    held = data[first:last].tobytes()
    bounds = zip((starts - first).tolist(), (ends - first).tolist(), strict=True)
    if valid is None:
        return [held[start:end] for start, end in bounds]
    return [held[start:end] if there else None for (start, end), there in zip(bounds, valid.tolist(), strict=True)]


def _headers(column: Any) -> list[tuple[tuple[str, bytes | None], ...]]:
    if column.null_count == len(column):
        return [()] * len(column)
    return [tuple((h["key"], h["value"]) for h in entry) if entry else () for entry in column.to_pylist()]
