"""A range fetches, checks and decodes little more than it needs."""

from __future__ import annotations

from semel.protocol.batch import patch_offset
from semel.protocol.rows import Record, encode_batch
from semel.spark.reading import KEPT_TOPICS, LEAST_BYTES, TopicSizes, needed

PER_BATCH = 10


def log(batches: int, value_bytes: int = 10) -> list[bytearray]:
    made = []
    for number in range(batches):
        batch = bytearray(encode_batch([Record(i, 0, None, bytes(value_bytes)) for i in range(PER_BATCH)]))
        patch_offset(batch, number * PER_BATCH, 0)
        made.append(batch)
    return made


def test_batches_behind_the_end_of_a_range_are_left_out() -> None:
    batches = log(4)
    found = needed(memoryview(b"".join(batches)), offset=3, end=15)
    assert bytes(found.records) == b"".join(batches[:2])
    assert found.next_offset == 20  # the second batch reaches beyond the end


def test_a_range_that_ends_with_a_batch_does_not_take_the_next_one() -> None:
    batches = log(2)
    assert needed(memoryview(b"".join(batches)), 0, PER_BATCH).next_offset == PER_BATCH


def test_half_a_batch_brings_nothing() -> None:
    found = needed(memoryview(bytes(log(1)[0])[:-1]), offset=0, end=PER_BATCH)
    assert (bytes(found.records), found.next_offset, found.largest_batch_bytes) == (b"", 0, 0)


def test_who_knows_the_records_asks_for_what_the_range_takes_and_a_batch_to_spare() -> None:
    sizes, most = TopicSizes(), 4 << 20
    assert sizes.bytes_for("t", 1, most) == most
    batches = log(4, value_bytes=50_000)
    sizes.note("t", needed(memoryview(b"".join(batches)), 0, 40))
    one = len(batches[0])
    assert sizes.bytes_for("t", 20, most) == 3 * one
    assert sizes.bytes_for("t", 10_000, most) == most
    assert sizes.bytes_for("other", 20, most) == most


def test_a_range_that_begins_late_in_a_batch_does_not_make_records_look_large() -> None:
    sizes, batches = TopicSizes(), log(1, value_bytes=50_000)
    sizes.note("t", needed(memoryview(batches[0]), PER_BATCH - 1, PER_BATCH))
    assert sizes.bytes_for("t", PER_BATCH, 4 << 20) == 2 * len(batches[0])


def test_small_records_are_not_fetched_one_by_one() -> None:
    sizes = TopicSizes()
    sizes.note("t", needed(memoryview(b"".join(log(4))), 0, 40))
    assert sizes.bytes_for("t", 1, 4 << 20) == LEAST_BYTES


def test_the_memory_is_bounded() -> None:
    sizes, found = TopicSizes(), needed(memoryview(log(1)[0]), 0, 10)
    for number in range(3 * KEPT_TOPICS):
        sizes.note(f"t{number}", found)
    assert len(sizes._of) == KEPT_TOPICS
