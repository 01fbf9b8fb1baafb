"""Which records a micro-batch covers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.spark.offsets import IDS, INITIAL, START, Range, from_json, limited, parse, ranges, split, start_of, to_json

offsets = st.dictionaries(
    st.sampled_from(["a", "b"]), st.dictionaries(st.integers(0, 3), st.integers(0, 1000), min_size=1), min_size=1
)


def total(start, end):
    return sum(r.size for r in ranges(start, end))


@given(offsets, st.integers(1, 500))
def test_a_limit_is_kept_but_for_one_record_per_partition_and_no_partition_starves(latest, limit):
    end = limited({}, latest, limit)
    waiting = list(ranges({}, latest))
    assert total({}, end) <= max(limit, 0) + len(waiting)
    assert {(r.topic, r.partition) for r in ranges({}, end)} == {(r.topic, r.partition) for r in waiting}


@given(offsets, st.integers(1, 500))
def test_repeated_batches_cover_everything_without_gap_or_overlap(latest, limit):
    start, seen = {}, 0
    while total(start, latest):
        end = limited(start, latest, limit)
        seen += total(start, end)
        start = end
    assert seen == total({}, latest)


@given(offsets, st.integers(1, 20), st.none() | st.integers(1, 100))
def test_cutting_ranges_keeps_every_offset_once(end, min_partitions, max_records):
    whole = list(ranges({}, end))
    pieces = split(whole, min_partitions, max_records)
    assert sum(piece.size for piece in pieces) == sum(r.size for r in whole)
    assert all(piece.size > 0 for piece in pieces)
    if max_records:
        assert all(piece.size <= max_records + 1 for piece in pieces)
    joined = {}
    for piece in pieces:
        assert joined.get((piece.topic, piece.partition), piece.start) == piece.start
        joined[piece.topic, piece.partition] = piece.end


def test_one_task_reads_one_partition_unless_told_otherwise():
    whole = [Range("a", 0, 0, 10), Range("a", 1, 5, 7)]
    assert split(whole, None, None) == whole


@given(offsets)
def test_offsets_survive_the_checkpoint(value):
    assert from_json(to_json(value)) == value


def test_the_first_end_carries_the_start_and_later_ones_do_not():
    end = {"t": {"0": 9}, START: {"t": {"0": 4}}}
    assert start_of(end, {"t": {"0": 7}, INITIAL: True}).offsets == {"t": {0: 4}}
    assert start_of({"t": {"0": 12}}, end).offsets == {"t": {0: 9}}
    assert start_of(end, end).offsets == {"t": {0: 9}}  # as Spark does at a restart: nothing is read again


def test_a_topic_created_anew_starts_at_0_and_the_others_go_on():
    start = {"t": {"0": 9}, "u": {"0": 5}, IDS: {"t": "A", "u": "C"}}
    end = {"t": {"0": 3, "1": 4}, "u": {"0": 6}, IDS: {"t": "B", "u": "C"}}
    assert start_of(end, start) == ({"t": {0: 0, 1: 0}, "u": {0: 5}}, {"t": "B", "u": "C"})
    assert start_of(end, {"t": {"0": 9}, "u": {"0": 5}}).offsets == {"t": {0: 9}, "u": {0: 5}}  # ids unknown


def test_lines_of_other_sources_are_not_taken_for_offsets():
    assert parse('{"t":{"0":1}}') == {"t": {0: 1}}
    for line in ("17", '{"logOffset": 3}', '{"a": {"x": 1}}', "nonsense", "[1]"):
        assert parse(line) is None
