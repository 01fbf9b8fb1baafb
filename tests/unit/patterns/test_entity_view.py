"""What a view has of its entities when something goes wrong while it reads, without a broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from semel.client.errors import ConfigError, TimedOutError
from semel.client.settings import ConsumerSettings
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.entities import EntityView, wait_for_version
from semel.patterns.topics import read_up_to

PLACE = TopicPartition("accounts", 0)


class Topic:
    """A consumer of one partition, whose polls return what it is given, one list each."""

    def __init__(self, polls: Iterable[list[ConsumerRecord]], **options: Any) -> None:
        self.settings = ConsumerSettings.of({"bootstrap_servers": "localhost:9092", **options})
        self._polls = deque(polls)
        self._end = sum(map(len, self._polls))
        self._position = 0

    def poll(self, timeout_ms: float) -> list[ConsumerRecord]:
        found = self._polls.popleft() if self._polls else []
        self._position += len(found)
        return found

    def position(self, place: TopicPartition) -> int:
        return self._position

    def assignment(self) -> set[TopicPartition]:
        return {PLACE}

    def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self._end)


def event(offset: int, entity: bytes, version: int, value: bytes) -> ConsumerRecord:
    return ConsumerRecord("accounts", 0, offset, 0, entity, value, (("version", b"%d" % version),))


@pytest.fixture
def view() -> EntityView:
    polled = [event(0, b"a", 1, b"1"), event(1, b"b", 1, b"odd"), event(2, b"b", 2, b"2"), event(3, b"c", 1, b"3")]
    made = EntityView.__new__(EntityView)
    made._consumer = Topic([polled])  # type: ignore[assignment]
    made._values, made._unapplied = {}, deque()
    return made


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_events_behind_one_that_the_fold_raises_for_are_not_lost(view: EntityView, error: type[BaseException]) -> None:
    """Those of other entities were missing without a word: such a view was behind for good."""

    def fails(total: Any, event: bytes) -> int:
        if event == b"odd":
            raise error
        return (total or 0) + int(event)

    view._fold = fails
    with pytest.raises(error):
        view.refresh()
    with pytest.raises(error):
        view.read("c")
    with pytest.raises(error):
        view.refresh()
    view._fold = lambda total, event: (total or 0) + (0 if event == b"odd" else int(event))
    view.refresh()
    assert [view.read(name) for name in "abc"] == [(1, 1), (2, 2), (1, 3)]


def test_reading_up_to_the_end_ends_when_a_broker_has_gone() -> None:
    """It polled for ever."""
    topic = Topic([[event(0, b"a", 1, b"1")]], default_api_timeout_ms=100, request_timeout_ms=50)
    with pytest.raises(TimedOutError, match=r"nothing was read from accounts for 0.1 s, with 1 offsets still to be"):
        for _ in read_up_to(topic, {PLACE: 2}):  # type: ignore[arg-type]
            pass
    assert [len(polled) for polled in read_up_to(Topic([[], [event(0, b"a", 1, b"1")]]), {PLACE: 1})] == [0, 1]  # type: ignore[arg-type]


def test_waiting_for_a_version_ends_or_is_refused() -> None:
    with pytest.raises(ConfigError, match="a timeout is nan"):
        wait_for_version("3@acc-7", lambda _: 2, timeout_ms=float("nan"))
    with pytest.raises(TimedOutError, match="version 2 of 'acc-7', not 3"):
        wait_for_version("3@acc-7", lambda _: 2, timeout_ms=0)
