"""Deadlines and back-off, with a clock that tests can move."""

from __future__ import annotations

import functools
import inspect
import math
import random
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from semel.client.errors import ConfigError
from semel.client.pauses import Pauses

Clock = Callable[[], float]

LONGEST_S = 1e9  # which stands for ever: what takes a timeout (threads, requests) takes this one


class Deadline:
    """A moment until which something may take; all waits inside a call share one."""

    __slots__ = ("_at_s", "_clock", "total_s")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        if math.isnan(seconds):
            raise ConfigError("a timeout is nan; expected a number of milliseconds (math.inf: without an end)")
        self._clock = clock
        self.total_s = seconds
        self._at_s = clock() + min(seconds, LONGEST_S)

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._at_s - self._clock())

    @property
    def expired(self) -> bool:
        return self._clock() >= self._at_s


class Backoff(Pauses):
    """Pauses of random length."""

    __slots__ = ()

    def __init__(self, first_ms: float, max_ms: float, rand: Callable[[], float] = random.random) -> None:
        super().__init__(first_ms, max_ms, rand)


# --- Timeouts of public calls: keywords in milliseconds. Other clients take seconds; here these are refused by name ---


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_IN_SECONDS = {"timeout": "timeout_ms", "timeout_s": "timeout_ms", "start_timeout_s": "start_timeout_ms"}


def timeout_in_ms(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """For a public call whose timeout is a keyword in milliseconds: a timeout in seconds, as other clients have it, is
    refused by the name that it has here, instead of being taken for milliseconds."""
    public = call.__name__ if call.__name__.startswith("__") else call.__name__.removeprefix("_")
    kinds = [each.kind for each in inspect.signature(call).parameters.values()]
    most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(call)
    def checked(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        if len(args) > most or not keywords.keys().isdisjoint(_IN_SECONDS):
            raise _in_seconds(public, args[most:], keywords)
        return call(*args, **keywords)

    return checked


def refuse_seconds(name: str, keywords: dict[str, object]) -> None:
    """The same for the keywords of a call whose timeout may also be given by its place."""
    if keywords and not keywords.keys().isdisjoint(_IN_SECONDS):
        raise _in_seconds(name, (), keywords)


def _in_seconds(name: str, args: tuple[object, ...], keywords: dict[str, object]) -> TypeError:
    given = next((word for word in keywords if word in _IN_SECONDS), "timeout")
    value = keywords.get(given, args[0] if args else None)
    number = f"{value * 1000:g}" if isinstance(value, int | float) else "..."
    said = f"{given}={value!r}" if given in keywords else repr(value)
    wanted = f"{_IN_SECONDS[given]}={number}"
    return TypeError(f"{name}() takes its timeout in milliseconds and by name: {wanted} instead of {said} (seconds)")
