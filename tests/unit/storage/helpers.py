"""A data folder on an injected clock, and batches as clients send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import UUID

from semel.protocol.batch import BatchHeader, iter_headers
from semel.protocol.rows import Record, encode_batch
from semel.storage import AppendResult, DataDir, LogConfig, PartitionLog, SyncGroup, TimestampOffset
from semel.storage.files import DiskFiles
from semel.storage.producer_state import ProducerEntry
from tests.support.batches import decode_batches

START_MS = 1_700_000_000_000
TOPIC_ID = UUID("01234567-89ab-cdef-0123-456789abcdef")


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class Folder:
    """A data folder that can be stopped cleanly or not, and opened again, with one partition `t-0`."""

    def __init__(self, path: Path, *, fsync: str = "os", files: Callable[[], DiskFiles] | None = None) -> None:
        self.path = path
        self.clock = Clock()
        self.fsync = fsync
        self.config = LogConfig()
        self._make_files = files
        self.data_dir = self._open()

    def _open(self) -> DataDir:
        return DataDir.open(
            self.path,
            sync=SyncGroup(self.fsync),  # type: ignore[arg-type]
            config_of=lambda _: self.config,
            now_ms=self.clock,
            files=self._make_files() if self._make_files else None,
        )

    def log(self, topic: str = "t", **settings: object) -> PartitionLog:
        if settings:
            self.config = LogConfig(**settings)  # type: ignore[arg-type]
        found = self.data_dir.get(topic, 0)
        if found is None:
            return self.data_dir.create(topic, 0, TOPIC_ID, self.config)
        if settings:
            found.config = self.config
        return found

    def restart(self, *, clean: bool) -> PartitionLog:
        if clean:
            self.data_dir.close()
        else:
            self.data_dir.crash()
        self.data_dir._sync.stop()
        self.data_dir = self._open()
        assert self.data_dir.was_clean is clean
        return self.log()

    def maintain(self, now_ms: int) -> None:
        """The background work of a broker."""
        for log in self.data_dir.logs.values():
            self.data_dir.maintain_log(log, now_ms)
        list(self.data_dir.garbage_removal(now_ms))
        self.data_dir.checkpoint()

    @property
    def partition_path(self) -> Path:
        return self.path / "t-0"


def batch(
    values: Iterable[bytes | None] = (b"v",),
    *,
    keys: Iterable[bytes | None] | None = None,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    timestamp_ms: int = START_MS,
    transactional: bool = False,
    compression: int = 0,
) -> bytearray:
    values = list(values)
    keys = list(keys) if keys is not None else [b"k"] * len(values)
    records = [
        Record(number, timestamp_ms + number, key, value)
        for number, (key, value) in enumerate(zip(keys, values, strict=True))
    ]
    return encode_batch(
        records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
        compression=compression,
    )


def append(
    log: PartitionLog, data: bytearray | None = None, *, now_ms: int = START_MS, **fields: object
) -> AppendResult:
    return log.append(memoryview(batch(**fields) if data is None else data), now_ms=now_ms)  # type: ignore[arg-type]


def append_in_transaction(
    log: PartitionLog, producer_id: int, sequence: int, values: Iterable[bytes] = (b"v",), *, epoch: int = 0
) -> AppendResult:
    """Transactional data, verified with a coordinator that always agrees."""
    guard = log.start_verification(producer_id, epoch, sequence, supports_epoch_bump=False)
    data = batch(values, producer_id=producer_id, epoch=epoch, sequence=sequence, transactional=True)
    return log.append(memoryview(data), now_ms=START_MS, guard=guard)


def find_producer(log: PartitionLog, producer_id: int) -> ProducerEntry | None:
    return log.states.producers.get(producer_id)


def producers(log: PartitionLog) -> dict[int, tuple[int, ...]]:
    """Id: epoch, last sequence, last timestamp, coordinator epoch, first offset of the open transaction."""
    return {
        entry.producer_id: (
            entry.epoch,
            entry.last_sequence,
            entry.last_timestamp_ms,
            entry.coordinator_epoch,
            entry.txn_first_offset,
        )
        for entry in log.states.producers.values()
    }


def newest_record(log: PartitionLog) -> TimestampOffset | None:
    """The record with the highest timestamp (ListOffsets -3)."""
    batch = log.batch_of_max_timestamp()
    return None if batch is None else batch.first_record()


def offset_for_time(log: PartitionLog, timestamp_ms: int) -> TimestampOffset | None:
    """The first record with this timestamp or a later one (ListOffsets by time)."""
    batch = log.batch_for_time(timestamp_ms)
    while batch is not None:
        found = batch.first_record()
        if found is not None:
            return found
        batch = log.batch_for_time(timestamp_ms, batch.header.next_offset)
    return None


def all_headers(log: PartitionLog) -> list[BatchHeader]:
    headers: list[BatchHeader] = []
    offset = log.start_offset
    while offset < log.end_offset:
        records = log.read(offset, 1 << 20, up_to="log_end").records
        found = [header for _, header in iter_headers(records)]
        if not found:
            break
        headers += found
        offset = headers[-1].next_offset
    return headers


def all_records(log: PartitionLog, **options: object) -> list[Record]:
    """Every data record, as a reader that fetches from the start would see them, aborted ones too."""
    records: list[Record] = []
    offset = log.start_offset
    while True:
        data = log.read(offset, 1 << 16, **options).records  # type: ignore[arg-type]
        if not len(data):
            return records
        for decoded in decode_batches(data):
            if not decoded.header.is_control:
                records += [record for record in decoded.records if record.offset >= log.start_offset]
            offset = decoded.header.next_offset


def committed_values(log: PartitionLog) -> list[bytes | None]:
    """What a read_committed consumer sees, by the client's rules for aborted transactions."""
    values: list[bytes | None] = []
    offset = log.start_offset
    while True:
        result = log.read(offset, 1 << 16, up_to="last_stable")
        if not len(result.records):
            return values
        pending = sorted(result.aborted or [], key=lambda entry: entry[1])
        aborted: set[int] = set()
        for decoded in decode_batches(result.records):
            header = decoded.header
            while pending and pending[0][1] <= header.last_offset:
                aborted.add(pending.pop(0)[0])
            offset = header.next_offset
            if header.is_control:
                aborted.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in aborted):
                values += [record.value for record in decoded.records]
