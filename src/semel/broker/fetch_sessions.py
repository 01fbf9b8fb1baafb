"""The fetches under way: their sessions (KIP-227), and those that wait for records."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import FetchPartition, FetchRequest, FetchTopic, PartitionData

if TYPE_CHECKING:
    from semel.broker.handlers.fetch import Fetch

INITIAL_EPOCH, FINAL_EPOCH = 0, -1
NO_SESSION = 0
EVICTABLE_AFTER_S = 120.0
_INT32_MAX = 2**31 - 1

Key = tuple[str, bytes, int]  # topic name (up to version 12), topic id (from 13 on), partition


class SessionError(Exception):
    """A session that is unknown or out of step; the client starts a new one."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class CachedPartition:
    """A partition of a session: what is requested of it, and what the last response had."""

    requested: FetchPartition
    topic_name: str = ""  # once the partition was found: a request by topic id does not say it
    high_watermark: int = -1
    log_start_offset: int = -1

    def has_news(self, data: PartitionData) -> bool:
        """Whether a response says anything new. Errors are sent every time, and so is what follows them."""
        is_news = bool(data.records) or bool(data.error_code) or data.diverging_epoch.epoch >= 0
        is_news |= data.high_watermark != self.high_watermark or data.log_start_offset != self.log_start_offset
        self.high_watermark = -1 if data.error_code else data.high_watermark
        self.log_start_offset = data.log_start_offset
        return is_news


class Session:
    """One consumer's session. Partitions that had records go to the end of the line, so that all get their turn."""

    def __init__(self, session_id: int, uses_ids: bool) -> None:
        self.id = session_id
        self.uses_ids = uses_ids
        self.epoch = 1
        self.partitions: OrderedDict[Key, CachedPartition] = OrderedDict()
        self.last_used_s = 0.0

    def update(self, request: FetchRequest) -> None:
        """Takes over what an incremental request changes."""
        for key, requested in requested_partitions(request.topics):
            known = self.partitions.get(key)
            if known is None:
                self.partitions[key] = CachedPartition(requested)
            else:
                known.requested = requested
        for topic in request.forgotten_topics_data:
            for index in topic.partitions:
                self.partitions.pop((topic.topic, topic.topic_id, index), None)

    def changes(self, found: list[tuple[Key, PartitionData]]) -> list[tuple[Key, PartitionData]]:
        """Those of the responses that the client does not know yet."""
        changed = []
        for key, data in found:
            cached = self.partitions.get(key)
            if cached is None or not cached.has_news(data):
                continue
            changed.append((key, data))
            if data.records:
                self.partitions.move_to_end(key)
        return changed


def requested_partitions(topics: Iterable[FetchTopic]) -> Iterable[tuple[Key, FetchPartition]]:
    for topic in topics:
        for requested in topic.partitions:
            yield (topic.topic, topic.topic_id, requested.partition), requested


class FetchSessions:
    """All sessions, a bounded number of them."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # the longest unused first
        self._random = random.Random()

    def __len__(self) -> int:
        return len(self._sessions)

    def resume(self, request: FetchRequest, uses_ids: bool, now_s: float) -> Session | None:
        """The session of an incremental request, brought up to date; None if it reads nothing any more."""
        session = self._sessions.get(request.session_id)
        if session is None:
            raise SessionError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise SessionError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.uses_ids != uses_ids:
            raise SessionError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        session.update(request)
        if not session.partitions:
            del self._sessions[session.id]
            return None
        session.epoch = 1 if session.epoch == _INT32_MAX else session.epoch + 1
        session.last_used_s = now_s
        self._sessions.move_to_end(session.id)
        return session

    def open(self, request: FetchRequest, uses_ids: bool, now_s: float) -> Session | None:
        """A new session for a full request; None if there are too many, or nothing to remember."""
        if not any(topic.partitions for topic in request.topics) or not self._may_add(now_s):
            return None
        session = Session(self._new_id(), uses_ids)
        session.partitions.update(
            (key, CachedPartition(requested)) for key, requested in requested_partitions(request.topics)
        )
        session.last_used_s = now_s
        self._sessions[session.id] = session
        return session

    def close(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)

    def _may_add(self, now_s: float) -> bool:
        if len(self._sessions) < self._slots:
            return True
        if not self._sessions:
            return False
        oldest = next(iter(self._sessions.values()))
        if now_s - oldest.last_used_s <= EVICTABLE_AFTER_S:
            return False
        del self._sessions[oldest.id]
        return True

    def _new_id(self) -> int:
        while True:
            session_id = self._random.randint(1, _INT32_MAX)
            if session_id not in self._sessions:
                return session_id


def uses_topic_ids(version: int) -> bool:
    return version >= 13


# --- The fetches under way: their sessions, and those that wait for records ---
FEW = 8  # partitions that fit into one response anyway

Item = TypeVar("Item")


class Fetches:
    def __init__(self, session_slots: int) -> None:
        self.sessions = FetchSessions(session_slots)
        self.waiting: dict[Fetch, None] = {}
        self._turn = 0

    def in_turn(self, items: list[Item]) -> list[Item]:
        """Another partition first each time: a response is limited in size, and no partition shall starve."""
        if len(items) < FEW:
            return items
        self._turn = (self._turn + 1) % len(items)
        return items[self._turn :] + items[: self._turn]

    def finish_all(self) -> None:
        """Completes all that wait: the broker stops."""
        for fetch in tuple(self.waiting):
            fetch.finish()
