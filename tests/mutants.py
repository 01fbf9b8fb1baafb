"""Deliberate bugs, to show that tests and `semel prove` would find them.

A mutant never makes a program do more than it should, only less: it leaves out one precaution. `install` replaces a
function of semel in this process; a process gets it through `semel.prove.injection.Patch`. None of this is in the
wheel: `semel prove --mutant NAME` works in a checkout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from semel.prove.command import FIRST_GENERATION
from semel.prove.schedule import BROKER, Fault, Round, Schedule, WorkloadPlan


def install(name: str) -> None:
    """Switches a deliberate bug on, in this process and until its end."""
    MUTANTS[name]()


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more: the mutant would do nothing"
    setattr(owner, name, new)


def respond_before_fsync() -> None:
    """the broker acknowledges an append before it is on the disk"""
    from semel.storage.sync import SyncGroup

    _replace(SyncGroup, "notify", lambda self, log, offset, on_outcome: on_outcome(None))


def respond_before_log() -> None:
    """the transaction coordinator responds before its record in the internal topic is durable"""
    from semel.storage.sync import SyncGroup

    notify = SyncGroup.notify

    def early(self: SyncGroup, log: Any, offset: int, on_outcome: Callable[[Any], None]) -> None:
        if log.topic == "__transaction_state":
            on_outcome(None)
        else:
            notify(self, log, offset, on_outcome)

    _replace(SyncGroup, "notify", early)


def no_require_stable() -> None:
    """a consumer that takes over does not wait for offsets of transactions that have not ended"""
    from semel.client.group import offset_calls

    request = offset_calls.offset_fetch_request
    _replace(
        offset_calls,
        "offset_fetch_request",
        lambda group_id, partitions, require_stable, *rest: request(group_id, partitions, False, *rest),
    )


def init_without_expected_epoch() -> None:
    """a transaction's owner renews its epoch without saying which one it has"""
    from semel.client.producer.handle import TransactionOwner

    def renew(self: TransactionOwner, timeout_s: float | None = None) -> Any:
        self.identity = self._coordinator.init(self.cluster.deadline(timeout_s).remaining_s(), None)
        self._epoch_used = False
        return self.identity

    _replace(TransactionOwner, "renew", renew)


def no_opening_handshake() -> None:
    """a Spark task writes a partition without checking whether another attempt has it"""
    _without_precaution("handshake")


def no_wait_for_new_leader() -> None:
    """a Spark task that cannot see an opening at a new leader yet takes it for its own"""
    from semel.client.log_reading import fetch_once
    from semel.client.producer.handle import Opening, PartitionWriter

    read_back = PartitionWriter._read_back

    def look_once(self: PartitionWriter, place: Any, offset: int, mark: int, deadline: Any) -> Opening:
        if len(fetch_once(self.cluster, place, offset, deadline, max_bytes=1)):
            return read_back(self, place, offset, mark, deadline)
        return Opening(True, offset, mark)

    _replace(PartitionWriter, "_read_back", look_once)


def no_count_audit() -> None:
    """the Spark sink commits without comparing what tasks reported with what the log holds"""
    _without_precaution("count_audit")


def _without_precaution(name: str) -> None:
    from semel.spark.sink_options import Precautions

    defaults = {**Precautions._field_defaults, name: False}
    Precautions.__new__.__defaults__ = tuple(defaults[field] for field in Precautions._fields)  # type: ignore[attr-defined]


def ledger_by_batch_id() -> None:
    """the Spark sink decides by the batch's number alone whether it was written"""
    from semel.spark import ledger

    def decide(last: Any, batch: Any) -> Any:
        verdict = ledger.Verdict.WRITE if batch.batch_id > last.batch_id else ledger.Verdict.ALREADY_WRITTEN
        return ledger.LedgerDecision(verdict)

    _replace(ledger, "_same_query", decide)
    _replace(ledger, "_other_query", decide)


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        respond_before_fsync,
        respond_before_log,
        no_require_stable,
        init_without_expected_epoch,
        no_opening_handshake,
        no_wait_for_new_leader,
        no_count_audit,
        ledger_by_batch_id,
    )
}


# --- how `semel prove` looks for them ---


class Hunt(NamedTuple):
    """How a deliberate bug is looked for: the workload that has it, and the faults that bring it out."""

    workload: str
    faults: Callable[[random.Random], list[Fault]]
    options: Mapping[str, str] = MappingProxyType({})
    transactions: int = 12  # fed in during a round
    settings: Sequence[str] = ()  # of the broker


def _power_cuts(*points: str) -> Callable[[random.Random], list[Fault]]:
    """At answers that say that something is safe: nothing that was not synced survives."""

    def faults(rng: random.Random) -> list[Fault]:
        chosen = rng.sample(points, min(2, len(points)))
        return [Fault("power_cut", BROKER, point, nth=rng.randint(1, 8), at_ms=rng.randrange(800)) for point in chosen]

    return faults


def _unsettled_offsets(rng: random.Random) -> list[Fault]:
    """Members leave right after a commit whose markers are late, so that others take over before it is settled."""
    return [
        Fault("restart", worker, "marker.before", "EndTxn", "request", rng.randint(2, 4), at_ms, for_ms=2_500)
        for worker, at_ms in (("worker-a", 300), ("worker-b", 1_500))
    ]


def _waking_drivers(rng: random.Random) -> list[Fault]:
    """Not at a driver's first batch, for which it has an epoch already: at a later one, before it asks for the next."""
    return [Fault("takeover", "driver", "sink.before_begin", nth=rng.randint(2, 3), at_ms=rng.randrange(500))]


def _dying_tasks(rng: random.Random) -> list[Fault]:
    """In the middle of the rows of a partition."""
    return [
        Fault("kill", "task", api="Produce", side="response", nth=rng.randint(2, 6), at_ms=300 * n) for n in range(3)
    ]


def _tasks_without_report(rng: random.Random) -> list[Fault]:
    """All rows are written, and no error is raised."""
    return [Fault("kill", "task", "task.after_rows", at_ms=300 + rng.randrange(1_000))]


def _lost_checkpoints(rng: random.Random) -> list[Fault]:
    return [Fault("checkpoint_lost", "driver", at_ms=500 + rng.randrange(2_000))]


HUNTS: dict[str, Hunt] = {
    "respond_before_fsync": Hunt("loop", _power_cuts("Produce.after_response", "EndTxn.after_response")),
    "respond_before_log": Hunt("loop", _power_cuts("EndTxn.after_response"), {"commit_ms": "600"}),
    "no_require_stable": Hunt("loop", _unsettled_offsets, {"static": "no"}),
    # Under TV2 a committed transaction brings the next epoch with it; under TV1 every batch asks for one.
    "init_without_expected_epoch": Hunt("spark", _waking_drivers, settings=(FIRST_GENERATION,)),
    "no_opening_handshake": Hunt("spark-any-order", _dying_tasks, {"topics": "1", "batch_bytes": "250"}),
    "no_count_audit": Hunt("spark-any-order", _tasks_without_report, {"per_batch": "4"}, transactions=2),
    "ledger_by_batch_id": Hunt("spark", _lost_checkpoints, {"stuck_after_s": "45"}),  # it also comes to a halt
}


# Found by a test that has the fault come at its moment, not by a campaign.
AIMED = {"no_wait_for_new_leader": "tests/guarantees/test_e8_leaders_and_coordinators_may_move.py"}


def plan_hunt(seed: int, mutant: str, rounds: int) -> Schedule:
    """Rounds that look for one deliberate bug."""
    hunt = HUNTS[mutant]
    rng = random.Random(f"{seed}-{mutant}")
    drawn = [Round(hunt.faults(rng), hunt.transactions) for _ in range(rounds)]
    return Schedule(
        seed, [WorkloadPlan(hunt.workload, "exactly_once", drawn, dict(hunt.options))], mutant, list(hunt.settings)
    )
