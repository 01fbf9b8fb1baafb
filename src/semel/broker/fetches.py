"""The fetches under way: their sessions, and those that wait for records."""

from __future__ import annotations

from typing import Protocol

from semel.broker.fetch_sessions import FetchSessions


class WaitingFetch(Protocol):
    def finish(self) -> None: ...


class Fetches:
    def __init__(self, session_slots: int) -> None:
        self.sessions = FetchSessions(session_slots)
        self.waiting: set[WaitingFetch] = set()

    def answer_all(self) -> None:
        """Nobody waits any longer: the broker stops."""
        for fetch in tuple(self.waiting):
            fetch.finish()
