"""Damaged batches, random bytes: both codecs agree and raise nothing but decode errors. A failure prints its seed."""

from __future__ import annotations

import random
import time

import pytest

from semel.protocol import record_sets
from semel.protocol.batch import iter_headers, seal_crc
from semel.protocol.errors import DecodeError
from tests.unit.protocol.records.samples import decode_both, random_record_set

LIMIT_BYTES = 8 * 1024 * 1024


def damage(rng: random.Random, data: bytearray) -> bytearray:
    """Changes, cuts, repeats or swaps some bytes."""
    for _ in range(rng.randint(1, 5)):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] = rng.choice([0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF])
            case 2:
                data[at] ^= 1 << rng.randrange(8)
            case 3:
                del data[at : at + rng.randint(1, 8)]
            case 4:
                data[at:at] = rng.choice([b"\xff" * 10, b"\x80" * 5, data[at : at + 20], rng.randbytes(3)])
            case 5:
                data[at : at + 4] = rng.choice([b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", bytes(4)])
    return data


def with_right_crcs(data: bytearray) -> bytes:
    """So that what is behind the checksum is reached. Lengths are made right first, where the batch is the last one."""
    try:
        for at, _ in iter_headers(data):
            seal_crc(data, at)
    except DecodeError:
        pass
    return bytes(data)


def with_right_length(data: bytearray) -> bytearray:
    data[8:12] = max(len(data) - 12, 0).to_bytes(4, "big")
    return data


def attempt(seed: int) -> str:
    rng = random.Random(seed)
    data = bytearray(random_record_set(rng))
    style = rng.randrange(4)
    if style == 0:
        data = damage(rng, data)
    elif style == 1:
        data = bytearray(with_right_crcs(damage(rng, data)))
    elif style == 2:
        ((_, header),) = list(iter_headers(data))[:1]
        data = with_right_length(damage(rng, data[: header.size]))
        if rng.random() < 0.2 and len(data) > 22:
            data[22] = rng.randrange(256)  # attributes: compression, timestamp type, control
        data = bytearray(with_right_crcs(data))
    else:
        data = bytearray(rng.randbytes(rng.randint(0, 300)))
        if len(data) > 17:
            data[16] = 2
            data = bytearray(with_right_crcs(with_right_length(data)))
    aborted = rng.choice([None, [], [(7, 0)]])
    result = decode_both(bytes(data), start_offset=rng.choice([0, 30]), aborted=aborted, limit_bytes=LIMIT_BYTES)
    return "read" if isinstance(result, record_sets.RowSet) else type(result).__name__


def campaign(first_seed: int, seconds: float) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    seed, deadline = first_seed, time.monotonic() + seconds
    while time.monotonic() < deadline or seed < first_seed + 500:
        try:
            outcome = attempt(seed)
        except BaseException:
            print(f"\nattempt({seed}) failed")
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        seed += 1
    return outcomes


def test_fuzzed_record_sets_are_judged_alike() -> None:
    outcomes = campaign(first_seed=0, seconds=4)
    assert outcomes["CorruptBatchError"] > 100  # the damage got through
    assert outcomes["read"] > 20  # and did not always matter


@pytest.mark.full
@pytest.mark.timeout(900)
def test_fuzzed_record_sets_are_judged_alike_for_long() -> None:
    outcomes = campaign(first_seed=random.SystemRandom().randrange(10**12), seconds=300)
    assert outcomes["CorruptBatchError"] > 10_000
    assert outcomes["UnsupportedCompressionError"] > 10
