"""How long a consumer bears with trouble before it tells its program."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from semel.client.errors import ConnectionFailedError, KafkaError, TimedOutError
from semel.client.timing import Deadline
from semel.protocol.errors import ErrorCode

log = logging.getLogger(__name__)

FIRST_STEP_S = 1.0


class Patience:
    """Transient errors are borne for default.api.timeout.ms; before any broker was reached, a refused connection only
    until poll()'s own time-out ends: a wrong address should not look like an empty topic."""

    def __init__(self, limit_s: float, longest_step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._longest_step_s = longest_step_s
        self._clock = clock
        self._step_s = min(FIRST_STEP_S, longest_step_s)
        self._since_s: float | None = None
        self._last: KafkaError | None = None
        self._reached = False

    def step(self, deadline: Deadline) -> Deadline:
        """The time for one request that poll() waits for: what is left, or a little more, so that a poll() with a short
        time-out gets somewhere, too."""
        return Deadline(min(max(deadline.remaining_s(), self._step_s), self._longest_step_s))

    def succeeded(self) -> None:
        self._reached = True
        self._since_s = self._last = None
        self._step_s = min(FIRST_STEP_S, self._longest_step_s)

    def failed(self, error: KafkaError) -> None:
        if self._last is None or str(self._last) != str(error):
            log.warning("consumer: %s", error)
        if self._since_s is None:
            self._since_s = self._clock()
        self._reached = self._reached or error.code not in (None, ErrorCode.NETWORK_EXCEPTION)
        if isinstance(error, TimeoutError):
            self._step_s = min(2 * self._step_s, self._longest_step_s)
        self._last = error

    def check(self, poll_ends: bool) -> None:
        """Raises if it has lasted too long."""
        if self._last is None or self._since_s is None:
            return
        lasted_s = self._clock() - self._since_s
        is_refused = isinstance(self._last, ConnectionFailedError) and not isinstance(self._last, TimeoutError)
        if lasted_s >= self._limit_s or (poll_ends and is_refused and not self._reached):
            last, self._since_s, self._last = self._last, None, None
            raise TimedOutError(
                f"nothing could be read for {lasted_s:.3g} s; the last try: {last}", last.code
            ) from last
