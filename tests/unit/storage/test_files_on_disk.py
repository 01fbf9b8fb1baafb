"""The small files: layouts byte by byte, and what damaged ones do."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from semel.storage.files import DiskFiles, FileCache
from semel.storage.producer_state import (
    BatchInfo,
    CorruptSnapshotError,
    ProducerEntry,
    decode_snapshot,
    encode_snapshot,
)
from semel.storage.segment import OFFSET_ENTRY, AbortedTxn, SparseIndex, TransactionIndex


def producer(producer_id: int = 5, *, batches: list[BatchInfo] | None = None, txn: int = -1) -> ProducerEntry:
    entry = ProducerEntry(producer_id)
    entry.epoch, entry.coordinator_epoch, entry.last_timestamp_ms, entry.txn_first_offset = 3, 2, 99, txn
    entry.batches = batches or []
    return entry


def test_snapshot_layout_is_kafkas() -> None:
    data = encode_snapshot([producer(batches=[BatchInfo(0, 4, 10, 14, 50), BatchInfo(5, 9, 20, 24, 60)], txn=10)])
    body = struct.pack(">i", 1) + struct.pack(">qhiqiqiq", 5, 3, 9, 24, 4, 99, 2, 10)
    assert data == struct.pack(">hI", 1, crc32c(body)) + body


def test_snapshot_restores_the_last_batch_and_the_open_transaction() -> None:
    entries = [producer(1, txn=30), producer(2, batches=[BatchInfo(7, 9, 20, 22, 60)], txn=20), producer(3)]
    restored = decode_snapshot(encode_snapshot(entries), now_ms=1000)
    assert [(entry.producer_id, entry.txn_first_offset) for entry in restored] == [(3, -1), (2, 20), (1, 30)]
    assert restored[1].batches == [BatchInfo(7, 9, 20, 22, 99)]
    assert restored[1].history_cut
    assert restored[0].batches == []


def test_snapshot_of_a_batch_that_wrapped_around() -> None:
    last = BatchInfo(2**31 - 2, 3, 100, 105, 60)
    restored = decode_snapshot(encode_snapshot([producer(batches=[last])]), now_ms=0)
    assert restored[0].batches[0][:4] == last[:4]


@given(st.binary(max_size=200))
def test_garbage_is_no_snapshot(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        decode_snapshot(data, now_ms=0)


def test_a_snapshot_cut_or_changed_anywhere_is_noticed() -> None:
    data = encode_snapshot([producer(1), producer(2)])
    for length in range(len(data)):
        with pytest.raises(CorruptSnapshotError):
            decode_snapshot(data[:length], now_ms=0)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(CorruptSnapshotError):
            decode_snapshot(bytes(changed), now_ms=0)


@given(
    steps=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), max_size=700),
    keys=st.lists(st.integers(-5, 20_000), max_size=20),
)
def test_index_lookups_match_a_plain_list(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], keys: list[int]
) -> None:
    index = SparseIndex(FileCache(DiskFiles()), str(tmp_path_factory.mktemp("index") / "x.index"), OFFSET_ENTRY, 0)
    entries, offset, position = [], 0, 0
    for number, (more_offset, more_position) in enumerate(steps):
        offset, position = offset + more_offset, position + more_position
        index.append(offset, position)
        entries.append((offset, position))
        if number == len(steps) // 2:
            index.write_pending()
    for key in [*keys, *(entry[0] for entry in entries[:3]), offset]:
        expected = max((entry for entry in entries if entry[0] <= key), default=None)
        assert index.floor(key) == expected
    assert index.entries() == entries
    index._cache.close(index.handle)


def test_transaction_index_layout_is_kafkas(tmp_path: Path) -> None:
    index = TransactionIndex(FileCache(DiskFiles()), str(tmp_path / "x.txnindex"), 0)
    assert not (tmp_path / "x.txnindex").exists()
    index.append(AbortedTxn(7, 100, 200, 150))
    assert (tmp_path / "x.txnindex").read_bytes() == struct.pack(">hqqqq", 0, 7, 100, 200, 150)
    index._cache.close(index.handle)


@given(data=st.data())
def test_aborts_that_overlap_are_found_wherever_they_stand(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    index = TransactionIndex(FileCache(DiskFiles()), str(tmp_path_factory.mktemp("txn") / "x.txnindex"), 0)
    entries = []
    offset = 0
    for number in range(data.draw(st.integers(0, 60))):
        offset += data.draw(st.integers(1, 9))
        entry = AbortedTxn(number, data.draw(st.integers(max(0, offset - 60), offset)), offset, 0)
        index.append(entry)
        entries.append(entry)
    low = data.draw(st.integers(0, 300))
    high = low + data.draw(st.integers(1, 100))
    expected = [entry for entry in entries if entry.last_offset >= low and entry.first_offset < high]
    assert index.overlapping(low, high)[0] == expected
    index._cache.close(index.handle)


def test_lookups_stay_fast_over_a_million_aborts(tmp_path: Path) -> None:
    """Also behind a transaction that held the last stable offset down all the time."""
    count = 1_000_000
    path = tmp_path / "x.txnindex"
    pack = struct.Struct(">hqqqq").pack
    with open(path, "wb") as file:
        for start in range(0, count, 10_000):
            rows = range(start, start + 10_000)
            file.write(b"".join(pack(0, row % 1000, row * 3, row * 3 + 2, 5) for row in rows))
    index = TransactionIndex(FileCache(DiskFiles()), str(path), path.stat().st_size)
    index.overlapping(0, 10)  # the first one reads the file
    started = time.thread_time()
    for number in range(100):
        row = number * 9_973 % count
        found, _ = index.overlapping(row * 3 + 1, row * 3 + 5)
        assert found == [AbortedTxn(r % 1000, r * 3, r * 3 + 2, 5) for r in (row, row + 1) if r < count]
    per_lookup_ms = (time.thread_time() - started) * 10
    assert per_lookup_ms < 20, "a scan of a million entries takes 500 ms"
    index.append(AbortedTxn(1, 7, 3 * count + 5, 8))
    assert index.overlapping(3 * count, 3 * count + 10)[0] == [AbortedTxn(1, 7, 3 * count + 5, 8)]
    index._cache.close(index.handle)
