"""`make simulate`: runs clients and a broker in simulated worlds, one seed after the other, and prints what breaks.

make simulate ARGS="--seconds 60"                     fresh seeds, all workloads in turns
make simulate ARGS="--workload producer --seed 17"    one seed again, with its trace
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.simulation.group_workload import consumers
from tests.simulation.workloads import producer_and_broker, transactions
from tests.simulation.world import World

LAST_EVENTS = 40
WORKLOADS = {"producer": producer_and_broker, "transactions": transactions, "consumers": consumers}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, with fresh seeds (default: 60)")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="this one only (default: all, in turns)")
    args = parser.parse_args()
    wanted = [args.workload] if args.workload else sorted(WORKLOADS)
    logging.getLogger("semel").setLevel(logging.CRITICAL)  # a broker that recovers from a power cut says so
    if args.seed is not None:
        return 1 if None in [_run(name, args.seed, show_trace=True) for name in wanted] else 0
    started_s, cpu_s, runs, faults = time.monotonic(), time.process_time(), 0, 0
    while time.monotonic() - started_s < args.seconds:
        found = _run(wanted[runs % len(wanted)], random.SystemRandom().randrange(2**32), show_trace=False)
        if found is None:
            return 1
        runs, faults = runs + 1, faults + found
    print(f"{runs} runs with {faults} faults in {time.process_time() - cpu_s:.1f} s of CPU time; no promise was broken")
    return 0


def _run(name: str, seed: int, show_trace: bool) -> int | None:
    """How many faults there were; None if a promise was broken, which is printed."""
    worlds: list[World] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            WORKLOADS[name](seed, Path(folder) / "data", worlds.append)
        except Exception:
            traceback.print_exc()
            print(*worlds[0].trace[-LAST_EVENTS:], sep="\n")
            print(f'a promise was broken; again with: make simulate ARGS="--workload {name} --seed {seed}"')
            return None
    if show_trace:
        print(*worlds[0].trace, sep="\n")
    return worlds[0].faults


if __name__ == "__main__":
    sys.exit(main())
