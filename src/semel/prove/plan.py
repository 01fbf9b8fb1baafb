"""From a seed to a schedule. Pure: the same arguments give the same value."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from semel.prove.decks import FIRST_GENERATION_APIS, deal, network_cards
from semel.prove.schedule import Scene, Schedule
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
