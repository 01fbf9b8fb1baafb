"""Which faults there are for a workload: decks of cards that a seed shuffles.

A deck holds every boundary of the protocol that the workload passes, so that a campaign which deals a whole deck hits
each of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from semel.prove.schedule import BROKER, NETWORK, Fault, Round

# --- boundaries, by name ---

COMMIT_POINTS = (  # in the broker, on the way of a transaction from its first partition to its last marker
    "init.before_log",
    "init.after_log",
    "add.before_log",
    "add.after_log",
    "prepare_commit.before_log",
    "prepare_commit.after_log",
    "marker.before",
    "marker.after",
    "markers.durable",
    "complete_commit.before_log",
    "complete_commit.after_log",
    "recovery.before_markers",
)
ABORT_POINTS = (
    "prepare_abort.before_log",
    "prepare_abort.after_log",
    "complete_abort.before_log",
    "complete_abort.after_log",
)
TRANSACTION_APIS = ("InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn")
FIRST_GENERATION_APIS = ("AddPartitionsToTxn", "AddOffsetsToTxn")  # TV2 does without
PLAIN_APIS = ("Produce", "OffsetCommit")
GROUP_APIS = ("FindCoordinator", "JoinGroup", "SyncGroup", "OffsetFetch", "Heartbeat")
READ_APIS = ("Metadata", "Fetch")
SINK_POINTS = (
    "sink.before_begin",
    "sink.after_begin",
    "sink.after_write",
    "sink.after_audit",
    "sink.after_ledger",
    "sink.after_offsets",
    "sink.after_commit",
)
TASK_POINTS = ("task.after_opening", "task.after_rows")

REPEATABLE = frozenset({*TRANSACTION_APIS, *FIRST_GENERATION_APIS, "OffsetCommit"})  # a client may send these twice

FREEZE_MS = 800  # of the broker: clients notice, and wait
LONG_FREEZE_MS = 2_500  # of a process: longer than its session lasts
DELAY_MS = 700
FULL_DISK_MS = 1_200


def boundaries(guarantee: str, *, broker: bool, sink: bool) -> set[str]:
    """Everything on the way of a commit that a campaign can hit by name."""
    if guarantee != "exactly_once":
        return {f"{api}.{side}" for api in PLAIN_APIS for side in ("request", "response")}
    named = {f"{api}.{side}" for api in TRANSACTION_APIS for side in ("request", "response")}
    named |= {*COMMIT_POINTS, *ABORT_POINTS, "EndTxn.before_response", "EndTxn.after_response"} if broker else set()
    return named | ({*SINK_POINTS, *TASK_POINTS} if sink else set())


# --- cards ---


def broker_cards(points: tuple[str, ...]) -> Iterator[Fault]:
    """Death, power cut and freeze of the broker at each point, and things that happen at any time."""
    for point in points:
        yield Fault("kill", BROKER, point)
        yield Fault("power_cut", BROKER, point)
        yield Fault("stop", BROKER, point, for_ms=FREEZE_MS)
    for what in ("kill", "power_cut", "restart"):
        yield Fault(what, BROKER)
    yield Fault("stop", BROKER, for_ms=FREEZE_MS)
    yield Fault("disk_full", BROKER, for_ms=FULL_DISK_MS)
    for step_ms in (90_000, -90_000, 2_000, -2_000):
        yield Fault("clock", BROKER, step_ms=step_ms)


def network_cards(apis: tuple[str, ...], client: str) -> Iterator[Fault]:
    """Everything that can happen to a frame of a client."""
    for api in apis:
        for what in ("drop_request", "drop_response", "truncate_request", "truncate_response", "duplicate_response"):
            yield Fault(what, NETWORK, api=api, client=client)
        for what in ("delay_request", "delay_response"):
            yield Fault(what, NETWORK, api=api, for_ms=DELAY_MS, client=client)
        yield Fault("silence_response", NETWORK, api=api, client=client)
        if api in REPEATABLE:
            yield Fault("duplicate_request", NETWORK, api=api, client=client)


def process_cards(target: str, apis: tuple[str, ...]) -> Iterator[Fault]:
    """A process that is killed at each side of its requests, and killed, restarted and frozen at any time."""
    for api in apis:
        for side in ("request", "response"):
            yield Fault("kill", target, api=api, side=side)
        yield Fault("restart", target, api=api, side="request")
    yield Fault("kill", target)
    yield Fault("restart", target)
    yield Fault("stop", target, for_ms=LONG_FREEZE_MS)


def point_cards(target: str, points: tuple[str, ...]) -> Iterator[Fault]:
    for point in points:
        yield Fault("kill", target, point)


# --- dealing ---


def deal(deck: list[Fault], rng: random.Random, rounds: int, per_round: int, spread_ms: int) -> list[Round]:
    """Deals shuffled decks until there are enough rounds. Moments and counts are drawn here, so the value has them."""
    cards: list[Fault] = []
    dealt = []
    for _ in range(rounds):
        while len(cards) < per_round:
            fresh = list(deck)
            rng.shuffle(fresh)
            cards += fresh
        hand, cards = cards[:per_round], cards[per_round:]
        dealt.append(Round([_placed(fault, rng, spread_ms) for fault in hand]))
    return dealt


def _placed(fault: Fault, rng: random.Random, spread_ms: int) -> Fault:
    seed = rng.choice((0, rng.randrange(1, 1 << 30))) if fault.what == "power_cut" else 0
    nth = rng.choice((1, 1, 2, 3)) if fault.api in ("Produce", "Fetch", "EndTxn", "TxnOffsetCommit") else 1
    return msgspec.structs.replace(fault, nth=nth, at_ms=rng.randrange(spread_ms), seed=seed)
