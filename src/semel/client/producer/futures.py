"""What makes a delivery a future: `await`, `concurrent.futures.wait` and `as_completed`.

`concurrent.futures` asks a future for `_condition`, `_state` and `_waiters` and relies on these: while it holds the
conditions of its futures, no state changes, and a waiter that it adds then is called once. A delivery has them from the
first time that they are used, so that those that nobody waits for in this way cost nothing. One lock serves all
deliveries: `concurrent.futures` takes the locks of many futures at once, in an order of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from threading import RLock
from typing import Any, Self

RUNNING, FINISHED = "RUNNING", "FINISHED"  # as concurrent.futures writes them
CONDITION = RLock()  # taken before the lock of a producer, never after it; nothing waits for it to be notified


class Waiting:
    """What `concurrent.futures` knows of one delivery."""

    __slots__ = ("state", "waiters")

    def __init__(self) -> None:
        self.state = RUNNING
        self.waiters: list[Any] = []

    def finish(self, delivery: DeliveryFuture) -> None:
        with CONDITION:
            self.state = FINISHED
            failed = delivery.exception() is not None
            for waiter in self.waiters:
                waiter.add_exception(delivery) if failed else waiter.add_result(delivery)


class DeliveryFuture:
    """The methods of a future that deliveries share."""

    __slots__ = ("_waiting",)  # empty until somebody waits with concurrent.futures

    def done(self) -> bool:
        raise NotImplementedError

    def result(self) -> Any:
        raise NotImplementedError

    def exception(self) -> BaseException | None:
        raise NotImplementedError

    def add_done_callback(self, function: Callable[[Self], Any]) -> None:
        raise NotImplementedError

    def running(self) -> bool:
        return not self.done()

    def cancel(self) -> bool:
        """Always False: what was given to the producer is sent. In a transaction, abort_transaction() takes it back."""
        return False

    def cancelled(self) -> bool:
        """Always False, see `cancel`."""
        return False

    # --- asyncio ---
    def __await__(self) -> Generator[Any, None, Any]:
        """Waits without blocking the event loop. Cancelling the task that waits does not take the records back."""
        if not self.done():
            from asyncio import get_running_loop

            loop = get_running_loop()
            woken = loop.create_future()

            def wake() -> None:
                if not woken.done():  # the task may have been cancelled
                    woken.set_result(None)

            def wake_loop(_: object) -> None:  # in the sender's thread
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(wake_loop)
            yield from woken
        return self.result()

    # --- concurrent.futures ---
    @property
    def _condition(self) -> Any:
        return CONDITION

    @property
    def _state(self) -> str:
        return self._awaited().state

    @property
    def _waiters(self) -> list[Any]:
        return self._awaited().waiters

    def _awaited(self) -> Waiting:
        with CONDITION:
            known: Waiting | None = getattr(self, "_waiting", None)
            if known is not None:
                return known
            waiting = self._waiting = Waiting()
        self.add_done_callback(waiting.finish)
        return waiting
