"""Rows to record batches of the right partitions, and bad rows to the dead-letter topic."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pytest

from semel.client.dead_letters import REASON_HEADER, SIZE_HEADER, TOPIC_HEADER
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.columns_decode import decode_record_set
from semel.protocol.columns_encode import ColumnEncoder
from semel.protocol.partitioning import partition_for_key
from semel.spark import encoding
from semel.spark.encoding import BadRowError, Encoder, Routing, Targets
from semel.spark.topics import TopicLimits

TARGETS = Targets({"out": 4, "other": 2, "dead": 1})
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def encode(table: pa.Table, task: int = 0, **changes):
    """{(topic, partition): rows} and the number of dead letters."""
    routing = Routing(
        **{
            "targets": TARGETS,
            "topic": "out",
            "dead_letter": "dead",
            "partitioner": "murmur2",
            "batch_id": 0,
            "timestamp_ms": 1234,
            "max_record_bytes": 1000,
            "batch_bytes": 400_000,
            "compression": 0,
            "allowed": frozenset({"out", "other"}),
            **changes,
        }
    )
    found, dead = defaultdict(list), 0
    for target, count, is_dead, data in Encoder(routing, task).blobs(iter(table.to_batches())):
        decoded = decode_record_set(data, headers=True).table
        assert decoded.num_rows == count
        assert count == 1 or found[TARGETS.place(target)], "the first row of a target leaves by itself"
        found[TARGETS.place(target)] += decoded.to_pylist()
        dead += count * is_dead
    return found, dead


def keyed(rows: int) -> pa.Table:
    keys = [b"k%d" % n for n in range(rows)]
    return pa.table({"key": pa.array(keys), "value": pa.array([b"v%d" % n for n in range(rows)])})


def test_every_row_lands_where_any_kafka_producer_would_put_it_in_order():
    found, dead = encode(keyed(1000))
    assert dead == 0
    assert sum(map(len, found.values())) == 1000
    for (topic, partition), rows in found.items():
        assert topic == "out"
        assert all(partition_for_key(row["key"], 4) == partition for row in rows)
        assert [int(row["value"][1:]) for row in rows] == sorted(int(row["value"][1:]) for row in rows)
        assert {row["timestamp"] for row in rows} == {1234}


def test_rows_without_a_key_go_the_same_way_when_the_task_runs_again():
    table = pa.table({"key": pa.array([None] * 50, pa.binary()), "value": pa.array([b"x"] * 50)})
    once, again, other = encode(table, task=1)[0], encode(table, task=1)[0], encode(table, task=2)[0]
    assert once == again
    assert set(once) != set(other)


def test_topic_and_partition_columns_are_obeyed_and_nulls_mean_the_default():
    table = pa.table(
        {
            "value": pa.array([b"a", b"b", b"c"]),
            "topic": pa.array(["other", None, "out"]),
            "partition": pa.array([1, 3, None], pa.int32()),
        }
    )
    found, _ = encode(table)
    assert [row["value"] for row in found["other", 1]] == [b"a"]
    assert b"b" in [row["value"] for row in found["out", 3]]
    assert sum(len(rows) for (topic, _), rows in found.items() if topic == "out") == 2


def test_rows_that_cannot_be_written_become_dead_letters_that_say_why():
    table = pa.table(
        {
            "value": pa.array([b"good", b"x" * 2000, b"lost", b"far", b"bad"]),
            "topic": pa.array(["out", "out", "nowhere", "out", "out"]),
            "partition": pa.array([0, 0, 0, 99, 0], pa.int32()),
            "headers": pa.array([None, [{"key": "h", "value": b"1"}], None, None, None], HEADERS),
            "bad": pa.array([None, None, None, None, "not JSON"]),
        }
    )
    found, dead = encode(table)
    assert dead == 4
    assert [row["value"] for row in found["out", 0]] == [b"good"]
    assert found["out", 0][0]["headers"] is None
    reasons = {row["value"][:4]: {h["key"]: h["value"] for h in row["headers"]} for row in found["dead", 0]}
    assert reasons[b"xxxx"] == {
        SIZE_HEADER: b"2008",
        REASON_HEADER: b"record larger than max.request.size",
        TOPIC_HEADER: b"out",
    }
    assert reasons[b"lost"] == {REASON_HEADER: b"unknown topic", TOPIC_HEADER: b"nowhere"}
    assert reasons[b"far"] == {REASON_HEADER: b"partition out of range", TOPIC_HEADER: b"out"}
    assert reasons[b"bad"] == {REASON_HEADER: b"not JSON", TOPIC_HEADER: b"out"}


def size_of(row) -> int:
    headers = sum(len(h["key"]) + len(h["value"]) for h in row["headers"] or [])
    return len(row["key"] or b"") + len(row["value"] or b"") + headers


LARGE = 40_000
TOO_LARGE = {
    "value": {"value": b"v" * LARGE},
    "key": {"key": b"k" * LARGE},
    "headers": {"headers": [{"key": "h", "value": b"h" * LARGE}]},
    "reason": {"value": b"v" * (LARGE - 100), "bad": "r" * 2_000},  # as a record it is not too large, as a letter it is
}


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()], ids=str)
@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_row_that_is_too_large_for_a_dead_letter_too_keeps_its_beginning_and_says_its_size(case, kind):
    good = {"key": b"k", "value": b"v", "headers": None, "bad": None}
    kinds = pa.schema([("key", kind), ("value", kind), ("headers", HEADERS), ("bad", pa.string())])
    rows = [good, {**good, **TOO_LARGE[case]}, good]
    found, dead = encode(pa.Table.from_pylist(rows, kinds), max_record_bytes=LARGE)
    assert dead == 1
    (letter,) = found.pop(("dead", 0))
    assert size_of(letter) < LARGE
    headers = {h["key"]: h["value"] for h in letter["headers"]}
    assert int(headers[SIZE_HEADER]) > LARGE - 100
    assert headers[REASON_HEADER] == (b"r" * 2_000 if case == "reason" else b"record larger than max.request.size")
    assert letter["value"].strip(b"v") == letter["key"].strip(b"k") == b""
    assert [(row["key"], row["value"]) for rows in found.values() for row in rows] == [(b"k", b"v")] * 2


def not_utf8(*values: bytes) -> pa.Array:
    """A column of strings as Spark makes them of bytes."""
    offsets = b"".join(sum(map(len, values[:n])).to_bytes(4, "little") for n in range(len(values) + 1))
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    )


def test_keys_and_values_that_are_texts_become_the_same_records_as_bytes_do():
    keys, values = [b"one", b"\xff\xfe"], [b"first", b"\xe9t\xe9"]
    texts, _ = encode(pa.table({"key": not_utf8(*keys), "value": not_utf8(*values)}))
    raw, _ = encode(pa.table({"key": pa.array(keys), "value": pa.array(values)}))
    assert texts == raw
    with pytest.raises(BadRowError, match=r"b'\\xff\\xfe'"):
        encode(
            pa.table({"key": not_utf8(*keys), "value": not_utf8(*values), "topic": ["out", "nowhere"]}),
            dead_letter=None,
        )


def reasons_of(rows: list[dict]) -> list[bytes]:
    return [header["value"] for row in rows for header in row["headers"] if header["key"] == REASON_HEADER]


def test_texts_that_are_not_utf8_stop_no_query_that_has_dead_letters():
    values = pa.array([b"a", b"b"])
    garbage = not_utf8(b"out", b"\xff\xfe")
    found, dead = encode(pa.table({"value": values, "topic": garbage}))
    assert (dead, reasons_of(found["dead", 0])) == (1, [b"unknown topic"])
    marked = not_utf8(b"", b"no JSON: \xff")
    for bad in (marked, marked.cast(pa.large_binary()).cast(pa.large_string(), safe=False)):
        found, dead = encode(pa.table({"value": values, "bad": bad}))
        assert (dead, reasons_of(found["dead", 0])) == (1, ["no JSON: \ufffd".encode()])
    named = pa.StructArray.from_arrays([garbage, values], names=["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2]), named)
    found, dead = encode(pa.table({"value": values, "headers": headers, "bad": [False, True]}))
    assert dead == 1
    assert found["dead", 0][0]["headers"][0] == {"key": "\ufffd\ufffd", "value": b"b"}


@pytest.mark.parametrize("headers", [[None, {"key": "a", "value": b"1"}], [{"key": None, "value": b"1"}]])
def test_a_header_without_a_name_makes_its_row_a_dead_letter(headers):
    table = pa.table({"value": [b"a", b"b", b"c"], "headers": pa.array([None, headers, []], HEADERS)})
    found, dead = encode(table)
    assert (dead, reasons_of(found["dead", 0])) == (1, [b"a header has no name"])
    assert sum(map(len, found.values())) == 3
    with pytest.raises(BadRowError, match="a header has no name"):
        encode(table, dead_letter=None)


def test_headers_count_for_the_size_of_a_record():
    headers = pa.array([None, [], [{"key": "h", "value": b"x" * 2000}], [{"key": "h", "value": None}]], HEADERS)
    with pytest.raises(BadRowError, match=r"^1 rows .*larger than max\.request\.size"):
        encode(pa.table({"value": pa.array([b"v"] * 4), "headers": headers}), dead_letter=None)


def test_rows_without_a_timestamp_get_the_time_of_writing():
    times = pa.array([5_000_000, None], pa.timestamp("us", "UTC"))
    found, _ = encode(pa.table({"value": pa.array([b"a", b"b"]), "timestamp": times}))
    assert {row["value"]: row["timestamp"] for rows in found.values() for row in rows} == {b"a": 5000, b"b": 1234}


def test_without_a_dead_letter_topic_a_bad_row_fails_with_the_row_and_the_remedy():
    table = pa.table({"value": pa.array([b"ok", b"x" * 2000])})
    with pytest.raises(BadRowError, match=r"larger than max\.request\.size.*dead_letter_topic"):
        encode(table, dead_letter=None)


def test_a_boolean_column_marks_bad_rows_too():
    table = pa.table({"value": pa.array([b"a", b"b"]), "bad": pa.array([False, True])})
    found, dead = encode(table)
    assert dead == 1
    assert [row["value"] for row in found["dead", 0]] == [b"b"]


def test_as_many_reasons_as_dead_letters_cost_no_more_than_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step over the column for every distinct reason would be quadratic: 16,000 rows took 22 s."""
    steps, mark = [], Encoder._mark
    monkeypatch.setattr(Encoder, "_mark", lambda *given: steps.append(1) or mark(*given))
    rows = 16_000
    values = pa.array([b"v%d" % n for n in range(rows)])
    one = pa.table({"value": values, "bad": pa.array(["same"] * rows)})
    many = pa.table({"value": values, "bad": pa.array([f"reason {n}" for n in range(rows)])})
    assert encode(one)[1] == rows
    needed, steps[:] = len(steps), []
    found, dead = encode(many)
    assert dead == rows
    assert len(steps) == needed
    for row in found["dead", 0]:
        reasons = {h["key"]: h["value"] for h in row["headers"]}
        assert reasons[REASON_HEADER] == b"reason " + row["value"][1:]


def test_an_empty_reason_marks_nothing_and_an_earlier_reason_stays():
    table = pa.table({"value": pa.array([b"a", b"b", b"x" * 2000]), "bad": pa.array(["", None, "not JSON"])})
    found, dead = encode(table)
    assert dead == 1
    reasons = [h["value"] for h in found["dead", 0][0]["headers"] if h["key"] == REASON_HEADER]
    assert reasons == [b"record larger than max.request.size"]


def test_a_task_without_shuffle_keeps_to_one_partition():
    table = pa.table({"value": pa.array([b"x"] * 100)})
    for task in range(4):
        assert list(encode(table, task=task, partitioner="none", batch_id=3)[0]) == [("out", (task + 3) % 4)]


def test_batches_larger_than_what_is_encoded_at_once_are_cut_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "COLLECT_BYTES", 1000)
    values = [b"%04d" % number * 25 for number in range(101)]
    table = pa.table({"key": [value[:4] for value in values], "value": values})
    (batch,) = table.to_batches()
    parts = list(encoding.in_parts(iter([batch])))
    assert all(900 <= part.nbytes <= 2000 for part in parts)
    assert pa.Table.from_batches(parts) == table
    found, dead = encode(table)
    assert dead == 0
    for (_, partition), rows in found.items():
        assert all(partition == partition_for_key(row["key"], 4) for row in rows)
    assert sorted(row["value"] for rows in found.values() for row in rows) == values


# --- what a topic does not take ---
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def limited(**limits: TopicLimits) -> Targets:
    return Targets({topic.name: topic.partitions for topic in TARGETS.topics}, limits)


def reason_by_value(letters) -> dict[bytes, bytes]:
    return {row["value"][:4]: {h["key"]: h["value"] for h in row["headers"]}[REASON_HEADER] for row in letters}


def test_a_record_without_a_key_for_a_compacted_topic_is_a_dead_letter():
    table = pa.table(
        {
            "key": pa.array([b"k", None, None, None]),
            "value": pa.array([b"good", b"lost", b"free", b"bad"]),
            "topic": pa.array(["out", "out", "other", None]),
        }
    )
    targets = limited(out=TopicLimits(needs_key=True))
    found, dead = encode(table, targets=targets)
    assert dead == 2
    reason = b"a compacted topic takes no record without a key"
    assert reason_by_value(found.pop(("dead", 0))) == {b"lost": reason, b"bad": reason}
    assert sorted(row["value"] for rows in found.values() for row in rows) == [b"free", b"good"]
    with pytest.raises(BadRowError, match="2 rows cannot be written; the first: a compacted topic"):
        encode(table.drop_columns(["topic"]).slice(1, 2), targets=targets, dead_letter=None)
    assert encode(table.drop_columns(["key"]), targets=targets)[1] == 3


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.int64()], ids=str)
def test_a_time_that_the_topic_does_not_take_makes_a_dead_letter_with_the_time_of_writing(kind):
    times = [NOW_MS, NOW_MS + 2 * HOUR_MS, NOW_MS - 2 * HOUR_MS, None, NOW_MS - HOUR_MS]
    stamps = pa.array(times, pa.int64())
    if kind != pa.int64():
        stamps = stamps.cast(pa.timestamp("ms")).cast(kind)
    table = pa.table({"value": pa.array([b"good", b"soon", b"late", b"none", b"edge"]), "timestamp": stamps})
    in_bounds = TopicLimits(before_ms=HOUR_MS, after_ms=HOUR_MS)
    found, dead = encode(table, targets=limited(out=in_bounds, dead=in_bounds), timestamp_ms=NOW_MS)
    assert dead == 2
    letters = found.pop(("dead", 0))
    assert reason_by_value(letters) == {
        b"soon": b"timestamp %d (ms) is further from now than the topic allows" % times[1],
        b"late": b"timestamp %d (ms) is further from now than the topic allows" % times[2],
    }
    assert {row["timestamp"] for row in letters} == {NOW_MS}
    written = {row["value"]: row["timestamp"] for rows in found.values() for row in rows}
    assert written == {b"good": NOW_MS, b"none": NOW_MS, b"edge": NOW_MS - HOUR_MS}


def test_a_time_that_only_the_other_topic_does_not_take_stays_in_the_dead_letter():
    table = pa.table({"value": pa.array([b"late"]), "timestamp": pa.array([NOW_MS - 2 * HOUR_MS])})
    found, _ = encode(table, targets=limited(out=TopicLimits(before_ms=HOUR_MS)), timestamp_ms=NOW_MS)
    assert found["dead", 0][0]["timestamp"] == NOW_MS - 2 * HOUR_MS


def test_a_record_larger_than_its_topic_takes_is_a_dead_letter_of_the_size_that_its_topic_takes():
    table = pa.table({"value": pa.array([b"v" * 900, b"v" * 100]), "topic": pa.array(["out", "out"])})
    targets = limited(out=TopicLimits(max_batch_bytes=800), dead=TopicLimits(max_batch_bytes=900))
    found, dead = encode(table, targets=targets)
    assert dead == 1
    (letter,) = found["dead", 0]
    assert size_of(letter) + HEADER_SIZE < 900
    assert reason_by_value([letter]) == {b"vvvv": b"record larger than max.message.bytes of the topic"}
    assert encode(table, targets=targets, compression=2)[1] == 0  # the broker measures what was compressed
    assert encode(table, targets=limited(other=TopicLimits(max_batch_bytes=800)))[1] == 0


@pytest.mark.parametrize("headers", [0, 1, 70])
@pytest.mark.parametrize("key", [None, b"", b"k" * 70])
def test_a_record_is_measured_as_the_batch_that_opens_a_partition_with_it(key, headers):
    """A few bytes more than its topic takes, and the batch would be refused at every attempt; fewer are no reason."""
    limit, now_ms = 9_000, 1_800_000_000_000
    lengths = range(8_000, 8_960)
    table = pa.table(
        {
            "key": pa.array([key] * len(lengths), pa.binary()),
            "value": pa.array([b"v" * length for length in lengths]),
            "headers": pa.array([[{"key": "h", "value": None}] * headers] * len(lengths), HEADERS),
        }
    )
    encoder = ColumnEncoder(table["value"], table["key"], table["headers"], now_ms)
    batches = encoder.encode_groups(None, [1] * len(lengths), [0] * len(lengths), base_timestamp=(1 << 20) + 1)
    sizes = {length: len(group[0].buffer) for length, group in zip(lengths, batches, strict=True)}
    targets = limited(out=TopicLimits(max_batch_bytes=limit))
    found, _ = encode(table, targets=targets, max_record_bytes=100_000, timestamp_ms=now_ms, batch_bytes=1)
    written = {len(row["value"]) for place, rows in found.items() if place[0] == "out" for row in rows}
    assert {sizes[length] for length in written} == {size for size in sizes.values() if size < limit}
    assert limit in sizes.values()


def test_a_dead_letter_with_a_long_reason_is_of_the_size_that_its_topic_takes():
    table = pa.table({"value": pa.array([b"v" * 900]), "bad": pa.array(["\N{EURO SIGN}" * 3_000])})
    found, _ = encode(table, targets=limited(dead=TopicLimits(max_batch_bytes=3_000)), max_record_bytes=100_000)
    (letter,) = found["dead", 0]
    assert size_of(letter) + HEADER_SIZE + 50 < 3_000
    assert letter["value"] == b"v" * 900


def test_limits_are_read_from_the_settings_of_a_topic_whatever_kafka_calls_them():
    assert TopicLimits.of({"cleanup.policy": "compact,delete"}).needs_key
    both = {"message.timestamp.before.max.ms": str(2**63 - 1), "message.timestamp.after.max.ms": "5"}
    assert TopicLimits.of(both) == TopicLimits(after_ms=5)
    assert TopicLimits.of({**both, "message.timestamp.type": "LogAppendTime"}) == TopicLimits()
    assert TopicLimits.of({"message.timestamp.difference.max.ms": "7"}) == TopicLimits(before_ms=7, after_ms=7)
    assert TopicLimits.of({"cleanup.policy": "delete", "max.message.bytes": "9"}) == TopicLimits(max_batch_bytes=9)
    found = [TopicLimits.of({"compression.type": name}).compression for name in ("producer", "uncompressed", "lz4")]
    assert found == [None, "none", "lz4"]
