"""Finding records in long batches: the lanes are used, and a wrong guess is noticed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from semel.protocol import record_fields
from semel.protocol.record_fields import Bodies, find_record_starts
from semel.protocol.rows import Record, encode_batch
from semel.protocol.vector_varints import VarintReader
from tests.unit.protocol.records.samples import NOW, random_records


def bodies_of(batches: list[list[Record]]) -> tuple[VarintReader, Bodies, list[int]]:
    """Batches one after the other, and where their records start by the lengths that were written."""
    data, starts, ends, expected = b"", [], [], []
    for records in batches:
        starts.append(len(data) + 61)
        for record in records:
            alone = encode_batch([record], base_offset=records[0].offset, base_timestamp=records[0].timestamp)
            expected.append((len(alone) - 61, starts[-1]))
        data += encode_batch(records)
        ends.append(len(data))
    positions, at, before = [], 0, -1
    for size, batch_start in expected:
        at = batch_start if batch_start != before else at
        before = batch_start
        positions.append(at)
        at += size
    bodies = Bodies(
        np.array(starts),
        np.array(ends),
        np.array([len(records) for records in batches]),
        np.array([records[-1].offset - records[0].offset for records in batches]),
    )
    return VarintReader(np.frombuffer(data, np.uint8)), bodies, positions


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that were walked record by record."""
    walked: list[int] = []
    walk = record_fields._walk

    def count(reader: VarintReader, bodies: Bodies, batch: int) -> np.ndarray:
        walked.append(batch)
        return walk(reader, bodies, batch)

    monkeypatch.setattr(record_fields, "_walk", count)
    return walked


@pytest.mark.parametrize("value_bytes", [0, 10, 100, 700])
def test_long_batches_are_followed_in_lanes(walks: list[int], value_bytes: int) -> None:
    rng = random.Random(value_bytes)
    batches = [random_records(rng, count, value_bytes=value_bytes) for count in (3000, 1, 40, 2000)]
    reader, bodies, expected = bodies_of(batches)
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == []


def test_records_with_headers_and_with_gaps_are_followed_in_lanes(walks: list[int]) -> None:
    records = random_records(random.Random(1), 6000, headers=True)
    reader, bodies, expected = bodies_of([[r._replace(offset=r.offset * 3) for r in records]])
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == []


def test_lengths_of_three_bytes_are_followed_in_lanes(walks: list[int]) -> None:
    records = [Record(i, NOW, None, b"v" * (9000 if i % 50 == 0 else 20)) for i in range(6000)]
    reader, bodies, expected = bodies_of([records])
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == []


def test_a_wrong_guess_is_noticed_and_the_batch_walked(walks: list[int]) -> None:
    """Values that hold records with rising offsets: lanes start inside them."""
    inner = bytes(encode_batch([Record(i, NOW, None, b"v" * 30) for i in range(40)])[61:])
    misleading = [Record(i, NOW, None, inner) for i in range(3000)]
    plain = random_records(random.Random(2), 3000)
    reader, bodies, expected = bodies_of([plain, misleading, plain])
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == [1]


def test_small_sets_are_walked(walks: list[int]) -> None:
    reader, bodies, expected = bodies_of([random_records(random.Random(3), 50) for _ in range(3)])
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == [0, 1, 2]


@pytest.mark.parametrize(("count", "tiny", "value_bytes"), [(6000, 5000, 3000), (20_000, 19_000, 8000)])
def test_lanes_that_would_take_longer_than_a_walk_are_given_up(
    walks: list[int], monkeypatch: pytest.MonkeyPatch, count: int, tiny: int, value_bytes: int
) -> None:
    """Nearly all records of the batch are in one lane."""
    taken: list[np.ndarray] = []
    follow = record_fields._follow

    def followed(*args: object) -> np.ndarray:
        taken.append(follow(*args))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(record_fields, "_follow", followed)
    records = [Record(i, NOW, None, b"v" * (value_bytes if i >= tiny else 0)) for i in range(count)]
    reader, bodies, expected = bodies_of([records])
    assert find_record_starts(reader, bodies).tolist() == expected
    assert walks == [0]
    (steps,) = taken
    slack = 2 * record_fields.STEPS_BETWEEN_LOOKS
    assert len(steps) <= count // record_fields.WALKED_PER_STEP + slack
    assert steps.size <= count * record_fields.MOST_POSITIONS + slack * steps.shape[1]


@pytest.mark.parametrize(
    "value",
    [
        bytes(300),
        b"\x0c\0\0\0" * 75,
        b"\x12\0\x14\0" * 75,
        b"\x80\x02\0" * 100,
        b"\xd2\x0f\0\0" * 60,
        b"\x00\x80\x02\x00\x00\x02\x01" * 40,
    ],
)
def test_values_that_look_like_records_do_not_mislead(value: bytes) -> None:
    records = [Record(i, NOW, None, value[: 200 + i % 100]) for i in range(4000)]
    reader, bodies, expected = bodies_of([records[:2000], records[2000:]])
    assert find_record_starts(reader, bodies).tolist() == expected
