"""What will go wrong, and when: a value that is made from a seed, printed, saved and replayed."""

from __future__ import annotations

from pathlib import Path

import msgspec

FORMAT = 2
NETWORK = "network"
BROKER = "broker"


class ScheduleError(Exception):
    """A file that is not a schedule, or not one of this version."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that goes wrong.

    what    kill, stop, restart, takeover, power_cut, clock, disk_full, checkpoint_lost, or what happens to a frame:
            drop_request, drop_response, truncate_..., delay_..., duplicate_..., silence_response
    target  broker, producer, worker-a, driver, task, ...: a process; `network` for frames
    point   a named fault point of the broker or the sink where it happens; "" for none. With an API: where the broker
            dawdles for `for_ms` with the request at which the process is hit
    api     an API at whose frames it happens; "" for none
    client  whose frames of the network: a part of the client id; "" for anybody's
    side    request or response, where a process is hit at an API
    nth     the how manyth time
    at_ms   after the start of the round; with a point or an API: from then on
    for_ms  how long it lasts: a freeze, a delay, a full disk
    step_ms of the clock
    seed    of what survives a power cut; 0: nothing that was not synced
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

    def __str__(self) -> str:
        if self.target == NETWORK:
            whose = f" of {self.client}" if self.client else ""
            where = f"{self.api} {self.what.replace('_', ' ')}{whose}"
        else:
            where = f"{self.what.replace('_', ' ')} {self.target}"
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
    transactions: int = 12


class Scene(msgspec.Struct, frozen=True):
    """Rounds of one workload on topics of their own."""

    workload: str
    guarantee: str
    rounds: list[Round]
    options: dict[str, str] = {}


class Schedule(msgspec.Struct, frozen=True):
    """A whole campaign."""

    seed: int
    scenes: list[Scene]
    mutant: str = ""
    settings: list[str] = []  # NAME=VALUE for a broker of one's own
    format: int = FORMAT

    @property
    def fault_count(self) -> int:
        return sum(len(round_.faults) for scene in self.scenes for round_ in scene.rounds)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load(path: Path) -> Schedule:
    try:
        schedule = msgspec.json.decode(path.read_bytes(), type=Schedule)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ScheduleError(f"{path} is not a schedule that `semel prove` saved: {error}") from error
    if schedule.format != FORMAT:
        raise ScheduleError(f"{path} has format {schedule.format}; this version of semel replays format {FORMAT}")
    return schedule
