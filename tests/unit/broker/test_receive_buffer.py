"""Frames come out whole and in order however the bytes arrive, and memory follows the bytes, not the claims."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.broker.receive_buffer import (
    LARGE_BYTES,
    OWN_FROM_BYTES,
    SMALL_BYTES,
    FrameSizeError,
    ReceiveBuffer,
    SharedBuffer,
)


def framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def feed(buffer: ReceiveBuffer, data: bytes, step: int) -> list[bytes]:
    frames = []
    while data:
        shared = buffer.writable()
        assert len(shared) > 0
        count = min(step, len(shared), len(data))
        shared[:count] = data[:count]
        data = data[count:]
        buffer.add(count)
        while (frame := buffer.next_frame()) is not None:
            frames.append(bytes(frame))
    return frames


@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 50),
            st.integers(OWN_FROM_BYTES - 20, OWN_FROM_BYTES + 20),
            st.integers(LARGE_BYTES - 20, LARGE_BYTES + 20),
            st.integers(0, 3 * LARGE_BYTES),
        ),
        max_size=8,
    ),
    step=st.integers(1, 2 * LARGE_BYTES),
)
def test_frames_come_out_whole_and_in_order(sizes: list[int], step: int) -> None:
    step = max(step, sum(sizes) // 500)  # a million single bytes would say no more than thousands
    frames = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    buffer = ReceiveBuffer(3 * LARGE_BYTES, SharedBuffer())
    assert feed(buffer, b"".join(map(framed, frames)), step) == frames
    assert buffer.capacity_bytes == 0


@given(
    sizes=st.lists(st.integers(0, LARGE_BYTES), min_size=1, max_size=4),
    step=st.integers(1000, 2 * LARGE_BYTES),
)
def test_connections_that_share_a_buffer_do_not_mix_their_frames(sizes: list[int], step: int) -> None:
    shared = SharedBuffer()
    buffers = [ReceiveBuffer(3 * LARGE_BYTES, shared) for _ in range(3)]
    sent = [[bytes([40 * number + index]) * size for index, size in enumerate(sizes)] for number in range(3)]
    data = [b"".join(map(framed, frames)) for frames in sent]
    taken: list[list[bytes]] = [[], [], []]
    for start in range(0, max(map(len, data)), step):
        for number, buffer in enumerate(buffers):
            taken[number] += feed(buffer, data[number][start : start + step], step)
    assert taken == sent


@pytest.mark.parametrize("size", [-1, 1001, 2**31 - 1, -(2**31)])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(FrameSizeError, match=f"a request of {size} bytes; allowed are 1000"):
        feed(ReceiveBuffer(1000, SharedBuffer()), struct.pack(">i", size), 4)


def test_memory_follows_the_bytes_that_came() -> None:
    buffer = ReceiveBuffer(1 << 30, SharedBuffer())
    feed(buffer, struct.pack(">i", 1 << 30) + bytes(1000), 500)
    assert buffer.capacity_bytes == SMALL_BYTES
    feed(buffer, bytes(10 * LARGE_BYTES), LARGE_BYTES)
    assert buffer.capacity_bytes <= 4 * 11 * LARGE_BYTES


def test_an_idle_connection_keeps_no_memory() -> None:
    buffer = ReceiveBuffer(1 << 20, SharedBuffer())
    feed(buffer, b"".join(framed(bytes(1000)) for _ in range(500)), LARGE_BYTES)
    assert buffer.capacity_bytes == 0


def test_the_memory_of_a_large_frame_is_used_again() -> None:
    shared = SharedBuffer()
    first, second = ReceiveBuffer(1 << 20, shared), ReceiveBuffer(1 << 20, shared)
    feed(first, framed(bytes(600_000)), LARGE_BYTES)
    kept = shared.spare
    assert kept is not None
    feed(second, framed(bytes(600_000))[:-1], LARGE_BYTES)
    assert shared.spare is None  # in use
    assert feed(second, b"\0", 1) == [bytes(600_000)]
    assert shared.spare is kept
