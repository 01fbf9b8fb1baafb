"""What is fetched next, and what a response means: planning, reading ahead, jumps, truncation. No network."""

from __future__ import annotations

import pytest

from semel.client.consumer.assigned_partitions import AssignedPartitions, ResetTo
from semel.client.consumer.fetcher import Fetcher, FetchPlan, end_of
from semel.client.errors import IllegalStateError
from semel.client.settings import ConsumerSettings
from semel.client.types import PartitionError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import EpochEndOffset, FetchableTopicResponse, FetchResponse, PartitionData
from semel.protocol.rows import Record, encode_batch

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
LEADERS = {A0: (1, 7), A1: (2, 8), B0: (1, 9)}
IDS = {"a": b"A" * 16, "b": b"B" * 16}


def batch(first: int, count: int, leader_epoch: int = 3) -> bytes:
    records = [Record(first + number, 0, None, b"v" * 50) for number in range(count)]
    return bytes(encode_batch(records, leader_epoch=leader_epoch))


class World:
    def __init__(self, **options: object) -> None:
        self.settings = ConsumerSettings.of(bootstrap_servers="localhost:9092", **options)
        self.assigned = AssignedPartitions()
        self.assigned.assign([A0, A1, B0])
        for state in self.assigned:
            state.seek(10)
        self.fetcher = Fetcher(self.assigned, self.settings)

    def plan(self, busy: tuple[int, ...] = (), now_s: float = 0.0) -> list[FetchPlan]:
        return self.fetcher.plan(LEADERS.get, IDS, busy, now_s)

    def answer(self, plan: FetchPlan, records: dict[TopicPartition, bytes], **fields: object):
        responses = [
            FetchableTopicResponse(
                topic_id=IDS[topic],
                partitions=[PartitionData(partition_index=index, records=memoryview(data), **fields)],
            )
            for (topic, index), data in records.items()
        ]
        return self.fetcher.absorb(plan, FetchResponse(responses=responses))


def asked(plans: list[FetchPlan]) -> dict[int, dict[TopicPartition, int]]:
    return {plan.node_id: {part: entry.offset for part, entry in plan.requested.items()} for plan in plans}


def test_one_request_for_each_broker_with_all_its_partitions() -> None:
    plans = World().plan()
    assert asked(plans) == {1: {A0: 10, B0: 10}, 2: {A1: 10}}
    (to_two,) = [plan for plan in plans if plan.node_id == 2]
    (topic,) = to_two.request.topics
    assert (topic.topic, topic.topic_id) == ("a", IDS["a"])
    assert (topic.partitions[0].current_leader_epoch, topic.partitions[0].fetch_offset) == (8, 10)


def test_busy_brokers_and_partitions_that_cannot_be_read_are_left_out() -> None:
    world = World()
    world.assigned.of(A0).paused = True
    world.assigned.of(B0).reset(ResetTo.EARLIEST)
    assert asked(world.plan()) == {2: {A1: 10}}
    assert world.plan(busy=(2,)) == []
    world.assigned.of(A1).retry_at_s = 5.0
    assert world.plan(now_s=4.9) == []
    assert asked(world.plan(now_s=5.0)) == {2: {A1: 10}}


def test_next_fetch_starts_after_the_last_batch_before_anything_was_read() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    assert world.answer(plan, {A0: batch(10, 5) + batch(15, 5)}, high_watermark=99, last_stable_offset=90) == []
    state = world.assigned.of(A0)
    assert (state.position, state.fetch_offset, state.fetch_epoch) == (10, 20, 3)
    assert (state.end_offset(True), state.end_offset(False)) == (90, 99)
    assert asked(world.plan(busy=(2,)))[1][A0] == 20
    chunk = world.fetcher.take()
    assert chunk is not None
    assert (chunk.start, chunk.next_offset) == (10, 20)
    assert world.fetcher.take() is None


def test_reading_ahead_stops_when_enough_waits() -> None:
    world = World(max_partition_fetch_bytes=100, prefetch_bytes=500)
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: batch(10, 2)})
    assert asked(world.plan(busy=(2,))) == {1: {B0: 10}}, "a partition whose records wait gets no more"
    world.answer(plan, {B0: batch(10, 20)})
    assert world.plan() == [], "nobody gets more while too much waits"
    world.fetcher.take()
    world.fetcher.take()
    assert asked(world.plan(busy=(2,))) == {1: {A0: 12, B0: 30}}


def test_answer_to_a_question_from_before_a_jump_is_ignored() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.assigned.of(A0).seek(3)
    world.answer(plan, {A0: batch(10, 5), B0: batch(10, 5)})
    assert world.assigned.of(A0).fetch_offset == 3
    chunk = world.fetcher.take()
    assert chunk is not None
    assert chunk.state.topic_partition == B0
    assert world.fetcher.take() is None


def test_old_and_new_leader_both_respond_and_records_are_read_once() -> None:
    """A request is under way to the leader of yesterday when another one leaves for the new one."""
    world = World()
    (to_old,) = world.plan(busy=(2,))
    (to_new,) = world.fetcher.plan({A0: (2, 9)}.get, IDS, (1,), 0.0)
    assert to_new.requested[A0].offset == to_old.requested[A0].offset == 10
    world.answer(to_new, {A0: batch(10, 5)})
    world.answer(to_old, {A0: batch(10, 3)})
    assert world.assigned.of(A0).fetch_offset == 15
    chunk = world.fetcher.take()
    assert chunk is not None
    assert (chunk.start, chunk.next_offset) == (10, 15)
    assert world.fetcher.take() is None, "the same offsets would be handed out twice"


def test_what_waits_for_a_partition_that_was_taken_away_is_dropped() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: batch(10, 5), B0: batch(10, 5)})
    world.assigned.assign([A1, B0])
    assert world.fetcher.take().state.topic_partition == B0  # type: ignore[union-attr]
    assert world.fetcher.take() is None
    world.assigned.assign([A0, A1, B0])
    assert world.assigned.of(A0).is_new, "a partition that comes back asks for its position anew"


def test_paused_chunks_wait_in_order() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: batch(10, 1)})
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {B0: batch(10, 1), A0: batch(11, 1)})
    world.assigned.of(A0).paused = True
    assert world.fetcher.take().state.topic_partition == B0  # type: ignore[union-attr]
    assert not world.fetcher.has_chunks
    world.assigned.of(A0).paused = False
    assert [world.fetcher.take().start for _ in range(2)] == [10, 11]  # type: ignore[union-attr]


def test_paused_chunks_stay_when_all_others_are_read_at_once() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: batch(10, 1), B0: batch(10, 1)})
    world.assigned.of(A0).paused = True
    assert [chunk.state.topic_partition for chunk in world.fetcher.readable()] == [B0]
    world.fetcher.drop_readable()
    assert world.fetcher.readable() == []
    world.assigned.of(A0).paused = False
    assert [chunk.state.topic_partition for chunk in world.fetcher.readable()] == [A0]


def test_errors_of_a_partition_do_not_harm_the_others() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    (trouble,) = world.answer(plan, {A0: b""}, error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert (trouble.state.topic_partition, trouble.code) == (A0, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert world.answer(plan, {B0: batch(10, 1)}) == []
    assert world.fetcher.has_chunks


def test_cut_log_sends_the_reader_back_to_where_the_histories_part() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: b""}, diverging_epoch=EpochEndOffset(epoch=2, end_offset=6))
    assert world.assigned.of(A0).position == 6


def test_cut_log_does_not_skip_what_was_read_ahead() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: batch(10, 5, leader_epoch=2) + batch(15, 5, leader_epoch=3)})
    (plan,) = world.plan(busy=(2,))
    world.answer(plan, {A0: b""}, diverging_epoch=EpochEndOffset(epoch=2, end_offset=15))
    state = world.assigned.of(A0)
    assert (state.position, state.fetch_offset) == (10, 10), "records 10 to 14 were fetched, not handed out, and stand"
    assert not world.fetcher.has_chunks, "records 15 to 19 are gone"


def test_answer_without_a_whole_batch_says_which_limit_to_raise() -> None:
    world = World()
    (plan,) = world.plan(busy=(2,))
    with pytest.raises(PartitionError, match=r"max\.partition\.fetch\.bytes"):
        world.answer(plan, {A0: batch(10, 5)[:-1]})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (batch(5, 3), (8, 3)),
        (batch(5, 3) + batch(8, 2, leader_epoch=4), (10, 4)),
        (batch(5, 3) + batch(8, 2)[:70], (8, 3)),
        (batch(5, 3)[:60], None),
    ],
)
def test_end_of_an_answer_is_after_its_last_whole_batch(data: bytes, expected: tuple[int, int] | None) -> None:
    assert end_of(memoryview(data)) == expected


def test_unassigned_partition_is_named_with_what_is_assigned() -> None:
    with pytest.raises(IllegalStateError, match=r"c-0 is not assigned.*a-0, a-1, b-0"):
        World().assigned.of(TopicPartition("c", 0))


# --- the memory of frames ---
