"""How long a consumer bears with trouble before it tells its program."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from semel.client.errors import ConnectionFailedError, KafkaError, TimedOutError
from semel.protocol.errors import ErrorCode

log = logging.getLogger(__name__)


class Patience:
    """Transient errors are borne for default.api.timeout.ms; before any broker was reached, a refused connection only
    until poll()'s own time-out ends: a wrong address should not look like an empty topic."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since_s: float | None = None
        self._last: KafkaError | None = None
        self._reached = False

    def succeeded(self) -> None:
        self._reached = True
        self._since_s = self._last = None

    def failed(self, error: KafkaError, since_s: float | None = None) -> None:
        """An attempt failed; `since_s`: when it began."""
        if self._last is None or str(self._last) != str(error):
            log.warning("consumer: %s", error)
        if self._since_s is None:
            self._since_s = self._clock() if since_s is None else since_s
        self._reached = self._reached or error.code not in (None, ErrorCode.NETWORK_EXCEPTION)
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
