"""Coroutines that never wait: how the blocking client runs what it shares with `semel.aio`.

What a call consists of (find the broker, send the request, look at the response, try again) is written once, as
coroutines over a driver's connections: `ClusterCalls`, `AdminCalls`, `CoordinatorCalls`, `TransactionCalls`. Under
asyncio they wait in the event loop. Under the blocking driver everything that they await has happened when it returns,
so one step runs such a coroutine to its end: there is no event loop, and nothing that a fork could inherit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def run(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine over a blocking driver."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: Value = end.value
        return value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for an event loop; it must be run by one")


def blocking(
    call: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Any, Parameters], Value]:
    """The blocking form of a method or function whose first argument is a driver's `calls`: it takes their owner."""

    @functools.wraps(call)
    def blocked(owner: Any, /, *args: Parameters.args, **keywords: Parameters.kwargs) -> Value:
        return run(call(owner.calls, *args, **keywords))

    return blocked


def blocked(
    call: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Any, Parameters], Value]:
    """The blocking form of a method, for a class whose driver never waits."""

    @functools.wraps(call)
    def method(self: Any, /, *args: Parameters.args, **keywords: Parameters.kwargs) -> Value:
        return run(call(self, *args, **keywords))

    return method


# --- What can be used in a `with` block, and is closed at its end ---


class Closing:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
