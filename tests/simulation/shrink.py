"""Runs a workload, and finds out which faults a broken promise needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.simulation.world import World

MEMORY = "/dev/shm"  # in memory: what is durable is decided by the simulated disk
Workload = Callable[[int, Path, Callable[[World], None]], World]


def run(workload: Workload, seed: int, left_out: Iterable[int] = ()) -> tuple[World, Exception | None]:
    """The world at its end, and what broke; without the faults of these numbers."""
    worlds: list[World] = []

    def on_start(world: World) -> None:
        world.left_out = frozenset(left_out)
        worlds.append(world)

    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        try:
            workload(seed, Path(folder) / "data", on_start)
        except Exception as error:
            return worlds[0], error
    return worlds[0], None


def shrink(workload: Workload, seed: int) -> list[int]:
    """Faults that can be left out while a promise is still broken: whole ranges first, then one by one."""
    world, _ = run(workload, seed)
    left_out: list[int] = []
    needed = list(range(1, world.strikes + 1))
    size = max(1, len(needed) // 2)
    while needed and size:
        for start in range(0, len(needed), size)[::-1]:
            without = needed[start : start + size]
            _, error = run(workload, seed, [*left_out, *without])
            if error is not None:
                left_out += without
                del needed[start : start + size]
        size //= 2
    return sorted(left_out)
