"""Client quotas: what was set, and how long a client that is too fast has to wait.

As in Kafka a client may be faster for some seconds, as long as its average over the window stays below the limit.
Whoever is over it gets its response at once, with the time it has to wait, and is not read from until that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from semel.broker.store import Store

USER, CLIENT_ID, IP = "user", "client-id", "ip"
PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE = "producer_byte_rate", "consumer_byte_rate"
ANONYMOUS = "ANONYMOUS"  # who everybody is where nobody logs in
_LONGEST_WAIT_MS = 2**31 - 1  # what a response can say
WINDOW_S = 10.0  # as quota.window.num and quota.window.size.seconds are by default
_KEY = "quota/"
_FORGET_AT = 10_000  # clients whose speed is remembered

Entity = tuple[tuple[str, str | None], ...]  # (type, name), sorted; None is the default of that type


class Limit(NamedTuple):
    per_second: float
    shared_by: tuple[str, ...]


_decode_entity = msgspec.json.Decoder(Entity).decode


class Quotas:
    """All quotas, and when each client has used up what it was sent."""

    def __init__(self, store: Store, now_s: Callable[[], float]) -> None:
        self._store = store
        self._now_s = now_s
        self._entries: dict[Entity, dict[str, float]] = {
            _decode_entity(text): values for text, values in store.items(_KEY)
        }
        self._paid_until_s: dict[tuple[str, ...], float] = {}
        self.is_active = bool(self._entries)

    def __iter__(self) -> Iterator[tuple[Entity, dict[str, float]]]:
        return iter(self._entries.items())

    def alter(self, entity: Entity, values: Mapping[str, float | None]) -> None:
        """Sets limits; None takes one away. Durable on return; OSError: nothing changed."""
        merged = {**self._entries.get(entity, {}), **values}
        kept = {key: value for key, value in merged.items() if value is not None}
        self._store.put(_KEY + msgspec.json.encode(entity).decode(), kept or None)
        self._store.commit()
        self._entries.pop(entity, None)
        if kept:
            self._entries[entity] = kept
        self.is_active = bool(self._entries)
        self._paid_until_s.clear()

    def charge(self, key: str, client_id: str, size_bytes: int) -> int:
        """Counts what a client sent or got. Returns for how many milliseconds it has to wait."""
        limit = self._limit(key, client_id)
        if limit is None:
            return 0
        now_s = self._now_s()
        if len(self._paid_until_s) >= _FORGET_AT:
            self._paid_until_s = {who: until for who, until in self._paid_until_s.items() if until > now_s - WINDOW_S}
        who = (key, *limit.shared_by)
        until_s = max(self._paid_until_s.get(who, 0.0), now_s - WINDOW_S) + size_bytes / limit.per_second
        self._paid_until_s[who] = until_s
        return min(max(0, round((until_s - now_s) * 1000)), _LONGEST_WAIT_MS)

    def _limit(self, key: str, client_id: str) -> Limit | None:
        """The most specific quota that there is, in Kafka's order."""
        for entity, shared_by in _candidates(ANONYMOUS, client_id):
            value = self._entries.get(entity, {}).get(key)
            if value is not None:
                return Limit(value, shared_by)
        return None


def _candidates(user: str, client_id: str) -> Iterator[tuple[Entity, tuple[str, ...]]]:
    for user_name in (user, None):
        yield ((CLIENT_ID, client_id), (USER, user_name)), (user, client_id)
        yield ((CLIENT_ID, None), (USER, user_name)), (user, client_id)
        yield ((USER, user_name),), (user,)
    yield ((CLIENT_ID, client_id),), ("", client_id)
    yield ((CLIENT_ID, None),), ("", client_id)
