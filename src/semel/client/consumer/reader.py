"""Hands out what was fetched, in order and up to a limit. No I/O; numpy and pyarrow are loaded with the first chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from semel.client.consumer.assigned_partitions import PartitionState
from semel.client.consumer.fetcher import Fetcher
from semel.client.errors import KafkaError
from semel.client.types import ConsumerRecord, TopicPartition
from semel.protocol.errors import DecodeError

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.client.consumer.decode import DecodedChunk, Form


class ChunkReader:
    """Decodes the chunks of a fetcher, and keeps those that were not read to their end."""

    def __init__(self, fetcher: Fetcher, reads_committed: bool) -> None:
        self.records_total = self.bytes_total = 0  # handed out
        self._fetcher = fetcher
        self._reads_committed = reads_committed
        self._open: list[DecodedChunk] = []  # decoded, not yet read to their end

    @property
    def has_records(self) -> bool:
        self._open = [decoded for decoded in self._open if decoded.chunk.is_current]
        return self._fetcher.has_chunks or any(decoded.chunk.is_readable for decoded in self._open)

    def positions(self) -> dict[PartitionState, int | None]:
        """Those of all partitions with something at hand."""
        at_hand = [*self._fetcher.readable(), *(decoded.chunk for decoded in self._open)]
        return {chunk.state: chunk.state.position for chunk in at_hand}

    def clear(self) -> None:
        self._open.clear()

    def take(self, form: Form, max_records: int | None, max_bytes: int | None) -> list[tuple[TopicPartition, pa.Table]]:
        """Reads chunks up to the limits; at least one row if there is any."""
        parts: list[tuple[TopicPartition, pa.Table]] = []
        rows, size_bytes = 0, 0
        while (max_records is None or rows < max_records) and (max_bytes is None or size_bytes < max_bytes):
            decoded = self._next(form, may_raise=not parts)
            if decoded is None:
                break
            count, left_bytes = decoded.rows_left, decoded.bytes_left
            if max_records is not None:
                count = min(count, max_records - rows)
            if max_bytes is not None and left_bytes > max_bytes - size_bytes:
                count = min(count, max(1, count * (max_bytes - size_bytes) // left_bytes))
            part = decoded.take(count)
            size_bytes += left_bytes - decoded.bytes_left
            rows += part.num_rows
            if decoded.rows_left:
                self._open.insert(0, decoded)
            if part.num_rows:
                parts.append((decoded.partition, part))
        self.records_total += rows
        self.bytes_total += size_bytes
        return parts

    def decode_all(self, form: Form) -> None:
        """Decodes all that can be read, at once. What is damaged is left to be decoded chunk by chunk."""
        from semel.client.consumer.decode import decode_all

        with contextlib.suppress(DecodeError):
            self._open += decode_all(self._fetcher.readable(), self._reads_committed, form)
            self._fetcher.drop_readable()

    def _next(self, form: Form, may_raise: bool) -> DecodedChunk | None:
        from semel.client.consumer.decode import decode

        for index, decoded in enumerate(self._open):
            if decoded.chunk.is_readable:
                del self._open[index]
                return decoded if decoded.form.covers(form) else self._decode_again(decoded, form)
        chunk = self._fetcher.take()
        if chunk is None:
            return None
        try:
            return decode(chunk, self._reads_committed, form)
        except KafkaError:
            if may_raise:
                raise
            return None  # what was read before it is handed out first; the next call raises the error

    def _decode_again(self, decoded: DecodedChunk, form: Form) -> DecodedChunk:
        from semel.client.consumer.decode import decode

        assert decoded.chunk.state.position is not None
        decoded.chunk.start = decoded.chunk.state.position
        return decode(decoded.chunk, self._reads_committed, form)


# --- An iteration over a consumer: which records were yielded, and which of them count as processed. No I/O ---


class RecordRun(NamedTuple):
    """Consecutive records of one partition."""

    state: PartitionState
    version: int
    records: list[ConsumerRecord]

    @property
    def is_current(self) -> bool:
        """False after a seek, a revocation or close(): what is left of it is not to be read."""
        return self.version == self.state.version


class Iteration:
    """Records that an iteration over a consumer got from one poll, yielded one by one.

    The consumer's offsets are already after all of them. What was not yielded has not been read, and what was yielded
    has been processed only when the caller wants the next record: an exception in the caller's loop leaves the last one
    unprocessed, and no automatic commit may cover it."""

    def __init__(self, runs: list[RecordRun]) -> None:
        self._runs = runs
        self._yielded = 0  # records of all runs, with those that were left out
        self._processed = 0

    def __iter__(self) -> Iterator[ConsumerRecord]:
        start = 0
        for run in self._runs:
            for record in run.records:
                if not run.is_current:
                    break
                self._yielded += 1
                yield record
                self._processed = self._yielded
            start += len(run.records)
            self._yielded = self._processed = start

    def unread(self) -> dict[TopicPartition, int]:
        """The first offset of each partition that was not yielded."""
        return self._first_offsets(self._yielded)

    def unprocessed(self) -> dict[TopicPartition, int]:
        """The same, with the record that was yielded last, while the caller works on it."""
        return self._first_offsets(self._processed)

    def _first_offsets(self, skip: int) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        for run in self._runs:
            if run.is_current and skip < len(run.records):
                offsets.setdefault(run.state.topic_partition, run.records[skip].offset)
            skip = max(0, skip - len(run.records))
        return offsets

    def give_back(self, partitions: set[TopicPartition] | None = None) -> None:
        """What was not yielded (of these partitions) is read again by the next poll."""
        unread = self.unread()
        for run in self._runs:
            partition = run.state.topic_partition
            if run.is_current and partition in unread and (partitions is None or partition in partitions):
                run.state.seek(unread[partition])
