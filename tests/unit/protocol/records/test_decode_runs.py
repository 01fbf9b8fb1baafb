"""Which batches are decoded together: never what comes out of it."""

from __future__ import annotations

import random

import pytest

from semel.protocol import columns, columns_decode, decode_runs
from semel.protocol.batch import Buffer, seal_crc
from semel.protocol.errors import CorruptBatchError
from semel.protocol.record_sets import Progress
from semel.protocol.rows import MarkerType, Record, encode_batch, encode_marker
from tests.unit.protocol.records.samples import NOW, random_records, rows_of


def batches(rng: random.Random, counts: list[int], first_offset: int = 0, **options: int) -> tuple[bytes, list[Record]]:
    """Batches one after the other, and the records in them."""
    data, records = b"", []
    for count in counts:
        some = [r._replace(offset=r.offset + first_offset) for r in random_records(rng, count, headers=count % 7 == 0)]
        data += encode_batch(some, **{"compression": rng.choice([0, 0, 4]), **options})
        first_offset += count
        records += some
    return data, records


def in_one_answer(parts: list[bytes]) -> list[memoryview]:
    """The parts as they come: in one piece of memory, with other fields between them."""
    answer = bytearray(b"".join(b"between" + part for part in parts))
    views, at = [], 0
    for part in parts:
        at += len(b"between")
        views.append(memoryview(answer)[at : at + len(part)])
        at += len(part)
    return views


def run_count(data: list[Buffer]) -> int:
    sets = [(decode_runs.RecordSet(each), Progress(0)) for each in data]
    return len(list(decode_runs.runs(sets, decode_runs.DecodeLimits())))


@pytest.mark.parametrize("slice_rows", [64, 100_000])
@pytest.mark.parametrize("run_records", [500, 100_000])
def test_sets_of_one_answer_come_out_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, slice_rows: int, run_records: int
) -> None:
    monkeypatch.setattr(columns_decode, "SLICE_ROWS", slice_rows)
    monkeypatch.setattr(decode_runs, "RUN_RECORDS", run_records)
    rng = random.Random(slice_rows + run_records)
    made = [batches(rng, [rng.randint(1, 400) for _ in range(6)], compression=0) for _ in range(3)]
    plain, expected = [data for data, _ in made], [records for _, records in made]
    mixed, mixed_expected = batches(rng, [10, 300, 64, 64, 1])
    aborted, _ = batches(rng, [64, 64], 100, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    shown, shown_expected = batches(rng, [50], 200)
    marker = encode_marker(
        MarkerType.ABORT, offset=300, timestamp=NOW, producer_id=5, producer_epoch=0, coordinator_epoch=0
    )
    data = in_one_answer([*plain, b"", mixed, aborted + shown + marker, plain[0]])
    sets = [
        *(decode_runs.RecordSet(each) for each in data[:5]),
        decode_runs.RecordSet(data[5], 100, [(5, 100)]),
        decode_runs.RecordSet(data[6], 333),  # from the middle of a batch
    ]
    found = columns_decode.decode_record_sets(sets, headers=True)
    later = [record for record in expected[0] if record.offset >= 333]
    for decoded, records in zip(found, [*expected, [], mixed_expected, shown_expected, later], strict=True):
        decoded.table.validate(full=True)
        assert rows_of(decoded.table) == records
    alone = [columns.decode_record_set(each, start_offset=start, aborted=a, headers=True) for each, start, a in sets]
    assert [each[1:] for each in found] == [each[1:] for each in alone]


def test_partitions_of_one_answer_are_one_run() -> None:
    parts = [batches(random.Random(number), [20, 30], compression=0)[0] for number in range(4)]
    assert run_count(list(in_one_answer(parts))) == 1
    assert run_count(list(parts)) == 4  # in memory of their own


def test_decompressed_batches_of_all_partitions_are_one_run() -> None:
    assert run_count([batches(random.Random(number), [20, 30], compression=4)[0] for number in range(4)]) == 1


def test_a_run_has_an_end() -> None:
    data, _ = batches(random.Random(1), [1000] * 200, compression=0)
    assert run_count([data]) == -(-200 // (decode_runs.RUN_RECORDS // 1000))
    large = encode_batch([Record(0, NOW, None, bytes(9 * 1024 * 1024))])
    assert run_count([large * 3]) == 3


def test_one_damaged_set_is_an_error_for_all() -> None:
    good, _ = batches(random.Random(1), [100], compression=0)
    data = in_one_answer([good, good])
    data[1][200] ^= 1
    with pytest.raises(CorruptBatchError, match="CRC"):
        columns_decode.decode_record_sets([decode_runs.RecordSet(each) for each in data])


@pytest.mark.parametrize("count", [63, 64, 65, 128])
def test_offsets_must_rise_where_a_slice_ends(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A slice may end with a batch, or in the middle of one."""
    monkeypatch.setattr(columns_decode, "SLICE_ROWS", 64)
    records = [Record(number, NOW, None, b"v") for number in range(200)]
    good = encode_batch(records[:count]) + encode_batch(records[count:])
    assert columns.decode_record_set(good).table["offset"].to_pylist() == list(range(200))
    falls = encode_batch(records)
    at = falls.index(b"\x80\x01", 61)  # the offset of record 64, the first that takes two bytes
    falls[at : at + 2] = b"\xfe\x00"  # 63, which the record before it has
    seal_crc(falls)
    with pytest.raises(CorruptBatchError, match="do not rise"):
        columns.decode_record_set(falls)
