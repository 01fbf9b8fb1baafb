"""Records, batches and the two codecs side by side, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from semel.protocol import columns, record_sets
from semel.protocol.errors import DecodeError
from semel.protocol.rows import Record, TimestampType, encode_batch

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
NOW = 1_700_000_000_000

# Sizes around every boundary of a varint's width, and of Arrow's in-place views (12 bytes).
lengths = st.sampled_from([0, 1, 5, 11, 12, 13, 62, 63, 64, 65, 200, 8191, 8192])
payloads = st.none() | st.binary(max_size=40) | st.builds(lambda n, b: bytes([b]) * n, lengths, st.integers(0, 255))
header_lists = st.lists(st.tuples(st.text(max_size=12), st.none() | st.binary(max_size=30)), max_size=4).map(tuple)
timestamps = (
    st.integers(NOW - 10, NOW + 10)
    | st.integers(NOW - 10**6, NOW + 10**6)
    | st.sampled_from([-1, 0, 2**62, -(2**62), 2**63 - 1, -(2**63)])
)


@st.composite
def record_lists(draw: st.DrawFn, max_size: int = 30, gaps: bool = True, min_size: int = 1) -> list[Record]:
    """Records with rising offsets; many equal ones now and then, so that batches get long."""
    fields = st.tuples(timestamps, payloads, payloads, header_lists)
    some = draw(st.lists(fields, min_size=min_size, max_size=max_size))
    if some and draw(st.integers(0, 9)) == 0:
        some = some * draw(st.integers(1, 60))
    offset, records = draw(st.integers(0, 10**6)), []
    for timestamp, key, value, headers in some:
        records.append(Record(offset, timestamp, key, value, headers))
        offset += 1 + (draw(st.integers(0, 3)) if gaps and len(some) < 100 else 0)
    return records


def table_of(records: Sequence[Record], **types: pa.DataType) -> dict[str, Any]:
    """The columns that `ColumnEncoder` takes."""
    return {
        "key": pa.array([r.key for r in records], types.get("key", pa.binary())),
        "value": pa.array([r.value for r in records], types.get("value", pa.binary())),
        "headers": pa.array([[{"key": k, "value": v} for k, v in r.headers] for r in records], HEADERS),
        "timestamp": pa.array([r.timestamp for r in records], pa.int64()),
    }


def rows_of(table: pa.Table) -> list[Record]:
    """A decoded table as rows."""
    columns_ = table.to_pydict()
    headers = columns_.get("headers") or [None] * table.num_rows
    fields = zip(columns_["offset"], columns_["timestamp"], columns_["key"], columns_["value"], headers, strict=True)
    return [Record(o, t, k, v, tuple((h["key"], h["value"]) for h in hs or ())) for o, t, k, v, hs in fields]


def decode_both(data: bytes, **options: Any) -> record_sets.RowSet | DecodeError:
    """What both codecs make of a record set: the same rows, or both an error. Anything else fails the test."""
    try:
        by_rows: record_sets.RowSet | DecodeError = record_sets.decode_record_set(data, **options)
    except DecodeError as error:
        by_rows = error
    try:
        decoded = columns.decode_record_set(data, headers=True, **options)
        decoded.table.validate(full=True)
        by_columns: record_sets.RowSet | DecodeError = record_sets.RowSet(rows_of(decoded.table), decoded.next_offset)
        viewed = columns.decode_record_set(data, headers=True, views=True, **options)
        viewed.table.validate(full=True)
        assert viewed.table.cast(decoded.table.schema).equals(decoded.table)
    except DecodeError as error:
        by_columns = error
    if isinstance(by_rows, DecodeError) or isinstance(by_columns, DecodeError):
        both_refuse = isinstance(by_rows, DecodeError) and isinstance(by_columns, DecodeError)
        assert both_refuse, f"rows: {by_rows!r:.300}\ncolumns: {by_columns!r:.300}\ndata: {bytes(data).hex():.2000}"
    else:
        assert by_rows == by_columns
    return by_rows


def random_records(rng: random.Random, count: int, *, value_bytes: int = 60, headers: bool = False) -> list[Record]:
    def payload(most: int) -> bytes | None:
        return None if rng.random() < 0.05 else rng.randbytes(rng.randint(0, most))

    return [
        Record(
            offset,
            NOW + rng.randint(-5, 5000),
            payload(20),
            payload(value_bytes),
            tuple((f"h{i}", payload(9)) for i in range(rng.randint(0, 3))) if headers else (),
        )
        for offset in range(count)
    ]


def random_record_set(rng: random.Random) -> bytes:
    """A valid record set of a few small batches of all kinds."""
    data, offset = b"", rng.randint(0, 100)
    for _ in range(rng.randint(1, 4)):
        records = random_records(rng, rng.choice([0, 1, 2, 5, 40]), headers=rng.random() < 0.5)
        records = [record._replace(offset=record.offset + offset) for record in records]
        data += encode_batch(
            records,
            base_offset=offset,
            last_offset=offset + len(records) + 2,
            timestamp_type=rng.choice(list(TimestampType)),
            producer_id=rng.choice([-1, 7]),
            transactional=rng.random() < 0.3,
            compression=rng.choice([0, 0, 1, 2, 3, 4]),
        )
        offset += len(records) + 3
    return data
