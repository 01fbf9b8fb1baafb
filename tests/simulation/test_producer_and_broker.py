"""The producer's core and the broker's real code under every fault that the simulated world has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import ProducerCore
from semel.client.producer.identities import IdempotentIdentity
from semel.client.producer.partition_queue import PartitionQueue
from semel.storage.sync import SyncGroup
from tests.simulation.workloads import producer_and_broker

SEEDS = range(20)
FRESH = 5
HUNTED = 60  # seeds, in which each deliberate bug must be found

TRACE = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.workloads import producer_and_broker
logging.disable()
world = producer_and_broker(int(sys.argv[1]), Path(sys.argv[2]))
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""


def test_no_promise_is_broken(tmp_path: Path) -> None:
    faults = 0
    for seed in [*SEEDS, *(random.SystemRandom().randrange(2**32) for _ in range(FRESH))]:
        print(f'make simulate ARGS="--seed {seed}"')
        faults += producer_and_broker(seed, tmp_path / str(seed)).faults
    assert faults > 500


def test_a_seed_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, "7", str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 100
    assert trace("2") == first


# --- deliberate bugs ---


def acknowledge_before_the_disk_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncGroup, "notify", lambda self, log, offset, on_outcome: on_outcome(None))


def stamp_a_batch_in_doubt_anew(patch: pytest.MonkeyPatch) -> None:
    lost = ProducerCore.lost

    def forgetful(core: ProducerCore, sendings: Any, error: Any, now_s: float) -> Any:
        moved = lost(core, sendings, error, now_s)
        for queue, _ in sendings:
            queue.restarting = True
        return moved

    patch.setattr(ProducerCore, "lost", forgetful)


def write_without_sequences(patch: pytest.MonkeyPatch) -> None:
    from semel.client.producer.batches import NO_IDENTITY

    patch.setattr(IdempotentIdentity, "received", lambda self, _: setattr(self, "_identity", NO_IDENTITY))


def take_a_lost_response_for_a_stored_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerCore, "lost", lambda core, sendings, *_: core.written(sendings) or [])


def retry_behind_newer_batches(patch: pytest.MonkeyPatch) -> None:
    refused = PartitionQueue.refused

    def last(queue: PartitionQueue, batch: ProducerBatch, *arguments: Any) -> Any:
        verdict = refused(queue, batch, *arguments)
        if batch in queue.unacked:
            queue.unacked.remove(batch)
            queue.queued.append(batch)
        return verdict

    patch.setattr(PartitionQueue, "refused", last)


def count_sequences_from_0_after_every_batch(patch: pytest.MonkeyPatch) -> None:
    stamp = ProducerBatch.stamp
    patch.setattr(ProducerBatch, "stamp", lambda batch, identity, _, txn: stamp(batch, Identity(*identity), 0, txn))


BUGS = [
    acknowledge_before_the_disk_has_it,
    stamp_a_batch_in_doubt_anew,
    write_without_sequences,
    take_a_lost_response_for_a_stored_batch,
    retry_behind_newer_batches,
    count_sequences_from_0_after_every_batch,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_deliberate_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(HUNTED):
        try:
            producer_and_broker(seed, tmp_path / str(seed))
        except AssertionError as error:
            print(seed, error)
            return
    raise AssertionError(f"not found with {HUNTED} seeds")
