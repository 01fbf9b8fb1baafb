"""Trouble in the middle of a unit of work, step by step: what could not be finished is never counted as done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from semel.client.consumer.decode import ROWS, joined
from semel.client.errors import FencedError, RetriableError
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.patterns.process import Processor
from semel.patterns.process_modes import ExactlyOnce
from semel.patterns.process_output import Emitter
from semel.protocol.columns_decode import decode_record_set
from semel.protocol.rows import Record, encode_batch

KEPT, GOING, COMING = (TopicPartition("in", number) for number in range(3))
COMING_AT = 50
READ_AT_ONCE = 10


def read(offset: int, count: int) -> pa.Table:
    """Records as they are decoded."""
    records = [Record(number, 0, None, b"") for number in range(offset, offset + count)]
    return decode_record_set(encode_batch(records), headers=True).table


class Reader:
    """A consumer of endless partitions. During a read one may be revoked and another assigned."""

    def __init__(self) -> None:
        self.positions = {KEPT: 0, GOING: 0}
        self.processor: Processor | None = None

    def poll_table(self, timeout_ms: float, *, max_records: int, headers: bool) -> pa.Table:
        if self.processor is not None:
            self.processor.on_partitions_revoked([])
            self.positions = {KEPT: self.positions[KEPT], COMING: COMING_AT}
        parts = []
        for place, at in self.positions.items():
            parts.append((place, read(at, READ_AT_ONCE)))
            self.positions[place] += READ_AT_ONCE
        return joined(parts, ROWS)

    def assignment(self) -> set[TopicPartition]:
        return set(self.positions)

    def consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {partition: OffsetAndMetadata(at) for partition, at in self.positions.items()}

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        return {}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.positions[partition] = offset

    def group_metadata(self) -> str:
        return "group"


class Writer:
    """A producer whose broker fails once, at the offsets; it keeps what was committed. It may be fenced."""

    def __init__(self) -> None:
        self.is_fenced = False
        self.inits = 0
        self.open: dict[Any, OffsetAndMetadata] | None = None
        self.committed: list[dict[Any, OffsetAndMetadata]] = []
        self.has_failed = False

    def init_transactions(self) -> None:
        self.inits += 1
        self.open, self.is_fenced = None, False

    def begin_transaction(self) -> None:
        assert self.open is None
        self.open = {}

    def send(self, *_: Any, **__: Any) -> None:
        assert self.open is not None

    def send_offsets_to_transaction(self, offsets: dict[Any, OffsetAndMetadata], group: str) -> None:
        assert self.open is not None
        if not self.has_failed:
            self.has_failed = True
            raise RetriableError("the coordinator is loading")
        self.open |= offsets

    def commit_transaction(self) -> None:
        assert self.open is not None
        self.committed.append(self.open)
        self.open = None

    def abort_transaction(self, *, timeout_ms: float) -> None:
        assert self.open is not None
        if self.is_fenced:
            raise FencedError("a newer owner, or the timeout")
        self.open = None

    def close(self, *, timeout_ms: float) -> None:
        pass


def made(reader: Reader, writer: Writer, instance: str | None = None) -> tuple[Processor, Any]:
    """A loop that has worked before, and its mode; nothing is due yet."""
    processor = Processor(
        "in",
        "out",
        lambda record: record,
        application_id="app",
        instance=instance,
        commit_interval_ms=60_000,
        transaction_timeout_ms=90_000,
    )
    processor._has_worked = True
    mode: Any = ExactlyOnce(reader, lambda: writer, Emitter(lambda record: record, "out", False))  # type: ignore[arg-type, return-value]
    processor._mode = mode
    return processor, mode


def test_what_was_read_during_a_rebalance_is_read_again_when_the_work_could_not_be_finished() -> None:
    reader, writer = Reader(), Writer()
    processor, mode = made(reader, writer)
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert mode.begun == {KEPT: 0, GOING: 0}

    reader.processor, processor._interval_s = processor, 0.0  # due as soon as it is read
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert writer.has_failed
    read = {KEPT: 2 * READ_AT_ONCE, COMING: COMING_AT + READ_AT_ONCE}
    assert reader.positions == read, "the rebalance came in the middle of a read"
    assert writer.committed == [], "positions after records whose output was aborted"

    reader.processor = None
    processor._turn(reader, mode)  # type: ignore[arg-type]
    again = {KEPT: OffsetAndMetadata(READ_AT_ONCE), COMING: OffsetAndMetadata(COMING_AT + READ_AT_ONCE)}
    assert writer.committed == [again], "from where each began"


def test_what_came_while_a_slow_unit_of_work_went_on_belongs_to_it() -> None:
    reader, writer = Reader(), Writer()
    processor, mode = made(reader, writer)
    writer.has_failed, processor._interval_s = True, 1e-9  # over when the first records were taken
    for unit in (1, 2):
        processor._turn(reader, mode)  # type: ignore[arg-type]
        assert len(writer.committed) == unit - 1
        processor._turn(reader, mode)  # type: ignore[arg-type]
        after = OffsetAndMetadata(2 * unit * READ_AT_ONCE)
        assert writer.committed[unit - 1] == {KEPT: after, GOING: after}


def test_a_full_unit_of_work_ends_at_once() -> None:
    reader, writer = Reader(), Writer()
    processor, mode = made(reader, writer)
    writer.has_failed, processor._max_records = True, 2 * READ_AT_ONCE
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert len(writer.committed) == 1


@pytest.mark.parametrize("instance", [None, "a"], ids=["a name of its own", "a given name"])
def test_fenced_while_it_aborts_only_who_owns_the_name_takes_it_back(instance: str | None) -> None:
    reader, writer = Reader(), Writer()
    processor, mode = made(reader, writer, instance)
    processor._interval_s = 0.0
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert isinstance(mode.failed, RetriableError)
    writer.is_fenced = True
    if instance is not None:
        with pytest.raises(FencedError):
            processor._turn(reader, mode)  # type: ignore[arg-type]
        assert writer.inits == 0
        return
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert isinstance(mode.failed, FencedError)
    processor._turn(reader, mode)  # type: ignore[arg-type]
    assert writer.inits == 1
    assert writer.committed == [{KEPT: OffsetAndMetadata(READ_AT_ONCE), GOING: OffsetAndMetadata(READ_AT_ONCE)}]
