"""Opens connections, and does not try an address that cannot be reached again and again: after each failure in a row
the next attempt is made after reconnect.backoff.ms, doubled each time up to reconnect.backoff.max.ms."""

from __future__ import annotations

import time
from typing import NamedTuple

from semel.client.connection import Connection
from semel.client.errors import ConnectionFailedError
from semel.client.settings import ClientSettings
from semel.client.timing import Backoff, Deadline
from semel.protocol.errors import ErrorCode


class _Failure(NamedTuple):
    message: str
    backoff: Backoff
    next_s: float  # on time.monotonic()


class Reconnects:
    """The addresses of one client that failed last time."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._failures: dict[tuple[str, int], _Failure] = {}

    def open(self, host: str, port: int, deadline: Deadline) -> Connection:
        """A new connection. Raises at once, with `retry_after_s`, where the last attempt failed a moment ago."""
        address = (host, port)
        failure = self._failures.get(address)
        wait_s = 0.0 if failure is None else failure.next_s - time.monotonic()
        if failure is not None and wait_s > 0:
            error = ConnectionFailedError(failure.message, ErrorCode.NETWORK_EXCEPTION)
            error.retry_after_s = wait_s
            raise error
        try:
            connection = Connection.open(host, port, self._settings, deadline.remaining_s())
        except ConnectionFailedError as error:
            if not deadline.expired:  # else the caller's haste may be the cause
                self._note(address, str(error))
            raise
        self._failures.pop(address, None)
        return connection

    def _note(self, address: tuple[str, int], message: str) -> None:
        settings, before = self._settings, self._failures.get(address)
        backoff = (
            before.backoff if before else Backoff(settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms)
        )
        self._failures[address] = _Failure(message, backoff, time.monotonic() + backoff.next_s())
