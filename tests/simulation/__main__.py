"""`make simulate`: runs clients and a broker in simulated worlds, one seed after the other, and prints what breaks.

make simulate ARGS="--seconds 60"                     fresh seeds, all workloads in turns
make simulate ARGS="--workload producer --seed 17"    one seed again, with its trace
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback

from tests.simulation.client_workload import clients
from tests.simulation.group_workload import consumers
from tests.simulation.processing_workload import processing
from tests.simulation.shrink import Workload, run, shrink
from tests.simulation.sink_workload import sink
from tests.simulation.workloads import producer_and_broker, transactions
from tests.simulation.world import World

LAST_EVENTS = 40
WORKLOADS: dict[str, Workload] = {
    "producer": producer_and_broker,
    "transactions": transactions,
    "consumers": consumers,
    "processing": processing,
    "sink": sink,
    "clients": clients,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, with fresh seeds (default: 60)")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="this one only (default: all, in turns)")
    parser.add_argument("--without", type=_numbers, default=[], help="leave these faults out: 1,2,5")
    args = parser.parse_args()
    wanted = [args.workload] if args.workload else sorted(WORKLOADS)
    logging.getLogger("semel").setLevel(logging.CRITICAL)  # a broker that recovers from a power cut says so
    if args.seed is not None:
        broken = [name for name in wanted if not _again(name, args.seed, args.without)]
        return 1 if broken else 0
    started_s, cpu_s, runs, faults = time.monotonic(), time.process_time(), 0, 0
    while time.monotonic() - started_s < args.seconds:
        name, seed = wanted[runs % len(wanted)], random.SystemRandom().randrange(2**32)
        print(f"{name} {seed}", flush=True)
        world, error = run(WORKLOADS[name], seed)
        if error is not None:
            _report(name, seed, error, world)
            return 1
        runs, faults = runs + 1, faults + world.faults
    print(f"{runs} runs with {faults} faults in {time.process_time() - cpu_s:.1f} s of CPU time; no promise was broken")
    return 0


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
        print(f'with {few} of {world.strikes} faults: make simulate ARGS="{again} --without {numbers}"')


if __name__ == "__main__":
    sys.exit(main())
