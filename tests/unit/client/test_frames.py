"""Bytes to frames, and the memory of large ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from semel.client.frames import CHUNK_BYTES, HUGE_PAGE_BYTES, FramePool, Frames

SIZES = [CHUNK_BYTES + 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES + 1, 5 * HUGE_PAGE_BYTES]


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.mark.parametrize("size", SIZES)
def test_memory_that_somebody_looks_at_is_not_given_out_again(size: int) -> None:
    pool = FramePool()
    held = [pool.take(size) for _ in range(2 * FramePool.KEPT)]
    for number, memory in enumerate(held):
        memory[:] = bytes([number]) * size
    parts = [memory[size // 2 :] for memory in held]
    del held, memory
    pool.take(size)[:] = b"\xff" * size
    assert [part[0] for part in parts] == list(range(2 * FramePool.KEPT)), "a part of a frame keeps all of it"


@pytest.mark.parametrize("size", SIZES)
def test_memory_that_nobody_looks_at_is_used_again(size: int) -> None:
    pool = FramePool()
    first = address_of(pool.take(size))
    assert {address_of(pool.take(size - number)) for number in range(5)} == {first}


def test_pool_keeps_only_a_few_buffers() -> None:
    pool = FramePool()
    frames = [pool.take(size) for size in range(100, 1000, 100)]
    assert len(frames) == 9
    assert len(pool._buffers) == FramePool.KEPT


@pytest.mark.parametrize("seed", range(5))
def test_frames_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([4, 100, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000]) for _ in range(12)]
    sent = [rng.randbytes(size) for size in sizes]
    stream = memoryview(b"".join(len(frame).to_bytes(4, "big") + frame for frame in sent))
    frames, got = Frames(), []
    while len(stream):
        space = frames.space()
        count = min(len(space), len(stream), rng.choice([1, 3, 5000, CHUNK_BYTES, 10_000_000]))
        space[:count] = stream[:count]
        stream = stream[count:]
        for frame in frames.filled(count):
            got.append(bytes(frame))
            assert frames.last_bytes == len(frame)
    assert got == sent
