"""Bytes to frames, and the memory of large ones."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
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


HOLDERS: dict[str, Callable[[memoryview], object]] = {
    "view": lambda frame: frame,
    "part of a view": lambda frame: frame[5:10],
    "what the view is of": lambda frame: frame.obj,
    "array": lambda frame: np.frombuffer(frame, np.uint8),
    "part of an array": lambda frame: np.frombuffer(frame, np.uint8)[3:][2:10],
    "array over what the view is of": lambda frame: np.frombuffer(frame.obj, np.uint8)[5:10],  # type: ignore[call-overload]
    "Arrow buffer": lambda frame: pa.py_buffer(frame).slice(5, 5),
    "Arrow array": lambda frame: pa.Array.from_buffers(pa.uint8(), len(frame), [None, pa.py_buffer(frame)])[5:10],
    "iterator": lambda frame: iter(frame[5:10]),
}


@pytest.mark.parametrize("size", [SIZES[0], SIZES[2]], ids=["bytearray", "mmap"])
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_one_reference_of_any_kind_keeps_a_frame(holder: Callable[[memoryview], object], size: int) -> None:
    """One is the number that a reference count gets wrong first: Python 3.14 counts no reference for an argument."""
    pool = FramePool()
    frame = pool.take(size)
    frame[:] = b"\x07" * size
    held, address = holder(frame), address_of(frame)
    del frame
    other = pool.take(size)
    assert address_of(other) != address
    other[:] = b"\xff" * size
    values = held.to_pylist() if isinstance(held, pa.Array) else list(held)  # type: ignore[call-overload]
    assert set(values) == {7}
    del held, other, values
    gc.collect()
    assert address_of(pool.take(size)) == address, "the first that became free"


def test_garbage_that_is_finalized_still_has_its_frame() -> None:
    """The collector runs the callbacks of weak references before finalizers: memory that is returned by one may come
    too early. Here the finalizer itself has the next frame filled."""
    seen = []

    class Holder:
        def __init__(self, pool: FramePool) -> None:
            self.pool, self.frame, self.cycle = pool, pool.take(SIZES[0]), self
            self.frame[:] = b"\x07" * SIZES[0]

        def __del__(self) -> None:
            self.pool.take(SIZES[0])[:] = b"\xff" * SIZES[0]
            seen.append(set(self.frame))

    Holder(FramePool())
    gc.collect()
    assert seen == [{7}]


def test_frames_that_other_threads_drop_are_never_shared() -> None:
    """A reader gives frames to threads, each of which looks twice at what is in its frame and then drops it."""
    pool, mixed, turns = FramePool(), [], 400
    slots = threading.Semaphore(6)
    addresses = set()

    def look(frame: memoryview, number: int) -> None:
        for _ in range(3):
            array = np.frombuffer(frame, np.uint8)
            if int(array.min()) != number or int(array.max()) != number:
                mixed.append(number)
        del frame, array
        slots.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for number in range(turns):
                slots.acquire()
                frame = pool.take(SIZES[0])
                addresses.add(address_of(frame))
                frame[:] = bytes([number % 256]) * len(frame)
                threads.submit(look, frame, number % 256)
    finally:
        sys.setswitchinterval(interval)
    assert not mixed
    assert len(addresses) < turns / 2, "nothing was used again, so nothing was tested"


@pytest.mark.parametrize("size", SIZES)
def test_memory_that_nobody_looks_at_is_used_again(size: int) -> None:
    pool = FramePool()
    first = address_of(pool.take(size))
    assert {address_of(pool.take(size - number)) for number in range(5)} == {first}


def test_pool_keeps_only_a_few_buffers() -> None:
    pool = FramePool()
    frames = [pool.take(size) for size in range(100, 1000, 100)]
    assert len(frames) == 9
    del frames
    assert len(pool._free) == FramePool.KEPT


def test_fresh_memory_takes_the_place_of_what_became_too_small() -> None:
    pool = FramePool()
    for size in range(100, 1000, 100):
        pool.take(size)
    assert len(pool._free) == 1


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
