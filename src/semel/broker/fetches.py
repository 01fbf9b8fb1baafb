"""The fetches under way: their sessions, and those that wait for records."""

from __future__ import annotations

from typing import Protocol, TypeVar

from semel.broker.fetch_sessions import FetchSessions

FEW = 8  # partitions that fit into one answer anyway

Ask = TypeVar("Ask")


class WaitingFetch(Protocol):
    def finish(self) -> None: ...


class Fetches:
    def __init__(self, session_slots: int) -> None:
        self.sessions = FetchSessions(session_slots)
        self.waiting: set[WaitingFetch] = set()
        self._turn = 0

    def in_turn(self, asks: list[Ask]) -> list[Ask]:
        """Another partition first each time: an answer has limited room, and no partition shall starve."""
        if len(asks) < FEW:
            return asks
        self._turn = (self._turn + 1) % len(asks)
        return asks[self._turn :] + asks[: self._turn]

    def answer_all(self) -> None:
        """Nobody waits any longer: the broker stops."""
        for fetch in tuple(self.waiting):
            fetch.finish()
