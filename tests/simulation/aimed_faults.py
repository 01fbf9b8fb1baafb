"""Faults at the moments that matter: while a request of a certain kind, or its response, is on its way.

Faults that come at any time seldom meet the few milliseconds in which a transaction ends or offsets are committed. So
each seed draws kinds of requests, and how often something happens to one of them: to the process that sent it, to its
connections or to the broker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from semel.protocol.api import Api
from tests.simulation.operating_system import ClientProcess
from tests.simulation.workloads import Disturbances
from tests.simulation.world import World

SHARES = (0.1, 0.4, 1.0)  # of the highest rate of a kind of request: few faults let more of the others happen
SHORTEST_S, LONGEST_S = 0.1, 12.0  # how long something stays away: shorter and longer than any timeout


class AimedFaults:
    """Watches the requests of processes. What it does ends with the disturbances."""

    def __init__(self, world: World, disturbances: Disturbances, highest: Mapping[Api[Any, Any], float]) -> None:
        self._world = world
        self._disturbances = disturbances
        self.timeout_s = 1.0  # of the calls that are disturbed
        self._rates = {api.key: rate * world.rng.choice(SHARES) for api, rate in highest.items()}
        self._ambush: dict[int, Callable[[], None]] = {}

    def watch(self, process: ClientProcess) -> None:
        process.on_request = lambda api_key: self._on_request(process, api_key)

    def ambush(self, apis: Iterable[Api[Any, Any]], event: Callable[[], None]) -> None:
        """Once, soon after the next request of one of these kinds."""
        self._ambush = dict.fromkeys((api.key for api in apis), event)

    def _on_request(self, process: ClientProcess, api_key: int) -> None:
        rate = self._rates.get(api_key)
        if rate is None or not self._disturbances.on:
            return
        world = self._world
        soon_s = world.rng.random() * 2 * world.delay_s
        if api_key in self._ambush:
            world.after(soon_s, self._ambush[api_key])
            self._ambush = {}
        elif world.rng.random() < rate:
            world.after(soon_s, lambda: self._strike(process))

    def _strike(self, process: ClientProcess) -> None:
        world = self._world
        rng = random.Random(world.rng.random())  # a fault that is left out changes no other
        if self._disturbances.on and world.may_strike():
            (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
            fault(process, self._a_while_s(rng))

    def _a_while_s(self, rng: random.Random) -> float:
        """Short ones are as likely as long ones; or a few timeouts: the call fails, and so do attempts to clean up."""
        if rng.random() < 0.5:
            return float(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.random())
        return min(LONGEST_S, self.timeout_s * rng.uniform(0.5, 4.5))


def _kill(process: ClientProcess, _: float) -> None:
    process.kill()


def _freeze(process: ClientProcess, seconds: float) -> None:
    if not process.is_over:
        process.freeze(seconds)


def _cut_connections(process: ClientProcess, _: float) -> None:
    process.cut_connections()


def _take_offline(process: ClientProcess, seconds: float) -> None:
    process.cut_connections(offline_s=seconds)


def _freeze_the_broker(process: ClientProcess, seconds: float) -> None:
    process.world.broker.freeze(seconds)


def _kill_the_broker(process: ClientProcess, seconds: float) -> None:
    world = process.world
    if world.broker.is_up:
        world.broker.kill(world.rng.randrange(20))
        world.after(seconds / 2, world.broker.start)


def _cut_power(process: ClientProcess, seconds: float) -> None:
    world = process.world
    if world.broker.is_up:
        world.broker.cut_power()
        world.after(seconds / 2, world.broker.start)


FAULTS = {
    _kill: 1,
    _freeze: 1,
    _cut_connections: 1,
    _take_offline: 5,
    _freeze_the_broker: 1,
    _kill_the_broker: 0.5,
    _cut_power: 0.5,
}
