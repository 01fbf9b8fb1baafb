"""What will go wrong, and when: a schedule is a value that is made from a seed, printed, saved and replayed.

Faults come from a list that a seed shuffles, again and again. The list holds every boundary of the protocol that the
workload passes, so that a campaign which gets through the whole list hits each of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

FORMAT = 2
NETWORK = "network"
BROKER = "broker"
NODE = "node"
TRANSACTIONS = 12  # of a round
DATABASE = "database"


class ScheduleError(Exception):
    """A file that is not a schedule, or not one of this version."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that goes wrong.

    what    kill, stop, restart, takeover, power_cut, clock, disk_full, checkpoint_lost, or what happens to a frame:
            drop_request, drop_response, truncate_..., delay_..., duplicate_..., silence_response; on a cluster of
            several nodes also move_leader, cut_off, too_few_replicas, rolling_restart; of a database also
            kill_backend, and cut_before_commit, cut_after_commit: a connection breaks at COMMIT
    target  broker, producer, worker-a, driver, task, ...: a process; `network` for frames; `node` of a cluster;
            `database`
    leads   what the node leads when it happens: output, ledger, offsets, transactions
    point   a named fault point of the broker or the sink where it happens; "" for none. With an API: where the broker
            delays for `for_ms` the request at which the process is hit
    api     an API at whose frames it happens; "" for none
    client  whose frames of the network: a part of the client id; "" for anybody's
    side    request or response, where a process is hit at an API
    nth     the how manyth time
    at_ms   after the start of the round; with a point or an API: from then on
    for_ms  how long it lasts: a freeze, a delay, a full disk
    step_ms of the clock
    seed    of what survives a power cut; 0: nothing that was not synced. On a cluster: which partition is led
    times   how often it happens, one after the other (delays at a point of the broker)
    """

    what: str
    target: str
    point: str = ""
    api: str = ""
    side: str = ""
    nth: int = 1
    at_ms: int = 0
    for_ms: int = 0
    step_ms: int = 0
    seed: int = 0
    times: int = 1
    client: str = ""
    leads: str = ""

    def __str__(self) -> str:
        if self.target == NETWORK:
            whose = f" of {self.client}" if self.client else ""
            where = f"{self.api} {self.what.replace('_', ' ')}{whose}"
        else:
            where = f"{self.what.replace('_', ' ')} {self.target}"
            where += f" that leads {self.leads}" if self.leads else ""
            where += f" at {self.point}" if self.point else ""
            where += f" at {self.api} {self.side}" if self.api else ""
        if self.step_ms:
            return f"{where} {self.step_ms / 1000:+g} s"
        return where + (f" for {self.for_ms / 1000:g} s" if self.for_ms else "")

    @property
    def boundary(self) -> str:
        """The protocol step that it hits, if it hits one."""
        if self.point:
            return self.point
        if self.api:
            side = self.side or ("request" if self.what.endswith("_request") else "response")
            return f"{self.api}.{side}"
        return ""


class Round(msgspec.Struct, frozen=True):
    """Faults that happen while so many transactions are fed in."""

    faults: list[Fault]
    transactions: int = TRANSACTIONS


class WorkloadPlan(msgspec.Struct, frozen=True):
    """Rounds of one workload on topics of their own."""

    workload: str
    guarantee: str
    rounds: list[Round]
    options: dict[str, str] = {}


class Schedule(msgspec.Struct, frozen=True):
    seed: int
    plans: list[WorkloadPlan] = msgspec.field(name="scenes")  # the name in saved schedules of format 2
    mutant: str = ""
    settings: list[str] = []  # NAME=VALUE for a broker of one's own
    nodes: int = 0  # of Apache Kafka; 0: one broker
    format: int = FORMAT

    @property
    def fault_count(self) -> int:
        return sum(len(round_.faults) for planned in self.plans for round_ in planned.rounds)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


_decode_schedule = msgspec.json.Decoder(Schedule).decode


def load_schedule(path: Path) -> Schedule:
    try:
        schedule = _decode_schedule(path.read_bytes())
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ScheduleError(f"{path} is not a schedule that `semel prove` saved: {error}") from error
    if schedule.format != FORMAT:
        raise ScheduleError(f"{path} has format {schedule.format}; this version of semel replays format {FORMAT}")
    return schedule


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

REPEATABLE = frozenset({*TRANSACTION_APIS, *FIRST_GENERATION_APIS, "OffsetCommit"})  # a client may send these twice

FREEZE_MS = 800  # of the broker: clients notice, and wait
LONG_FREEZE_MS = 2_500  # of a process: longer than its session lasts
DELAY_MS = 700
FULL_DISK_MS = 1_200
NODE_FREEZE_MS = 5_000  # longer than broker.session.timeout.ms: its partitions get other leaders, and it comes back
NODE_DOWN_MS = 1_000
CUT_OFF_MS = 2_000
MOVES = 6  # by an election, for each time that the node is killed, frozen, restarted and cut off


# --- faults ---
def broker_faults(points: tuple[str, ...]) -> Iterator[Fault]:
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


def network_faults(apis: tuple[str, ...], client: str) -> Iterator[Fault]:
    """Everything that can happen to a frame of a client."""
    for api in apis:
        for what in ("drop_request", "drop_response", "truncate_request", "truncate_response", "duplicate_response"):
            yield Fault(what, NETWORK, api=api, client=client)
        for what in ("delay_request", "delay_response"):
            yield Fault(what, NETWORK, api=api, for_ms=DELAY_MS, client=client)
        yield Fault("silence_response", NETWORK, api=api, client=client)
        if api in REPEATABLE:
            yield Fault("duplicate_request", NETWORK, api=api, client=client)


def process_faults(target: str, apis: tuple[str, ...]) -> Iterator[Fault]:
    """A process that is killed at each side of its requests, and killed, restarted and frozen at any time."""
    for api in apis:
        for side in ("request", "response"):
            yield Fault("kill", target, api=api, side=side)
        yield Fault("restart", target, api=api, side="request")
    yield Fault("kill", target)
    yield Fault("restart", target)
    yield Fault("stop", target, for_ms=LONG_FREEZE_MS)


def point_faults(target: str, points: Iterable[str]) -> Iterator[Fault]:
    for point in points:
        yield Fault("kill", target, point)


def database_faults() -> Iterator[Fault]:
    """The server dies, restarts without an orderly end, loses a backend, or a connection breaks at COMMIT."""
    for what in ("kill", "restart", "kill_backend"):
        yield Fault(what, DATABASE)
    for nth in (1, 2, 3, 5, 8):  # COMMITs of either process
        yield Fault("cut_before_commit", DATABASE, nth=nth)
        yield Fault("cut_after_commit", DATABASE, nth=nth)


def node_faults(leads: Iterable[str]) -> Iterator[Fault]:
    """Leaders and coordinators of a cluster that move: by an election, and because their node is gone."""
    for led in leads:
        for _ in range(MOVES):
            yield Fault("move_leader", NODE, leads=led)
        yield Fault("kill", NODE, leads=led, for_ms=NODE_DOWN_MS)
        yield Fault("stop", NODE, leads=led, for_ms=NODE_FREEZE_MS)
        yield Fault("restart", NODE, leads=led)
        yield Fault("cut_off", NODE, leads=led, for_ms=CUT_OFF_MS)
    yield Fault("too_few_replicas", NODE, leads="output", for_ms=CUT_OFF_MS)
    yield Fault("rolling_restart", NODE)


def mixed_with_nodes(nodes: list[Fault], others: list[Fault]) -> list[Fault]:
    """A list in which every other fault is about a node."""
    times = max(1, len(others) // len(nodes))
    return [*nodes * times, *others]


# --- rounds ---
def shuffled_rounds(
    faults: list[Fault],
    rng: random.Random,
    rounds: int,
    per_round: int,
    spread_ms: int,
    transactions: int = TRANSACTIONS,
) -> list[Round]:
    """Rounds of faults from the list, shuffled again each time it is used up. Moments and counts are drawn here, so the
    value has them."""
    left: list[Fault] = []
    drawn = []
    for _ in range(rounds):
        while len(left) < per_round:
            fresh = list(faults)
            rng.shuffle(fresh)
            left += fresh
        taken, left = left[:per_round], left[per_round:]
        drawn.append(Round([_placed(fault, rng, spread_ms) for fault in taken], transactions))
    return drawn


def _placed(fault: Fault, rng: random.Random, spread_ms: int) -> Fault:
    seed = rng.choice((0, rng.randrange(1, 1 << 30))) if fault.what == "power_cut" else 0
    seed = rng.randrange(1 << 30) if fault.target == NODE else seed  # which of the partitions
    nth = rng.choice((1, 1, 2, 3)) if fault.api in ("Produce", "Fetch", "EndTxn", "TxnOffsetCommit") else 1
    return msgspec.structs.replace(fault, nth=nth, at_ms=rng.randrange(spread_ms), seed=seed)
