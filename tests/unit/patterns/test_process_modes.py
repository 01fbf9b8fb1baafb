"""When each guarantee commits offsets, and where it goes back to after an error: the group's committed offsets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from semel.client.errors import CommitUncertainError, RetriableError, TimedOutError
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.process_decisions import PostgresAndTopics, SettledId
from semel.patterns.process_modes import MODES, SETTLE_TRIES, Mode
from semel.patterns.process_output import Emitter
from semel.sinks.postgres.settings import Postgres

PLACE = TopicPartition("in", 0)
NEW = TopicPartition("in", 1)
READ = 10


class Script:
    """A consumer and a producer that note the order of what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.offsets = {PLACE: READ}
        self.group: dict[TopicPartition, OffsetAndMetadata] = {}
        self.pending: dict[TopicPartition, OffsetAndMetadata] = {}
        self.loses_responses = False
        self.delivery_error: Exception | None = None

    # the consumer
    def assignment(self) -> set[TopicPartition]:
        return set(self.offsets)

    def consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {place: OffsetAndMetadata(offset) for place, offset in self.offsets.items()}

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        return {place: self.group[place] for place in partitions if place in self.group}

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.offsets[place] = offset

    def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        self.events.append("offsets committed")
        self.group |= offsets

    def group_metadata(self) -> str:
        return "group"

    # the producer
    def send(self, *_: Any) -> Script:
        self.events.append("sent")
        return self

    def result(self) -> None:
        """Of a delivery."""
        if self.delivery_error is not None:
            raise self.delivery_error
        self.events.append("delivered")

    def init_transactions(self) -> None:
        self.events.append("id taken over")
        self.pending = {}

    def begin_transaction(self) -> None:
        pass

    def send_offsets_to_transaction(self, offsets: dict[TopicPartition, OffsetAndMetadata], _: str) -> None:
        self.pending = dict(offsets)

    def commit_transaction(self) -> None:
        self.events.append("transaction committed")
        self.group |= self.pending
        if self.loses_responses:
            raise CommitUncertainError("the response was lost")

    def abort_transaction(self, *, timeout_ms: float) -> None:
        self.events.append("abort sent")
        raise TimedOutError("the broker is down")

    def close(self, *, timeout_ms: float) -> None:
        pass


def made(script: Script, guarantee: str) -> Mode:
    any_script: Any = script
    mode = MODES[guarantee](any_script, lambda: any_script, Emitter(lambda record: record, "out", False))
    mode.start()
    return mode


def take(mode: Mode) -> None:
    mode.take([ConsumerRecord("in", 0, offset, 0, None, b"") for offset in range(READ)], {PLACE: 0})


def test_undo_goes_to_the_committed_offsets_when_the_commit_had_succeeded() -> None:
    """All responses were lost: from the beginning of the unit of work, its records would be written twice."""
    script = Script()
    mode = made(script, "exactly_once")
    take(mode)
    script.loses_responses = True
    with pytest.raises(CommitUncertainError) as caught:
        mode.settle()
    assert script.events.count("transaction committed") == SETTLE_TRIES
    mode.failed, script.loses_responses = caught.value, False
    mode.undo()
    assert script.offsets == {PLACE: READ}


def test_loop_that_ends_does_not_wait_for_another_producer_after_its_abort_failed() -> None:
    """As long as the broker is down, that would keep a loop that is to stop for another minute."""
    script = Script()
    mode = made(script, "exactly_once")
    for end, then in ((mode.drop, ["id taken over"]), (mode.abandon, [])):
        take(mode)
        script.events.clear()
        end()
        assert script.events == ["abort sent", *then]


def test_loop_with_tables_and_topics_that_ends_takes_its_id_over_only_to_settle_what_may_be_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: Any = Script()
    monkeypatch.setattr(PostgresAndTopics, "_own", lambda mode: script.events.append("id taken over"))
    mode = PostgresAndTopics(
        script, Emitter(lambda record: record, None, False), Postgres("dbname=nowhere"), "app", None, "id", script
    )
    mode._owned = SettledId(script, 1)
    mode._is_open = True
    mode.abandon()
    mode.close()
    assert script.events == ["abort sent"]
    mode._in_doubt = True
    mode.abandon()
    assert script.events == ["abort sent", "id taken over"]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_undo_goes_to_the_committed_offsets_behind_the_unit_of_work(guarantee: str) -> None:
    """A partition that has moved on without a commit is read from the group's offset, not from where the unit began."""
    script = Script()
    script.group = {PLACE: OffsetAndMetadata(3)}
    mode = made(script, guarantee)
    mode.set_aside({PLACE: 5, NEW: 7})
    script.offsets = {PLACE: READ, NEW: READ}
    mode.failed = RetriableError("the coordinator is loading")
    mode.undo()
    assert script.offsets == {PLACE: 3, NEW: 7}, "where nothing is committed, the beginning of the unit"


def test_at_least_once_commits_offsets_only_after_every_delivery() -> None:
    script = Script()
    mode = made(script, "at_least_once")
    take(mode)
    assert script.events == ["sent"] * READ
    mode.settle()
    assert script.events == ["sent"] * READ + ["delivered"] * READ + ["offsets committed"]


def test_at_least_once_commits_nothing_when_a_delivery_failed() -> None:
    script = Script()
    mode = made(script, "at_least_once")
    take(mode)
    script.delivery_error = RetriableError("not enough replicas")
    with pytest.raises(RetriableError):
        mode.settle()
    assert script.group == {}
    mode.failed, script.delivery_error = RetriableError("the same"), None
    mode.undo()
    assert script.offsets == {PLACE: 0}, "its records are read again"


def test_at_most_once_commits_offsets_before_anything_is_sent() -> None:
    script = Script()
    mode = made(script, "at_most_once")
    take(mode)
    assert script.events == ["offsets committed", *["sent"] * READ, *["delivered"] * READ]
