"""Offsets: who may commit, what is seen, what transactions hold back, and what a crash leaves."""

from __future__ import annotations

import asyncio

import pytest

from semel.broker.groups import Committer, OffsetToCommit
from semel.broker.groups.classic_group import GroupError
from semel.broker.groups.classic_group import GroupState as S
from semel.broker.groups.consumer.planner import Beat
from semel.broker.turns import MANY
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.groups import ConsumerGroupHeartbeatRequest
from tests.unit.broker_groups.world import REBALANCE_MS, SESSION_MS, World, in_world

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS


# -- plain commits -----------------------------------------------------------------------------------------------------
@in_world()
async def test_simple_consumer_commits_without_a_group(world: World) -> None:
    assert await world.commit(5) is E.NONE
    assert (world.committed(), world.state) == (5, S.EMPTY)


@in_world()
async def test_commit_for_a_group_that_is_not_there_needs_no_generation(world: World) -> None:
    member = Committer(3, "m")
    assert await world.commit(5, member, version=9) is E.GROUP_ID_NOT_FOUND
    assert await world.commit(5, member, version=8) is E.ILLEGAL_GENERATION
    assert world.groups.find("g") is None


@in_world()
async def test_only_members_of_the_generation_commit_to_a_live_group(world: World) -> None:
    (leader,) = await world.stable()
    generation = leader.generation_id
    assert await world.commit(5, Committer(generation, leader.member_id)) is E.NONE
    assert await world.commit(6, Committer(generation - 1, leader.member_id)) is E.ILLEGAL_GENERATION
    assert await world.commit(6, Committer(generation, "stranger")) is E.UNKNOWN_MEMBER_ID
    assert await world.commit(6, Committer(generation, leader.member_id, "i")) is E.UNKNOWN_MEMBER_ID
    assert await world.commit(6, Committer()) is E.UNKNOWN_MEMBER_ID
    assert world.committed() == 5


@in_world()
async def test_member_commits_until_the_next_generation_is_formed(world: World) -> None:
    leader, follower = await world.stable(2)
    who = Committer(leader.generation_id, leader.member_id)
    await world.join(follower.member_id, topics=["u"])
    assert (world.state, await world.commit(5, who)) == (S.PREPARING, E.NONE)
    again = await world.join(leader.member_id)
    assert world.state is S.COMPLETING
    assert await world.commit(6, who) is E.ILLEGAL_GENERATION
    assert await world.commit(6, Committer(again.result().generation_id, leader.member_id)) is E.REBALANCE_IN_PROGRESS
    assert world.committed() == 5


@in_world()
async def test_commit_is_a_sign_of_life(world: World) -> None:
    (leader,) = await world.stable()
    for _ in range(3):
        await world.pass_time(SESSION_MS - 1)
        assert await world.commit(5, Committer(leader.generation_id, leader.member_id)) is E.NONE
    assert world.state is S.STABLE


@in_world()
async def test_commit_is_answered_and_seen_only_when_it_is_durable(world: World) -> None:
    world.log.held = []
    committing = asyncio.create_task(world.commit(5))
    await world.settle()
    assert (committing.done(), world.committed(), world.groups.find("g")) == (False, None, None)
    world.log.held[0].set_result(None)
    assert await committing is E.NONE
    assert world.committed() == 5


@in_world()
async def test_commits_are_applied_in_the_order_of_the_log(world: World) -> None:
    world.log.held = []
    first, second = asyncio.create_task(world.commit(5)), asyncio.create_task(world.commit(6))
    await world.settle()
    world.log.held[1].set_result(None)
    await world.settle()
    assert (second.done(), world.committed()) == (False, None)
    world.log.held[0].set_result(None)
    await asyncio.gather(first, second)
    assert world.committed() == 6


@in_world()
async def test_commit_goes_on_when_its_client_is_gone(world: World) -> None:
    world.log.held = []
    committing = asyncio.create_task(world.commit(5))
    await world.settle()
    committing.cancel()
    await world.settle()
    world.log.held[0].set_result(None)
    await world.settle()
    assert world.committed() == 5


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_commit_that_cannot_be_written_is_not_acknowledged_nor_seen(world: World, moment: str) -> None:
    await world.commit(4)
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    assert await world.commit(5) is E.NOT_COORDINATOR
    setattr(world.log, moment, None)
    await world.settle()  # after a failed fsync the partition is read again
    assert world.committed() == 4
    assert await world.commit(6) is E.NONE
    assert world.committed() == 6


@in_world()
async def test_offsets_survive_a_crash(world: World) -> None:
    (leader,) = await world.stable()
    who = Committer(leader.generation_id, leader.member_id)
    commits = [OffsetToCommit("t", 0, 5, 2, "note", b"T" * 16), OffsetToCommit("t", 1, 7)]
    assert (await world.groups.commits.commit("g", who, commits)).code is E.NONE
    await world.commit(9, group="other", topic="u")
    await world.crash_and_restart()
    committed = world.groups.commits.committed("g", "t", 0)
    assert committed is not None
    assert (committed.offset, committed.leader_epoch, committed.metadata, committed.topic_id) == (
        5,
        2,
        "note",
        b"T" * 16,
    )
    assert (world.committed(partition=1), world.committed("other", "u")) == (7, 9)
    assert await world.commit(6, who) is E.NONE  # the generation survived as well


@in_world()
async def test_group_goes_on_after_a_crash_without_a_rebalance(world: World) -> None:
    leader, follower = await world.stable(2)
    await world.crash_and_restart()
    assert (world.state, world.beat(leader), world.beat(follower)) == (S.STABLE, E.NONE, E.NONE)
    synced = (await world.sync(follower)).result()
    assert synced.assignment == f"share of {follower.member_id}".encode()


@in_world()
async def test_member_that_does_not_come_back_after_a_crash_is_out_after_its_session_time(world: World) -> None:
    leader, _ = await world.stable(2)
    await world.crash_and_restart()
    await world.pass_time(SESSION_MS - 1)
    assert world.beat(leader) is E.NONE
    await world.pass_time(1)
    assert (list(world.members), world.state) == ([leader.member_id], S.PREPARING)


@in_world()
async def test_offset_of_an_earlier_topic_with_the_same_name_is_not_shown(world: World) -> None:
    await world.groups.commits.commit("g", Committer(), [OffsetToCommit("t", 0, 5, topic_id=b"1" * 16)])
    assert world.groups.commits.committed("g", "t", 0, b"2" * 16) is None
    assert world.groups.commits.committed("g", "t", 0, b"1" * 16) is not None
    assert world.groups.commits.committed("g", "t", 0) is not None


# -- inside transactions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("crash", ["", "before the marker", "after the marker"])
@in_world()
async def test_transactional_offset_is_pending_until_the_marker(world: World, commit: bool, crash: str) -> None:
    await world.commit(1)
    assert await world.txn_commit(5) is E.NONE
    if crash == "before the marker":
        await world.crash_and_restart()
    assert world.groups.commits.is_pending("g", "t", 0)
    assert world.committed() == 1
    world.end_transaction(commit=commit)
    if crash == "after the marker":
        await world.crash_and_restart()
    assert not world.groups.commits.is_pending("g", "t", 0)
    assert world.committed() == (5 if commit else 1)


@pytest.mark.parametrize("crash", [False, True])
@in_world()
async def test_later_plain_commit_wins_over_a_transaction_that_ends_after_it(world: World, crash: bool) -> None:
    await world.txn_commit(5)
    await world.commit(9)
    world.end_transaction(commit=True)
    if crash:
        await world.crash_and_restart()
    assert world.committed() == 9


@in_world()
async def test_later_transaction_wins_over_an_earlier_one_that_ends_after_it(world: World) -> None:
    await world.txn_commit(5, producer_id=1)
    await world.txn_commit(6, producer_id=2)
    world.end_transaction(2, commit=True)
    assert world.groups.commits.is_pending("g", "t", 0)
    world.end_transaction(1, commit=True)
    assert (world.committed(), world.groups.commits.is_pending("g", "t", 0)) == (6, False)


@in_world()
async def test_marker_ends_only_the_offsets_of_its_partition(world: World) -> None:
    other = next(
        name for name in map(str, range(99)) if world.groups.partition_for(name) != world.groups.partition_for("g")
    )
    await world.txn_commit(5)
    await world.txn_commit(6, group=other)
    world.end_transaction(commit=True)
    assert (world.committed(), world.committed(other)) == (5, None)
    assert world.groups.commits.is_pending(other, "t", 0)
    world.end_transaction(commit=False, group=other)
    assert (world.committed(other), world.groups.commits.is_pending(other, "t", 0)) == (None, False)


@in_world()
async def test_transaction_of_a_member_of_an_older_generation_is_refused(world: World) -> None:
    (leader,) = await world.stable()
    generation, member = leader.generation_id, leader.member_id
    assert await world.txn_commit(5, generation=generation, member_id=member) is E.NONE
    assert await world.txn_commit(5, generation=generation - 1, member_id=member) is E.ILLEGAL_GENERATION
    assert await world.txn_commit(5, generation=generation, member_id="zombie") is E.UNKNOWN_MEMBER_ID
    assert await world.txn_commit(5, generation=generation, member_id=member, group_instance_id="i") is (
        E.UNKNOWN_MEMBER_ID
    )
    assert await world.txn_commit(5) is E.NONE  # a client that does not tell who it is
    assert await world.txn_commit(5, group="new", generation=1, member_id="m") is E.ILLEGAL_GENERATION
    assert await world.txn_commit(5, group="new") is E.NONE


@in_world()
async def test_member_may_commit_in_a_transaction_during_a_rebalance(world: World) -> None:
    leader, follower = await world.stable(2)
    who = {"generation": leader.generation_id, "member_id": leader.member_id}
    await world.join(follower.member_id, topics=["u"])
    assert await world.txn_commit(5, **who) is E.NONE
    again = await world.join(leader.member_id)
    assert world.state is S.COMPLETING
    assert await world.txn_commit(5, generation=again.result().generation_id, member_id=leader.member_id) is E.NONE
    assert await world.txn_commit(5, **who) is E.ILLEGAL_GENERATION


@pytest.mark.parametrize("begins_again", [False, True])
@in_world()
async def test_offsets_do_not_outlive_a_transaction_that_ended_between_two_of_their_batches(
    world: World, begins_again: bool
) -> None:
    """A request of very many offsets whose client gave up and aborted: no second transaction that nobody ends, and none
    of its offsets in the next one."""
    world.log.held = []
    many = [OffsetToCommit("t", partition, 5) for partition in range(2 * MANY)]
    committing = asyncio.create_task(world.groups.commits.commit("g", Committer(), many, producer=(77, 0)))
    await world.settle()
    world.end_transaction(commit=False)
    held, world.log.held = world.log.held, None
    following = [asyncio.create_task(world.txn_commit(1))] if begins_again else []
    await world.settle()
    held[0].set_result(None)
    assert await committing == (MANY, E.INVALID_TXN_STATE)
    assert await asyncio.gather(*following) == [E.NONE] * begins_again
    assert not world.groups.commits.is_pending("g", "t", MANY)
    world.end_transaction(commit=True)
    assert world.committed(partition=MANY) is None


@in_world()
async def test_stable_read_waits_for_offsets_that_are_on_their_way_to_the_disk(world: World) -> None:
    """A consumer that takes over must not read past a commit that its predecessor was allowed to make."""
    world.log.held = []
    committing = asyncio.create_task(world.txn_commit(5))
    await world.settle()
    reading = asyncio.create_task(world.groups.commits.settled("g"))
    await world.settle()
    assert not reading.done()
    world.log.held[0].set_result(None)
    await asyncio.gather(committing, reading)
    assert world.groups.commits.is_pending("g", "t", 0)


@in_world()
async def test_marker_that_overtakes_the_answer_of_a_commit_still_ends_it(world: World) -> None:
    world.log.held = []
    committing = asyncio.create_task(world.txn_commit(5))
    await world.settle()
    world.end_transaction(commit=True)  # its record comes after the commit's in the log
    world.log.held[0].set_result(None)
    await committing
    await world.settle()
    assert (world.committed(), world.groups.commits.is_pending("g", "t", 0)) == (5, False)


@in_world()
async def test_marker_of_a_producer_without_offsets_does_nothing(world: World) -> None:
    await world.txn_commit(5, producer_id=1)
    world.end_transaction(2, commit=True)
    assert world.groups.commits.is_pending("g", "t", 0)


# -- deleting ----------------------------------------------------------------------------------------------------------
@in_world()
async def test_offsets_of_an_empty_group_can_be_deleted_durably(world: World) -> None:
    await world.commit(5)
    await world.commit(6, partition=1)
    assert await world.groups.commits.delete("g", [("t", 0), ("t", 9)]) == {("t", 0): E.NONE, ("t", 9): E.NONE}
    await world.crash_and_restart()
    assert (world.committed(), world.committed(partition=1)) == (None, 6)


@in_world()
async def test_offsets_of_subscribed_topics_cannot_be_deleted(world: World) -> None:
    (leader,) = await world.stable(topics=["t"])
    who = Committer(leader.generation_id, leader.member_id)
    await world.commit(5, who)
    await world.commit(5, who, topic="u")
    codes = await world.groups.commits.delete("g", [("t", 0), ("u", 0)])
    assert codes == {("t", 0): E.GROUP_SUBSCRIBED_TO_TOPIC, ("u", 0): E.NONE}
    assert (world.committed(), world.committed(topic="u")) == (5, None)


@pytest.mark.parametrize(("group", "code"), [("", E.INVALID_GROUP_ID), ("none", E.GROUP_ID_NOT_FOUND)])
@in_world()
async def test_deleting_offsets_needs_a_group(world: World, group: str, code: E) -> None:
    with pytest.raises(GroupError) as refused:
        await world.groups.commits.delete(group, [("t", 0)])
    assert refused.value.code is code


@in_world()
async def test_offsets_of_a_live_group_of_another_protocol_cannot_be_deleted(world: World) -> None:
    await world.stable(protocol_type="connect")
    with pytest.raises(GroupError) as refused:
        await world.groups.commits.delete("g", [("t", 0)])
    assert refused.value.code is E.NON_EMPTY_GROUP


@in_world()
async def test_deleted_offset_is_not_brought_back_by_a_transaction(world: World) -> None:
    await world.txn_commit(5)
    await world.groups.commits.delete("g", [("t", 0)])
    world.end_transaction(commit=True)
    assert world.committed() is None
    await world.crash_and_restart()
    assert world.committed() is None


@pytest.mark.parametrize("crash", [False, True])
@in_world()
async def test_group_without_members_can_be_deleted_durably(world: World, crash: bool) -> None:
    (leader,) = await world.stable()
    await world.commit(5, Committer(leader.generation_id, leader.member_id))
    assert await world.groups.delete("g") is E.NON_EMPTY_GROUP
    await world.leave(leader.member_id)
    assert await world.groups.delete("g") is E.NONE
    if crash:
        await world.crash_and_restart()
    assert world.groups.find("g") is None
    assert world.committed() is None
    assert await world.groups.delete("g") is E.GROUP_ID_NOT_FOUND


async def join_and_leave_consumer_group(world: World) -> None:
    joins = ConsumerGroupHeartbeatRequest(
        "g", "m", 0, rebalance_timeout_ms=1, subscribed_topic_names=["t"], topic_partitions=[]
    )
    for beat in (joins, ConsumerGroupHeartbeatRequest("g", "m", -1)):
        await world.groups.consumers.heartbeat(Beat(beat, "c", "/127.0.0.1"))


@pytest.mark.parametrize("kind", ["classic", "consumer"])
@in_world()
async def test_an_offset_that_is_on_its_way_to_the_log_goes_with_its_group(world: World, kind: str) -> None:
    """It came before the deletion: it must not stay behind, under a group that nobody sees."""
    if kind == "classic":
        await world.commit(1)
    else:
        await join_and_leave_consumer_group(world)
    world.log.held = []
    committing = asyncio.create_task(world.commit(2, partition=1))
    await world.settle()
    deleting = asyncio.create_task(world.groups.delete("g"))
    while not (committing.done() and deleting.done()):
        await world.settle()
        if world.log.held:
            world.log.held.pop(0).set_result(None)
    assert (committing.result(), deleting.result()) == (E.NONE, E.NONE)
    for _ in range(2):
        assert (world.committed(), world.committed(partition=1)) == (None, None)
        assert world.groups.find("g") is None
        assert world.groups.find_consumer_group("g") is None
        await world.crash_and_restart()


async def commit_while_expiring(world: World) -> None:
    """Offset 2, whose record is still being written when old offsets and groups are looked for."""
    world.log.held = []
    committing = asyncio.create_task(world.commit(2))
    await world.settle()
    expiring = asyncio.create_task(world.groups.expire_now())
    await world.settle()
    while not (committing.done() and expiring.done()):
        if world.log.held:
            world.log.held.pop(0).set_result(None)
        await world.settle()
    assert committing.result() is E.NONE


@pytest.mark.parametrize("kind", ["classic", "consumer"])
@in_world()
async def test_an_offset_that_is_on_its_way_to_the_log_does_not_expire_with_the_one_before_it(
    world: World, kind: str
) -> None:
    if kind == "consumer":
        await join_and_leave_consumer_group(world)
    await world.commit(1)
    world.clock.advance_ms(WEEK_MS + 1)
    await commit_while_expiring(world)
    assert world.committed() == 2


@pytest.mark.parametrize("kind", ["classic", "consumer"])
@in_world()
async def test_a_group_that_commits_while_it_expires_stays(world: World, kind: str) -> None:
    if kind == "classic":
        await world.commit(1)
        await world.groups.commits.delete("g", [("t", 0)])
    else:
        await join_and_leave_consumer_group(world)
    await commit_while_expiring(world)
    world.log.held = None
    for _ in range(2):
        assert world.committed() == 2
        assert world.groups.find("g") or world.groups.find_consumer_group("g")
        await world.crash_and_restart()


@in_world()
async def test_nobody_joins_a_group_that_is_being_deleted(world: World) -> None:
    await world.commit(5)
    world.log.held = []
    deleting = asyncio.create_task(world.groups.delete("g"))
    await world.settle()
    assert (await world.join()).result().error_code == E.COORDINATOR_NOT_AVAILABLE
    assert await world.commit(6) is E.COORDINATOR_NOT_AVAILABLE
    world.log.held[0].set_result(None)
    assert await deleting is E.NONE


@in_world()
async def test_group_whose_deletion_cannot_be_written_lives_on(world: World) -> None:
    await world.commit(5)
    world.log.lose = E.KAFKA_STORAGE_ERROR
    assert await world.groups.delete("g") is E.NOT_COORDINATOR
    world.log.lose = None
    await world.settle()  # the partition is read again
    assert (world.state, world.committed()) == (S.EMPTY, 5)
    assert await world.commit(6) is E.NONE


@pytest.mark.parametrize("crash", [False, True])
@in_world()
async def test_offsets_of_deleted_topics_go(world: World, crash: bool) -> None:
    await world.commit(5)
    await world.txn_commit(6, partition=1)
    await world.commit(7, topic="u")
    await world.commit(8, group="other")
    world.groups.on_topics_deleted(["t"])
    await world.settle()
    if crash:
        await world.crash_and_restart()
    assert (world.committed(), world.committed(topic="u"), world.committed("other")) == (None, 7, None)
    assert not world.groups.commits.is_pending("g", "t", 1)


# -- expiry ------------------------------------------------------------------------------------------------------------
@in_world()
async def test_offsets_of_simple_consumers_expire_a_week_after_the_commit(world: World) -> None:
    await world.commit(5)
    await world.pass_time(DAY_MS)
    await world.commit(6, partition=1)
    await world.pass_time(WEEK_MS - DAY_MS + 600_000)
    assert (world.committed(), world.committed(partition=1)) == (None, 6)
    await world.pass_time(DAY_MS)
    assert world.groups.find("g") is None
    await world.crash_and_restart()
    assert world.groups.find("g") is None


@in_world()
async def test_offsets_of_a_group_expire_a_week_after_its_last_member_left(world: World) -> None:
    (leader,) = await world.stable()
    await world.commit(5, Committer(leader.generation_id, leader.member_id))
    for _ in range(3):  # members that live on keep the offsets, however old
        for _ in range(5):
            await world.pass_time(SESSION_MS - 1)
            world.beat(leader)
        world.clock.advance_ms(WEEK_MS)
        await world.groups.expire_now()
    assert world.committed() == 5
    await world.leave(leader.member_id)
    await world.pass_time(WEEK_MS - 1)
    assert world.committed() == 5
    await world.pass_time(600_001)
    assert world.groups.find("g") is None
    assert world.committed() is None


@in_world()
async def test_offsets_of_topics_that_a_live_group_no_longer_reads_expire(world: World) -> None:
    (leader,) = await world.stable(topics=["t"])
    who = Committer(leader.generation_id, leader.member_id)
    await world.commit(5, who)
    await world.commit(6, who, topic="u")
    world.clock.advance_ms(WEEK_MS)
    await world.groups.expire_now()
    assert (world.committed(), world.committed(topic="u")) == (5, None)


@in_world()
async def test_pending_offsets_keep_a_group_from_expiring(world: World) -> None:
    await world.commit(1)
    await world.txn_commit(5)
    world.clock.advance_ms(2 * WEEK_MS)
    await world.groups.expire_now()
    assert world.committed() == 1
    world.end_transaction(commit=True)
    assert world.committed() == 5


@in_world()
async def test_retention_time_of_old_clients_is_kept_per_offset(world: World) -> None:
    await world.commit(5, retention_ms=1000)
    await world.commit(6, partition=1)
    await world.crash_and_restart()
    world.clock.advance_ms(1000)
    await world.groups.expire_now()
    assert (world.committed(), world.committed(partition=1)) == (None, 6)


@in_world()
async def test_offset_can_be_kept_for_the_longest_time_that_a_client_can_say(world: World) -> None:
    assert await world.commit(5, retention_ms=2**63 - 1) is E.NONE
    world.clock.advance_ms(100 * WEEK_MS)
    await world.groups.expire_now()
    assert world.committed() == 5


@in_world()
async def test_group_in_the_middle_of_a_rebalance_keeps_its_offsets(world: World) -> None:
    leader, _ = await world.stable(2)
    await world.commit(5, Committer(leader.generation_id, leader.member_id))
    await world.join(leader.member_id, rebalance_timeout_ms=10 * REBALANCE_MS)
    world.clock.advance_ms(2 * WEEK_MS)
    await world.groups.expire_now()
    assert world.committed() == 5
