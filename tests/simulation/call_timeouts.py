"""Calls of a simulated process must end, with or without an error, when their timeout says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.simulation.operating_system import current_process
from tests.simulation.world import World

LATE_S = 1.0  # how long a call may exceed its timeout: a thread may have to wait for its turn
Limits = Mapping[tuple[type, str], Callable[..., float]]  # class and method -> its timeout in seconds, by its arguments


@contextmanager
def kept_timeouts(world: World, limits: Limits) -> Iterator[None]:
    """Inside, each of these calls is checked. Being frozen does not count, nor do calls that a call makes for its
    caller, such as those of a rebalance listener inside of a poll: they have timeouts of their own."""
    real = {(owner, name): vars(owner)[name] for owner, name in limits}
    inner_s: dict[str, float] = {}  # of the calls that have ended inside of the one that is under way, by process

    def checked(owner: type, name: str) -> Callable[..., Any]:
        call, limit_s = real[owner, name], limits[owner, name]

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            process, began_s = current_process(), world.now_s
            before_s, inner_s[process.name] = inner_s.get(process.name, 0.0), 0.0
            try:
                return call(*args, **kwargs)
            finally:
                took_s = world.now_s - max(began_s, process.frozen_until_s)
                own_s = took_s - inner_s[process.name]
                inner_s[process.name] = before_s + (world.now_s - began_s)
                timeout_s = limit_s(*args, **kwargs)
                assert process.is_over or own_s <= timeout_s + LATE_S, (
                    f"{process.name}: {name} took {own_s:.2f} s instead of {timeout_s:.2f} s"
                )

        return run

    for owner, name in limits:
        setattr(owner, name, checked(owner, name))
    try:
        yield
    finally:
        for (owner, name), call in real.items():
            setattr(owner, name, call)
