"""From a seed to a schedule. Pure: the same arguments give the same value."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from semel.prove.decks import FIRST_GENERATION_APIS, deal, network_cards
from semel.prove.schedule import BROKER, Fault, Round, Scene, Schedule
from semel.prove.workloads import WORKLOADS

ROUNDS_PER_SCENE = 12  # then topics, groups and checkpoints are made anew
FIRST_GENERATION = "transaction.version=1"  # the protocol of Kafka before 4.0


def plan(
    seed: int,
    workloads: list[str],
    guarantee: str,
    rounds: int,
    *,
    own_broker: bool,
    per_round: int | None = None,
    options: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> Schedule:
    """`rounds` of each workload."""
    scenes: list[Scene] = []
    for name in workloads:
        kind = WORKLOADS[name]
        rng = random.Random(f"{seed}-{name}-{guarantee}")
        deck = kind.deck(guarantee, broker=own_broker)
        if FIRST_GENERATION in settings:
            deck += network_cards(FIRST_GENERATION_APIS, "")
        dealt = deal(deck, rng, rounds, per_round or kind.faults_per_round, kind.spread_ms)
        scenes += [
            Scene(name, guarantee, dealt[first : first + ROUNDS_PER_SCENE], dict(options or {}))
            for first in range(0, len(dealt), ROUNDS_PER_SCENE)
        ]
    return Schedule(seed, scenes, settings=list(settings))


# --- mutants ---


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


def _unsettled_heirs(rng: random.Random) -> list[Fault]:
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
    return [Fault("kill", "task", api="Produce", side="answer", nth=rng.randint(2, 6), at_ms=300 * n) for n in range(3)]


def _tasks_without_report(rng: random.Random) -> list[Fault]:
    """All rows are written, nobody was told."""
    return [Fault("kill", "task", "task.after_rows", at_ms=300 + rng.randrange(1_000))]


def _lost_checkpoints(rng: random.Random) -> list[Fault]:
    return [Fault("checkpoint_lost", "driver", at_ms=500 + rng.randrange(2_000))]


HUNTS: dict[str, Hunt] = {
    "answer_before_fsync": Hunt("loop", _power_cuts("Produce.after_answer", "EndTxn.after_answer")),
    "answer_before_journal": Hunt("loop", _power_cuts("EndTxn.after_answer"), {"commit_ms": "600"}),
    "no_require_stable": Hunt("loop", _unsettled_heirs, {"static": "no"}),
    # Under TV2 a committed transaction brings the next epoch with it; under TV1 every batch asks for one.
    "init_without_expected_epoch": Hunt("spark", _waking_drivers, settings=(FIRST_GENERATION,)),
    "no_opening_handshake": Hunt("spark-any-order", _dying_tasks, {"topics": "1", "batch_bytes": "250"}),
    "no_count_audit": Hunt("spark-any-order", _tasks_without_report, {"per_batch": "4"}, transactions=2),
    "ledger_by_batch_id": Hunt("spark", _lost_checkpoints, {"patience_s": "45"}),  # it also comes to a halt
}


def plan_hunt(seed: int, mutant: str, rounds: int) -> Schedule:
    """Rounds that look for one deliberate bug."""
    hunt = HUNTS[mutant]
    rng = random.Random(f"{seed}-{mutant}")
    dealt = [Round(hunt.faults(rng), hunt.transactions) for _ in range(rounds)]
    return Schedule(
        seed, [Scene(hunt.workload, "exactly_once", dealt, dict(hunt.options))], mutant, list(hunt.settings)
    )
