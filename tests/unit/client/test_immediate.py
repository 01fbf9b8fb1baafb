"""Coroutines that never wait give their result at once; one that waits is refused."""

from __future__ import annotations

import asyncio

import pytest

from semel.client.immediate import blocking, run


async def doubled(number: int) -> int:
    return number * 2


def test_the_result_or_the_error_comes_at_once() -> None:
    async def failing() -> None:
        await doubled(1)
        raise KeyboardInterrupt

    assert run(doubled(4)) == 8
    with pytest.raises(KeyboardInterrupt):
        run(failing())


def test_a_coroutine_that_waits_for_an_event_loop_is_refused_and_closed() -> None:
    closed = []

    async def waiting() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        run(waiting())
    assert closed


def test_the_blocking_form_takes_the_owner_of_the_calls() -> None:
    class Calls:
        async def add(self, left: int, *, right: int) -> int:
            """Says the sum."""
            return left + right

    class Owner:
        calls = Calls()
        add = blocking(Calls.add)

    assert Owner().add(1, right=2) == 3
    assert Owner.add.__doc__ == "Says the sum."
