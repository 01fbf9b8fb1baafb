"""Which batches are decoded together.

Every step of numpy has a price of its own, so batches are put together into runs, also those of different partitions:
neighbours that lie in the same memory, as those of one response do, and decompressed ones. A run is not so long that
what is known of its records leaves the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from semel.protocol.batch import DEFAULT_LIMIT_BYTES, HEADER_SIZE, RECORD_OVERHEAD_BYTES, BatchHeader, Buffer, read_body
from semel.protocol.record_sets import AbortedTransactions, Progress, visible_batches
from semel.protocol.vector_varints import Bytes

RUN_BYTES = 16 * 1024 * 1024
RUN_RECORDS = 64 * 1024
DEFAULT_MAX_BYTES = 1024 * 1024 * 1024


class RecordSet(NamedTuple):
    """What a response holds of one partition, and from where on it is wanted. `aborted` holds the aborted transactions
    that came with it for read_committed, and is None for read_uncommitted."""

    data: Buffer
    start_offset: int = 0
    aborted: AbortedTransactions | None = None


class DecodeLimits(NamedTuple):
    """`batch_bytes` bounds one batch, each of its records counted with RECORD_OVERHEAD_BYTES; `set_bytes` is when to
    leave the rest of a record set for another call."""

    batch_bytes: int = DEFAULT_LIMIT_BYTES
    set_bytes: int = DEFAULT_MAX_BYTES


class BatchRun(NamedTuple):
    """Batches to decode together, and the memory that holds their records."""

    headers: list[BatchHeader]
    sets: list[int]  # which record set each batch is of
    data: Bytes
    starts: list[int]
    ends: list[int]


class _Visible(NamedTuple):
    header: BatchHeader
    set: int
    memory: Bytes | None  # that it lies in as it is; None if it was decompressed
    at: int  # in that memory
    body: memoryview

    @property
    def cost_bytes(self) -> int:
        return len(self.body) + self.header.record_count * RECORD_OVERHEAD_BYTES


def runs(sets: Iterable[tuple[RecordSet, Progress]], limits: DecodeLimits) -> Iterator[BatchRun]:
    """The visible batches of all sets in their order. A set's progress moves on as its batches are taken."""
    open_run: list[_Visible] = []
    open_bytes = open_records = 0
    for batch in _visible(sets, limits):
        open_bytes += batch.cost_bytes
        open_records += batch.header.record_count
        if open_run and (open_bytes > RUN_BYTES or open_records > RUN_RECORDS or not _follows(open_run[-1], batch)):
            yield _closed(open_run)
            open_run, open_bytes, open_records = [], batch.cost_bytes, batch.header.record_count
        open_run.append(batch)
    if open_run:
        yield _closed(open_run)


def _visible(sets: Iterable[tuple[RecordSet, Progress]], limits: DecodeLimits) -> Iterator[_Visible]:
    memory, held_by = np.zeros(0, np.uint8), None
    for number, ((data, _, aborted), progress) in enumerate(sets):
        view = memoryview(data)
        if view.obj is not held_by:
            memory, held_by = np.frombuffer(view.obj, np.uint8), view.obj  # type: ignore[call-overload]
        first = _address(np.frombuffer(view, np.uint8)) - _address(memory)
        set_bytes = 0
        for at, header in visible_batches(data, progress, aborted, limits.batch_bytes):
            if set_bytes and set_bytes + header.size > limits.set_bytes:
                break
            body = read_body(data, header, at, limits.batch_bytes)
            if header.record_count:
                batch = _Visible(header, number, None if header.compression else memory, first + at, body)
                set_bytes += batch.cost_bytes
                yield batch


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _follows(last: _Visible, batch: _Visible) -> bool:
    return batch.memory is last.memory and (batch.memory is None or batch.at > last.at)


def _closed(batches: list[_Visible]) -> BatchRun:
    headers, sets = [batch.header for batch in batches], [batch.set for batch in batches]
    memory = batches[0].memory
    if memory is None:
        bodies = [batch.body for batch in batches]
        ends = np.cumsum([len(body) for body in bodies]).tolist()
        joined = np.frombuffer(bodies[0] if len(bodies) == 1 else b"".join(bodies), np.uint8)
        return BatchRun(headers, sets, joined, [0, *ends[:-1]], ends)
    first, end = batches[0].at, batches[-1].at + headers[-1].size
    starts = [batch.at - first + HEADER_SIZE for batch in batches]
    ends = [batch.at - first + batch.header.size for batch in batches]
    return BatchRun(headers, sets, memory[first:end], starts, ends)
