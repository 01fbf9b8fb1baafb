"""What a reader sees of a fetch answer: isolation, positions, control batches, parts."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.protocol import columns, record_sets
from semel.protocol.batch import patch_log_append_time, patch_offset
from semel.protocol.errors import DecodeError
from semel.protocol.rows import MarkerType, Record, encode_batch, encode_marker
from tests.unit.protocol.records.samples import NOW, decode_both, random_records


class Log:
    """A partition as a broker would keep it, and what a read_committed reader must see of it."""

    def __init__(self) -> None:
        self.data = b""
        self.offset = 0
        self.aborted: list[tuple[int, int]] = []
        self.committed: list[Record] = []
        self._open: dict[int, list[Record]] = {}

    def write(self, count: int, producer_id: int = -1, transactional: bool = False) -> None:
        records = [Record(self.offset + i, NOW, b"k", b"p%d" % producer_id) for i in range(count)]
        self.data += encode_batch(records, producer_id=producer_id, transactional=transactional)
        self.offset += count
        if transactional:
            self._open.setdefault(producer_id, []).extend(records)
        else:
            self.committed += records

    def end(self, producer_id: int, kind: MarkerType) -> None:
        self.data += encode_marker(
            kind, offset=self.offset, timestamp=NOW, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0
        )
        self.offset += 1
        records = self._open.pop(producer_id, [])
        if kind is MarkerType.COMMIT:
            self.committed += records
        elif records:
            self.aborted.append((producer_id, records[0].offset))


def read(log: Log, *, committed: bool, start: int = 0) -> record_sets.RowSet:
    result = decode_both(log.data, start_offset=start, aborted=log.aborted if committed else None)
    assert isinstance(result, record_sets.RowSet)
    return result


def test_read_committed_never_sees_an_aborted_transaction() -> None:
    log = Log()
    log.write(3, 1, transactional=True)
    log.write(2, 2, transactional=True)
    log.write(1)
    log.end(1, MarkerType.ABORT)
    log.write(4, 1, transactional=True)  # the same producer's next transaction, which commits
    log.end(2, MarkerType.COMMIT)
    log.end(1, MarkerType.COMMIT)
    seen = read(log, committed=True)
    assert seen.records == sorted(log.committed)
    assert [r.offset for r in seen.records] == [3, 4, 5, 7, 8, 9, 10]
    assert seen.next_offset == log.offset
    assert [r.offset for r in read(log, committed=False).records] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_an_abort_that_began_before_the_answer_still_hides() -> None:
    """A fetch from the middle of a transaction gets its first offset, which lies before the data."""
    log = Log()
    log.write(2, 1, transactional=True)
    cut = len(log.data)
    log.write(2, 1, transactional=True)
    log.end(1, MarkerType.ABORT)
    log.write(1)
    log.data = log.data[cut:]
    seen = read(log, committed=True, start=2)
    assert [r.offset for r in seen.records] == [5]


def test_nothing_but_hidden_batches_still_moves_the_position() -> None:
    log = Log()
    log.write(5, 1, transactional=True)
    log.end(1, MarkerType.ABORT)
    seen = read(log, committed=True)
    assert (seen.records, seen.next_offset) == ([], 6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "plain", "commit", "abort"]), st.integers(1, 3), st.integers(1, 40)),
        max_size=30,
    ),
    st.integers(0, 50),
)
def test_read_committed_sees_exactly_what_was_committed(events: list, start: int) -> None:
    log = Log()
    for kind, producer_id, count in events:
        if kind == "plain":
            log.write(count)
        elif kind == "write":
            log.write(count, producer_id, transactional=True)
        else:
            log.end(producer_id, MarkerType.COMMIT if kind == "commit" else MarkerType.ABORT)
    for producer_id in (1, 2, 3):  # below the last stable offset nothing is open
        log.end(producer_id, MarkerType.COMMIT)
    seen = read(log, committed=True, start=start)
    assert seen.records == sorted(record for record in log.committed if record.offset >= start)
    assert seen.next_offset == max(start, log.offset)


def test_a_position_inside_a_batch_skips_what_comes_before() -> None:
    data = bytes(encode_batch([Record(i, NOW, None, b"v") for i in range(10)]))
    for start in (0, 1, 9, 10, 20):
        result = decode_both(data, start_offset=start)
        assert isinstance(result, record_sets.RowSet)
        assert [r.offset for r in result.records] == list(range(start, 10))
        assert result.next_offset == max(start, 10)


def test_compacted_end_of_a_batch_moves_the_position() -> None:
    data = bytes(encode_batch([Record(2, NOW, None, b"v")], base_offset=0, last_offset=50))
    assert decode_both(data).next_offset == 51
    empty = bytes(encode_batch([], base_offset=51, last_offset=60))
    assert decode_both(data + empty).next_offset == 61


def test_garbage_in_a_control_batch_is_refused() -> None:
    data = bytes(encode_batch([Record(0, 0, b"?", b"?")], control=True, transactional=True, producer_id=1))
    assert isinstance(decode_both(data, aborted=[]), DecodeError)


def test_table_has_the_stated_columns_and_types() -> None:
    batch = encode_batch([Record(0, 5, b"k", None, (("h", None),)), Record(1, 6, None, b"v")])
    stamped = encode_batch([Record(2, 7, b"k", b"v")], leader_epoch=9)
    patch_log_append_time(stamped, 99)
    decoded = columns.decode_record_set(bytes(batch + stamped), headers=True)
    assert decoded.table.schema.names == ["offset", "timestamp", "timestamp_type", "key", "value", "headers"]
    assert decoded.table.to_pydict() == {
        "offset": [0, 1, 2],
        "timestamp": [5, 6, 99],
        "timestamp_type": [0, 0, 1],
        "key": [b"k", None, b"k"],
        "value": [None, b"v", b"v"],
        "headers": [[{"key": "h", "value": None}], None, None],
    }
    assert decoded.leader_epoch == 9
    assert columns.decode_record_set(bytes(batch)).table.schema == columns.SCHEMA
    nothing = columns.decode_record_set(b"", start_offset=8, headers=True)
    assert (nothing.table.num_rows, nothing.next_offset, nothing.bytes_read) == (0, 8, 0)
    assert nothing.table.schema == columns.SCHEMA_WITH_HEADERS


def test_a_large_answer_is_read_in_parts() -> None:
    rng, data, expected = random.Random(1), b"", []
    for number in range(20):
        records = [r._replace(offset=r.offset + number * 50) for r in random_records(rng, 50)]
        data += encode_batch(records, compression=number % 5)
        expected += records
    rest, offset, parts, found = memoryview(data), 0, 0, []
    while len(rest):
        decoded = columns.decode_record_set(rest, start_offset=offset, max_bytes=10_000)
        rest, offset = rest[decoded.bytes_read :], decoded.next_offset
        found += decoded.table["offset"].to_pylist()
        parts += 1
    assert found == [r.offset for r in expected]
    assert parts > 5


def test_long_and_short_batches_of_every_kind_in_one_answer() -> None:
    """Many runs and slices: the places where the columnar codec cuts its work."""
    rng, data, offset, expected = random.Random(8), b"", 0, []
    for count in (40_000, 1, 3000, 2, 500, 33_000):
        records = [r._replace(offset=r.offset + offset) for r in random_records(rng, count, headers=count == 3000)]
        data += encode_batch(records, compression=rng.choice([0, 4]))
        offset += count
        expected += records
    decoded = columns.decode_record_set(data)
    for name in ("offset", "timestamp", "key", "value"):
        assert decoded.table[name].to_pylist() == [getattr(record, name) for record in expected]
    assert decoded.table["value"].num_chunks > 3


@pytest.mark.parametrize("size", [2**16, 2**20, 2**22])
def test_huge_values_pass(size: int) -> None:
    value = random.Random(size).randbytes(size)
    (batch,) = columns.ColumnEncoder(pa.array([value, b"", None, value]), timestamp=NOW).encode(max_batch_bytes=2**30)
    result = decode_both(bytes(batch.buffer))
    assert isinstance(result, record_sets.RowSet)
    assert [r.value for r in result.records] == [value, b"", None, value]


def test_patched_offsets_are_seen() -> None:
    (batch,) = columns.ColumnEncoder(pa.array([b"a", b"b"])).encode()
    patch_offset(batch.buffer, 1000, 3)
    decoded = columns.decode_record_set(batch.buffer)
    assert decoded.table["offset"].to_pylist() == [1000, 1001]
    assert (decoded.next_offset, decoded.leader_epoch) == (1002, 3)


def test_views_are_not_copied_and_can_be_encoded_again() -> None:
    records = random_records(random.Random(9), 3000, headers=True)
    data = bytes(encode_batch(records))
    table = columns.decode_record_set(data, headers=True, views=True).table
    assert table.schema.field("value").type == pa.binary_view()
    (buffer,) = {part.address for part in table["value"].chunk(0).buffers()[2:]}
    assert buffer == pa.py_buffer(data).address
    again = columns.ColumnEncoder(**{name: table[name] for name in ("key", "value", "headers", "timestamp")}).encode()
    assert b"".join(batch.buffer for batch in again)[12:] == data[12:]
