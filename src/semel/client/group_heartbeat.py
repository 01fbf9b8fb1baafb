"""The one thread that a group consumer has: it keeps the membership alive while the program works on records.

It starts with the first generation, uses connections of its own, and touches nothing of the consumer but the member's
locked state. It stops at max.poll.interval.ms: a program that does not come back to poll() loses its partitions, so
that others can go on. See docs/decisions/0040.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.client.group import GroupMember

log = logging.getLogger(__name__)

SERVICE_EVERY_S = 0.05  # while a rebalance is under way and the program is not in poll()


class HeartbeatThread:
    """Beats for a member until it is stopped or the member is gone."""

    def __init__(self, member: GroupMember, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = weakref.ref(member)  # a consumer that was dropped without close() must not live on through us
        self._interval_s = interval_s
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"semel-heartbeat-{member.group_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        next_beat_s = self._clock() + self._interval_s
        while True:
            member = self._member()
            if member is None or self._stopped.is_set():
                return
            rebalancing = member.is_rebalancing
            if rebalancing:
                self._attempt(member.service)
            elif self._clock() >= next_beat_s:
                self._attempt(member.beat)
                next_beat_s = self._clock() + self._interval_s
            del member
            wait_s = SERVICE_EVERY_S if rebalancing else min(next_beat_s - self._clock(), 1.0)
            if self._stopped.wait(max(wait_s, 0.001)):
                return

    def _attempt(self, step: Callable[[], None]) -> None:
        """A bug must not end the heartbeats silently; what fails because the consumer is being closed is no bug."""
        try:
            step()
        except Exception:
            if not self._stopped.is_set():
                log.exception("a heartbeat failed in a way that was not foreseen; the next one follows")
