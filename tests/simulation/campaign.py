"""`make simulate`: runs clients and a broker in simulated worlds, one seed after the other, and prints what breaks.

make simulate ARGS="--seconds 60"                       fresh seeds, all workloads in turns
make simulate ARGS="--workload producer --seed 17"      one seed again, with its trace
make simulate ARGS="--faults 1000000 --processes 2"     a campaign
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from multiprocessing import get_context
from threading import Event
from typing import NamedTuple

from tests.simulation.client_workload import clients
from tests.simulation.group_workload import consumers
from tests.simulation.pattern_workload import entities, sagas
from tests.simulation.processing_workload import processing
from tests.simulation.shrink import Workload, run, shrink
from tests.simulation.sink_workload import sink
from tests.simulation.state_workload import counting
from tests.simulation.two_phase_workload import two_phase
from tests.simulation.workloads import producer_and_broker, transactions
from tests.simulation.world import World

LAST_EVENTS = 40
SEEDS_OF_A_PROCESS = 500  # then another one takes its place: what they leave behind does not add up
WORKLOADS: dict[str, Workload] = {
    "producer": producer_and_broker,
    "transactions": transactions,
    "two_phase": two_phase,
    "consumers": consumers,
    "processing": processing,
    "state": counting,
    "entities": entities,
    "sagas": sagas,
    "sink": sink,
    "clients": clients,
}


class Outcome(NamedTuple):
    """Of one seed."""

    name: str
    faults: int
    cpu_s: float
    is_broken: bool


class Totals:
    """Runs, faults and CPU time of each workload."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}
        self._began_s = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        one = (1, outcome.faults, outcome.cpu_s)
        self.of[outcome.name] = [a + b for a, b in zip(self.of.get(outcome.name, (0, 0, 0)), one, strict=True)]

    @property
    def faults(self) -> float:
        return sum(faults for _, faults, _ in self.of.values())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def __str__(self) -> str:
        lines = [
            f"{name:12} {runs:>7.0f} runs, {faults:>9.0f} faults in {cpu_s:.1f} s of CPU time, "
            f"{faults / cpu_s:.0f} per second"
            for name, (runs, faults, cpu_s) in sorted(self.of.items())
        ]
        lines.append(f"{self.faults:.0f} faults in {self.seconds:.1f} s, {self.faults / self.seconds:.0f} per second")
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, with fresh seeds (default: 60)")
    parser.add_argument("--faults", type=int, help="until so many happened, however long that takes")
    parser.add_argument("--processes", type=int, default=1, help="so many worlds at a time (default: 1)")
    parser.add_argument(
        "--workload",
        choices=sorted(WORKLOADS),
        action="append",
        help="this one only; may be given several times (default: all, in turns)",
    )
    parser.add_argument("--without", type=_numbers, default=[], help="leave these faults out: 1,2,5")
    args = parser.parse_args()
    wanted = args.workload or sorted(WORKLOADS)
    logging.getLogger("semel").setLevel(logging.CRITICAL)
    if args.seed is not None:
        broken = [name for name in wanted if not _again(name, args.seed, args.without)]
        return 1 if broken else 0
    totals, stopped = Totals(), Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # the runs under way end first: what they found counts
    for outcome in _run_all(wanted, args.processes, lambda: _goes_on(totals, args) and not stopped.is_set()):
        if outcome.is_broken:
            return 1
        totals.add(outcome)
    print(totals, *["stopped before its end"] * stopped.is_set(), "no promise was broken", sep="\n")
    return 0


def _goes_on(totals: Totals, args: argparse.Namespace) -> bool:
    return bool(totals.seconds < args.seconds if args.faults is None else totals.faults < args.faults)


def _run_all(wanted: list[str], processes: int, goes_on: Callable[[], bool]) -> Iterator[Outcome]:
    """Fresh seeds, each printed before it is run."""
    seeds = ((wanted[number % len(wanted)], random.SystemRandom().randrange(2**32)) for number in count())
    if processes == 1:
        while goes_on():
            yield _run(*_printed(next(seeds)))
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=SEEDS_OF_A_PROCESS) as pool:
        running: set[Future[Outcome]] = set()
        while goes_on() or running:
            while goes_on() and len(running) < processes:
                running.add(pool.submit(_run, *_printed(next(seeds))))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _printed(what: tuple[str, int]) -> tuple[str, int]:
    print(*what, flush=True)
    return what


def _run(name: str, seed: int) -> Outcome:
    logging.getLogger("semel").setLevel(logging.CRITICAL)  # a broker that recovers from a power cut says so
    cpu_s = time.process_time()
    world, error = run(WORKLOADS[name], seed)
    if error is not None:
        _report(name, seed, error, world)
    return Outcome(name, world.faults, time.process_time() - cpu_s, error is not None)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _again(name: str, seed: int, without: list[int]) -> bool:
    """Prints the trace; whether all promises were kept."""
    world, error = run(WORKLOADS[name], seed, without)
    print(*world.trace, sep="\n")
    if error is not None:
        traceback.print_exception(error)
    return error is None


def _report(name: str, seed: int, error: Exception, world: World) -> None:
    """What broke, and how to see it again with as few faults as possible."""
    traceback.print_exception(error)
    print(*world.trace[-LAST_EVENTS:], sep="\n")
    again = f"--workload {name} --seed {seed}"
    print(f'a promise was broken; again with: make simulate ARGS="{again}"', flush=True)
    left_out = shrink(WORKLOADS[name], seed)
    if left_out:
        numbers = ",".join(map(str, left_out))
        few = world.strikes - len(left_out)
        print(f'with {few} of {world.strikes} faults: make simulate ARGS="{again} --without {numbers}"', flush=True)
