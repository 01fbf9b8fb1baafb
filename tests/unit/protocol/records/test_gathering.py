"""Values out of a buffer: both ways of copying, and views, on either side of the size that a view can hold itself."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from semel.protocol import columns_decode
from semel.protocol.vector_varints import VarintReader

LENGTHS = {
    "long": [13, 1000, 14, 13],
    "long, empty and null": [13, 0, -1, 300, 0],
    "short": [1, 12, 5],
    "short and long": [12, 13, 100, 1],
    "short, long, empty and null": [0, -1, 12, 13, -1],
    "empty": [0, 0],
    "empty and null": [0, -1],
    "null": [-1, -1],
    "none": [],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_are_what_lies_at_their_places(lengths: list[int]) -> None:
    rng = random.Random(7)
    held, places, expected = bytearray(), [], []
    for length in lengths:
        held += rng.randbytes(rng.randrange(20))
        places.append(len(held))
        value = rng.randbytes(max(length, 0))
        held += value
        expected.append(value if length >= 0 else None)
    held += bytes(16)
    data, starts, sizes = pa.py_buffer(held), np.array(places, np.int64), np.array(lengths, np.int64)
    copied = columns_decode.gather(data, starts, sizes)
    copied.validate(full=True)
    assert copied.type == pa.binary()
    assert copied.to_pylist() == expected
    viewed = columns_decode.views(VarintReader(np.frombuffer(held, np.uint8)), data, starts, sizes)
    viewed.validate(full=True)
    assert viewed.to_pylist() == expected


def test_long_values_are_not_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking costs a third more: it is for columns with short values."""
    monkeypatch.delattr(columns_decode, "_taken")
    places, sizes = np.array([0, 20]), np.array([20, 13])
    assert columns_decode.gather(pa.py_buffer(bytes(40)), places, sizes).to_pylist() == [bytes(20), bytes(13)]
