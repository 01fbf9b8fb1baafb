"""Reading entities: a projection that is made of their events, and how to wait until one has what was written.

A view reads the snapshots first and then the events; what it has of an entity is always the fold of its events up to
one version. It lives in memory and reads while it is used. Projections elsewhere (a table, a cache) store the header
`version` with what they make of an event, and `wait_for_version` waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from semel.client.consumer import Consumer
from semel.client.errors import ConfigError, TimedOutError
from semel.client.timing import Backoff, timeout_in_ms
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.catching_up import POLL_MS, read_up_to
from semel.patterns.state_store import StateError

Fold = Callable[[Any, bytes], Any]


def listed(value: list[bytes] | None, event: bytes) -> list[bytes]:
    """The fold that keeps all events. The view copies the list when it is read."""
    events = [] if value is None else value
    events.append(event)
    return events


class EntityValue(NamedTuple):
    """An entity as of a version; 0: there is none."""

    version: int
    value: Any


def parse_token(token: str) -> tuple[str, int]:
    """Entity and version that a token of `append` names."""
    number, at, entity = token.partition("@")
    if not at or not number.isdecimal() or not entity:
        raise ConfigError(f"invalid token {token!r}: expected VERSION@ENTITY, as append() returns it")
    return entity, int(number)


def _version(record: ConsumerRecord) -> int | None:
    raw = dict(record.headers).get("version")
    return int(raw) if raw is not None and raw.isdigit() else None


class EntityView:
    """The fold of the events of every entity. One thread at a time uses it."""

    def __init__(self, name: str, fold: Fold, options: Mapping[str, Any]) -> None:
        self.name, self._fold = name, fold
        self._values: dict[bytes, EntityValue] = {}
        self._unapplied: deque[ConsumerRecord] = deque()  # read, and then the fold raised
        fixed = {"isolation_level": "read_committed", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        self._consumer = Consumer({**options, **fixed})
        try:
            if fold is not listed:
                self._read_snapshots()
            self._assign(name)
            self.refresh()
        except BaseException:
            self.close()
            raise

    def _assign(self, topic: str) -> list[TopicPartition]:
        places = [TopicPartition(topic, number) for number in sorted(self._consumer.partitions_for(topic))]
        self._consumer.assign(places)
        self._consumer.seek_to_beginning(*places)
        return places

    def _read_snapshots(self) -> None:
        places = self._assign(f"{self.name}.snapshots")
        for records in read_up_to(self._consumer, self._consumer.end_offsets(places)):
            for record in records:
                version = _version(record)
                if version is not None and record.key is not None and record.value is not None:
                    self._values[record.key] = EntityValue(version, msgspec.json.decode(record.value))

    # -- reading -------------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Reads what is committed at this moment."""
        self._apply(())
        places = list(self._consumer.assignment())
        for records in read_up_to(self._consumer, self._consumer.end_offsets(places)):
            self._apply(records)

    @timeout_in_ms
    def read(self, entity: str, *, after: str | None = None, timeout_ms: float = 10_000) -> EntityValue:
        """The entity as this view knows it: with `after`, a token of `append`, once it has that version."""
        wanted = 0
        if after is not None:
            named, wanted = parse_token(after)
            if named != entity:
                raise ConfigError(f"the token is of {named!r}, not of {entity!r}")
        key, deadline_s = entity.encode(), time.monotonic() + timeout_ms / 1000
        self._apply(self._consumer.poll(0))
        while (found := self._values.get(key, EntityValue(0, None))).version < wanted:
            left_ms = (deadline_s - time.monotonic()) * 1000
            if left_ms <= 0:
                raise TimedOutError(
                    f"{entity!r} has version {found.version} in this view, version {wanted} was not seen within "
                    f"{timeout_ms:g} ms; it comes when the transaction that wrote it is readable"
                )
            self._apply(self._consumer.poll(min(left_ms, POLL_MS)))
        return EntityValue(found.version, list(found.value or ())) if self._fold is listed else found

    def _apply(self, records: Iterable[ConsumerRecord]) -> None:
        """An event that the fold raises for is the next one again: the consumer has gone past it and past others."""
        self._unapplied.extend(records)
        while self._unapplied:
            self._apply_one(self._unapplied[0])
            self._unapplied.popleft()

    def _apply_one(self, record: ConsumerRecord) -> None:
        version = _version(record)
        if version is None or record.key is None:
            return  # not written by an owner
        known = self._values.get(record.key, EntityValue(0, None))
        if version > known.version + 1:
            raise StateError(
                f"{record.key!r} goes from version {known.version} to {version} at {record.topic}-"
                f"{record.partition} offset {record.offset}: events between were deleted, and no snapshot covers "
                "them. Keep events longer than the owner takes to write snapshots (retention.ms, snapshot_every)"
            )
        if version == known.version + 1:
            self._values[record.key] = EntityValue(version, self._fold(known.value, record.value or b""))

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@timeout_in_ms
def wait_for_version(token: str, version_of: Callable[[str], int | None], *, timeout_ms: float = 10_000) -> int:
    """For a projection of one's own: calls `version_of(entity)` until it has what the token names."""
    entity, wanted = parse_token(token)
    deadline_s, pauses = time.monotonic() + timeout_ms / 1000, Backoff(2, 200)
    while (found := version_of(entity) or 0) < wanted:
        if time.monotonic() >= deadline_s:
            raise TimedOutError(
                f"the projection has version {found} of {entity!r}, not {wanted}, after {timeout_ms:g} ms"
            )
        time.sleep(pauses.next_s())
    return found
