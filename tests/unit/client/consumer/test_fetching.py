"""Where a consumer starts, what it looks up, and what an error does to what was read ahead. No network."""

from __future__ import annotations

from typing import Any

import pytest

from semel.client.consumer.assigned_partitions import AssignedPartitions, ResetTo
from semel.client.consumer.fetcher import FetchPlan
from semel.client.consumer.fetching import CommittedLookUp, FetchingCore, OffsetsLookUp, RetryBudget
from semel.client.errors import ConnectionFailedError, TimedOutError, error_of
from semel.client.group.offset_requests import FoundOffset
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.types import NoOffsetError, OffsetAndMetadata, OffsetOutOfRangeError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import MetadataResponse, MetadataResponsePartition, MetadataResponseTopic
from semel.protocol.messages.records import FetchableTopicResponse, FetchResponse, PartitionData
from semel.protocol.rows import Record, encode_batch

PLACE = TopicPartition("t", 0)


class World:
    def __init__(self, reset: str = "earliest", group_id: str | None = None) -> None:
        self.now_s = 100.0
        settings = ConsumerSettings.of(bootstrap_servers="broker:1", auto_offset_reset=reset, group_id=group_id)
        self.metadata = Metadata()
        self.assigned = AssignedPartitions()
        self.assigned.assign([PLACE])
        self.budget = RetryBudget(60)
        self.core = FetchingCore(settings, self.assigned, self.metadata, self.budget)
        self.state = self.assigned.of(PLACE)
        self.learn(leader=1)

    def learn(self, leader: int, topic_id: bytes = b"T" * 16) -> None:
        topic = MetadataResponseTopic(
            name="t", topic_id=topic_id, partitions=[MetadataResponsePartition(leader_id=leader, leader_epoch=leader)]
        )
        self.metadata.update(MetadataResponse(topics=[topic]), self.now_s)

    def respond(self, **fields: Any) -> None:
        (plan,) = self.plans()
        data = PartitionData(partition_index=0, **fields)
        response = FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[data])])
        self.core.responded(plan, response, self.now_s)

    def plans(self) -> list[FetchPlan]:
        return self.core.plan([], self.now_s)


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
def test_out_of_range_offset_does_not_drop_what_was_read_ahead(reset: str) -> None:
    """The records from before the missing offset are returned first; then the reset, or the error, comes."""
    world = World(reset)
    world.state.seek(0)
    world.respond(records=memoryview(encode_batch([Record(number, 0, None, b"v") for number in range(5)])))
    world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    assert world.state.position == 0
    assert world.plans() == []  # asked again a little later
    chunk = world.core.fetcher.take()
    assert chunk is not None
    assert chunk.next_offset == 5
    world.state.position = chunk.next_offset
    world.now_s += 10
    if reset == "none":
        with pytest.raises(OffsetOutOfRangeError, match="no offset 5"):
            world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    else:
        world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        assert world.state.position is None
        assert world.state.reset_to == {"earliest": ResetTo.EARLIEST, "latest": ResetTo.LATEST}[reset]


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_topic_that_was_created_again_is_read_from_its_begin(reset: str) -> None:
    """Everything in it is newer than what was read, whatever offset that had."""
    world = World(reset)
    world.state.seek(0)
    world.respond(records=memoryview(encode_batch([Record(number, 0, None, b"v") for number in range(5)])))
    world.learn(leader=1, topic_id=b"U" * 16)
    assert world.plans() == [], "no offset of the deleted topic is fetched from the new one"
    chunk = world.core.fetcher.take()
    assert chunk is not None, "what was read ahead of the deleted topic is returned"
    world.state.position = chunk.next_offset
    world.now_s = world.core.next_retry_s()
    assert world.plans() == []
    assert world.state.reset_to == ResetTo.EARLIEST
    world.now_s = world.core.next_retry_s()
    assert isinstance(world.core.unresolved(world.now_s), OffsetsLookUp)
    world.state.seek(0)
    (plan,) = world.plans()
    assert plan.requested[PLACE].offset == 0


def test_a_topic_that_was_created_again_is_left_to_the_program_where_resets_are() -> None:
    world = World("none")
    world.state.seek(7)
    assert len(world.plans()) == 1
    world.learn(leader=1, topic_id=b"U" * 16)
    for _ in range(2):
        with pytest.raises(OffsetOutOfRangeError, match="deleted and created again"):
            world.plans()
    world.state.seek_by_program(3)
    world.now_s += 10
    assert len(world.plans()) == 1


def test_leader_is_in_doubt_after_it_said_that_it_is_none() -> None:
    world = World()
    world.state.seek(0)
    assert world.core.stale_leaders(world.now_s) is None
    world.respond(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert world.core.take_doubted() == [PLACE]
    assert world.core.take_doubted() == []
    world.metadata.forget("t")
    assert world.core.stale_leaders(world.now_s) is None, "a little later"
    world.now_s = world.state.retry_at_s
    assert world.plans() == [], "not from the leader that is in doubt"
    look_up = world.core.stale_leaders(world.now_s)
    assert look_up is not None
    assert look_up.topics == ["t"]
    world.learn(leader=2)
    world.core.leaders_found(look_up, world.now_s, world.now_s)
    assert [plan.node_id for plan in world.plans()] == [2]


def test_all_leaders_of_a_request_without_a_response_are_in_doubt() -> None:
    world = World()
    world.state.seek(0)
    (plan,) = world.plans()
    world.core.failed(plan, ConnectionFailedError("cut"), world.now_s, world.now_s)
    assert world.core.take_doubted() == [PLACE]
    assert world.core.next_retry_s() > world.now_s


def test_partition_starts_at_the_group_s_committed_offset() -> None:
    world = World(group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    assert (look_up.group_id, look_up.partitions) == ("g", [PLACE])
    world.core.committed_found(look_up, {PLACE: OffsetAndMetadata(7, "", 3)})
    assert (world.state.position, world.state.fetch_epoch) == (7, 3)
    assert world.core.unresolved(world.now_s) is None


@pytest.mark.parametrize(("reset", "sought"), [("earliest", ResetTo.EARLIEST), ("latest", ResetTo.LATEST)])
def test_partition_without_a_committed_offset_starts_by_auto_offset_reset(reset: str, sought: ResetTo) -> None:
    world = World(reset, group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    world.core.committed_found(look_up, {})
    offsets = world.core.unresolved(world.now_s)
    assert isinstance(offsets, OffsetsLookUp)
    assert offsets.wanted == {PLACE: sought}
    world.core.offsets_found(offsets, {PLACE: FoundOffset(4, -1, 1)}, {}, world.now_s, world.now_s)
    assert world.state.position == 4


def test_partition_without_any_offset_is_left_to_the_program() -> None:
    world = World("none", group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    with pytest.raises(NoOffsetError, match="no committed offset for t-0"):
        world.core.committed_found(look_up, {})


def test_offset_that_was_looked_up_before_a_seek_is_not_used() -> None:
    world = World(group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    world.state.seek(11)
    world.core.committed_found(look_up, {PLACE: OffsetAndMetadata(7)})
    assert world.state.position == 11


def test_pending_offset_of_a_transaction_is_waited_for() -> None:
    world = World(group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    unstable = error_of(ErrorCode.UNSTABLE_OFFSET_COMMIT, "reading")
    world.core.committed_not_found(look_up, unstable, world.now_s, world.now_s)
    assert world.core.unresolved(world.now_s) is None
    assert world.core.unresolved(world.core.next_retry_s()) is not None
    world.budget.check(world.now_s + 1_000, poll_ends=True, was_reached=True)  # it does not count as a failure


@pytest.mark.parametrize("code", [ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID])
def test_member_that_is_not_in_its_epoch_waits_for_the_next_heartbeat(code: ErrorCode) -> None:
    world = World(group_id="g")
    look_up = world.core.unresolved(world.now_s)
    assert isinstance(look_up, CommittedLookUp)
    world.core.committed_not_found(look_up, error_of(code, "reading"), world.now_s, world.now_s)
    assert world.core.unresolved(world.core.next_retry_s()) is not None
    world.budget.check(world.now_s + 1_000, poll_ends=True, was_reached=True)


def test_what_fails_for_longer_than_the_budget_is_raised() -> None:
    world = World()
    world.state.seek(0)
    (plan,) = world.plans()
    world.core.failed(plan, ConnectionFailedError("cut"), world.now_s, world.now_s)
    world.budget.check(world.now_s + 59, poll_ends=True, was_reached=True)
    with pytest.raises(TimedOutError, match="nothing could be read for 60 s; the last try: cut"):
        world.budget.check(world.now_s + 60, poll_ends=False, was_reached=True)
