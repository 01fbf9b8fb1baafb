"""Says what a client is waiting for while its calls still retry: after 2 s, and every 10 s."""

from __future__ import annotations

import logging
import threading
import time

from semel.client.timing import Clock

log = logging.getLogger("semel.client")

FIRST_S = 2.0
EVERY_S = 10.0
FORGOTTEN_S = 60.0  # a failure so long after the one before is a new one


class Outages:
    """Failures that are being retried, each under a name: the address of a broker, or what a call does."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Outage] = {}

    def failed(self, name: str, error: Exception) -> None:
        now_s = self._clock()
        with self._lock:
            found = self._open.get(name)
            if found is None or now_s - found.last_s > FORGOTTEN_S:
                found = self._open[name] = _Outage(now_s)
            found.last_s = now_s
            if now_s < found.next_message_s:
                return
            found.next_message_s = now_s + EVERY_S
        log.warning("%s; retried for %.0f s so far, and until the timeout of the call", error, now_s - found.since_s)

    def over(self, name: str) -> None:
        """It works again, or its caller knows that it does not."""
        if self._open:
            with self._lock:
                self._open.pop(name, None)


class _Outage:
    __slots__ = ("last_s", "next_message_s", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = self.last_s = now_s
        self.next_message_s = now_s + FIRST_S
