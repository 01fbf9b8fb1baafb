"""Joining, syncing, heartbeats and leaving: who is in, and who gets which response."""

from __future__ import annotations

import asyncio

import pytest

from semel.broker.groups import Committer
from semel.broker.groups.classic_group import GroupError
from semel.broker.groups.classic_group import GroupState as S
from semel.broker.groups.membership import NEW_MEMBER_JOIN_TIMEOUT_MS
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.groups import MemberIdentity
from tests.unit.broker_groups.world import REBALANCE_MS, SESSION_MS, World, in_world


# -- JoinGroup ---------------------------------------------------------------------------------------------------------
@in_world()
async def test_first_member_leads_generation_one(world: World) -> None:
    joined = await world.join()
    assert world.state is S.PREPARING
    await world.pass_time(0)
    answer = joined.result()
    assert (answer.error_code, answer.generation_id, answer.leader) == (0, 1, answer.member_id)
    assert [member.member_id for member in answer.members] == [answer.member_id]
    assert answer.protocol_name == "range"
    assert world.state is S.COMPLETING


@in_world()
async def test_member_id_is_required_from_version_4_on(world: World) -> None:
    first = (await world.join(version=4, client="app")).result()
    assert (first.error_code, first.member_id) == (E.MEMBER_ID_REQUIRED, "app-id1")
    assert world.state is S.EMPTY
    second = await world.join(first.member_id, version=4)
    await world.pass_time(0)
    assert (second.result().error_code, second.result().member_id) == (0, "app-id1")


@in_world()
async def test_member_id_that_is_not_used_is_forgotten_after_the_session_time(world: World) -> None:
    handed_out = (await world.join(version=5)).result().member_id
    await world.pass_time(SESSION_MS)
    assert (await world.join(handed_out, version=5)).result().error_code == E.UNKNOWN_MEMBER_ID


@in_world()
async def test_rebalance_waits_for_a_member_id_that_was_handed_out(world: World) -> None:
    (leader,) = await world.stable()
    handed_out = (await world.join(version=5)).result().member_id
    again = await world.join(leader.member_id)
    assert not again.done()
    newcomer = await world.join(handed_out, version=5)
    assert {again.result().generation_id, newcomer.result().generation_id} == {2}


@in_world()
async def test_member_id_that_expires_lets_the_rebalance_go_on(world: World) -> None:
    (leader,) = await world.stable()
    await world.join(version=5)
    again = await world.join(leader.member_id)
    assert not again.done()
    await world.pass_time(SESSION_MS)
    assert again.result().generation_id == 2


@in_world()
async def test_unknown_member_or_group_is_refused(world: World) -> None:
    assert (await world.join("nobody")).result().error_code == E.UNKNOWN_MEMBER_ID
    assert world.groups.find("g") is None
    await world.stable()
    assert (await world.join("nobody")).result().error_code == E.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(("session_ms", "code"), [(5999, 26), (6000, 0), (1_800_000, 0), (1_800_001, 26)])
@in_world()
async def test_session_timeout_has_limits(world: World, session_ms: int, code: int) -> None:
    joined = await world.join(session_timeout_ms=session_ms)
    await world.pass_time(0)
    assert joined.result().error_code == code


@in_world()
async def test_group_id_must_not_be_empty(world: World) -> None:
    assert (await world.join(group="")).result().error_code == E.INVALID_GROUP_ID
    assert world.groups.membership.heartbeat("", 1, "m", None) == E.INVALID_GROUP_ID
    with pytest.raises(GroupError) as refused:
        await world.groups.membership.leave("", [])
    assert refused.value.code is E.INVALID_GROUP_ID


@pytest.mark.parametrize("odd", [{"protocols": []}, {"protocol_type": ""}])
@in_world()
async def test_first_member_must_have_a_protocol(world: World, odd: dict[str, object]) -> None:
    assert (await world.join(**odd)).result().error_code == E.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("odd", [{"protocols": ["sticky"]}, {"protocol_type": "connect"}])
@in_world()
async def test_member_without_a_common_protocol_is_refused(world: World, odd: dict[str, object]) -> None:
    await world.stable()
    assert (await world.join(**odd)).result().error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.state is S.STABLE


@in_world()
async def test_protocol_that_most_members_prefer_is_chosen(world: World) -> None:
    joins = [
        await world.join(protocols=["range", "sticky"]),
        await world.join(protocols=["sticky", "range"]),
        await world.join(protocols=["sticky", "range", "other"]),
    ]
    await world.pass_time(0)
    assert {task.result().protocol_name for task in joins} == {"sticky"}


@in_world()
async def test_protocol_must_be_supported_by_all_even_if_most_prefer_another(world: World) -> None:
    joins = [await world.join(protocols=["a", "b"]), await world.join(protocols=["a", "b"])]
    joins.append(await world.join(protocols=["b"]))
    await world.pass_time(0)
    assert {task.result().protocol_name for task in joins} == {"b"}


@in_world(group_max_size=2)
async def test_group_takes_no_more_members_than_its_limit(world: World) -> None:
    await world.stable(2)
    assert (await world.join()).result().error_code == E.GROUP_MAX_SIZE_REACHED
    assert len(world.members) == 2


@in_world()
async def test_follower_that_joins_again_unchanged_gets_the_generation_it_has(world: World) -> None:
    _, follower = await world.stable(2)
    answer = (await world.join(follower.member_id)).result()
    assert (answer.error_code, answer.generation_id, answer.members) == (0, follower.generation_id, [])
    assert world.state is S.STABLE


@in_world()
async def test_leader_that_joins_again_starts_a_rebalance(world: World) -> None:
    leader, follower = await world.stable(2)
    again = await world.join(leader.member_id)
    assert world.state is S.PREPARING
    assert world.beat(follower) is E.REBALANCE_IN_PROGRESS
    await world.join(follower.member_id)
    assert again.result().generation_id == leader.generation_id + 1


@in_world()
async def test_follower_with_another_subscription_starts_a_rebalance(world: World) -> None:
    _, follower = await world.stable(2)
    again = await world.join(follower.member_id, topics=["t", "u"])
    assert not again.done()
    assert world.state is S.PREPARING


@in_world()
async def test_member_that_missed_its_answer_gets_it_again_while_assignments_are_made(world: World) -> None:
    joined = await world.join()
    await world.pass_time(0)
    first = joined.result()
    again = (await world.join(first.member_id)).result()
    assert (again.generation_id, len(again.members)) == (first.generation_id, 1)


@in_world()
async def test_join_that_is_repeated_while_it_waits_is_answered_once_more(world: World) -> None:
    leader, follower = await world.stable(2)
    first = await world.join(leader.member_id)
    second = await world.join(leader.member_id)
    assert first.result().error_code == E.REBALANCE_IN_PROGRESS
    await world.join(follower.member_id)
    assert second.result().generation_id == leader.generation_id + 1


@in_world()
async def test_failed_join_still_leaves_an_empty_group_as_in_kafka(world: World) -> None:
    await world.join(protocols=[])
    assert world.state is S.EMPTY


# -- the initial delay -------------------------------------------------------------------------------------------------
@in_world(group_initial_rebalance_delay_ms=3000)
async def test_initial_delay_collects_members_into_one_generation(world: World) -> None:
    first = await world.join()
    await world.pass_time(2000)
    second = await world.join()
    await world.pass_time(2900)
    assert not first.done()  # the second member extended the delay
    await world.pass_time(1200)
    assert {first.result().generation_id, second.result().generation_id} == {1}
    assert first.result().leader == second.result().leader


@in_world(group_initial_rebalance_delay_ms=3000)
async def test_initial_delay_is_not_extended_beyond_the_rebalance_timeout(world: World) -> None:
    first = await world.join(rebalance_timeout_ms=7000)
    waited_ms = 0
    while not first.done():
        await world.join(rebalance_timeout_ms=7000)
        await world.pass_time(1000)
        waited_ms += 1000
        assert waited_ms < 20_000
    assert waited_ms <= 10_000


@in_world(group_initial_rebalance_delay_ms=3000)
async def test_initial_delay_holds_only_for_an_empty_group(world: World) -> None:
    joined = await world.join()
    await world.pass_time(3000)
    again = await world.join(joined.result().member_id, topics=["u"])
    assert again.result().generation_id == 2


# -- rebalance timeout ------------------------------------------------------------------------------------------------
@in_world()
async def test_dynamic_member_that_does_not_come_back_in_time_is_out(world: World) -> None:
    leader, follower = await world.stable(2, session_timeout_ms=600_000)
    again = await world.join(follower.member_id, topics=["u"], session_timeout_ms=600_000)
    await world.pass_time(REBALANCE_MS - 1)
    assert not again.done()
    await world.pass_time(1)
    assert (again.result().generation_id, again.result().leader) == (follower.generation_id + 1, follower.member_id)
    assert leader.member_id not in world.members


@in_world()
async def test_longest_rebalance_timeout_of_the_members_counts(world: World) -> None:
    leader, follower = await world.stable(2, session_timeout_ms=600_000)
    again = await world.join(
        leader.member_id, rebalance_timeout_ms=3 * REBALANCE_MS, session_timeout_ms=600_000, topics=["u"]
    )
    await world.pass_time(2 * REBALANCE_MS)
    assert not again.done()
    await world.pass_time(REBALANCE_MS)
    assert again.result().generation_id == 2
    assert follower.member_id not in world.members


@in_world()
async def test_member_that_never_asks_for_its_assignment_is_out_after_the_rebalance_timeout(world: World) -> None:
    first, second = await world.join(session_timeout_ms=600_000), await world.join(session_timeout_ms=600_000)
    await world.pass_time(0)
    leader = next(task.result() for task in (first, second) if task.result().members)
    synced = await world.sync(leader, {leader.member_id: b"all"})
    assert synced.result().assignment == b"all"
    await world.pass_time(REBALANCE_MS)
    assert list(world.members) == [leader.member_id]
    assert world.state is S.PREPARING
    assert world.beat(leader) is E.REBALANCE_IN_PROGRESS


# -- SyncGroup ---------------------------------------------------------------------------------------------------------
@in_world()
async def test_everybody_gets_what_the_leader_assigned(world: World) -> None:
    joins = [await world.join(), await world.join(), await world.join()]
    await world.pass_time(0)
    answers = [task.result() for task in joins]
    leader = next(answer for answer in answers if answer.members)
    followers = [answer for answer in answers if not answer.members]
    waiting = [await world.sync(answer) for answer in followers]
    assert not any(task.done() for task in waiting)
    await world.sync(leader, {answer.member_id: answer.member_id.encode() for answer in answers[:2]})
    shares = {answer.member_id: task.result().assignment for answer, task in zip(followers, waiting, strict=True)}
    expected = {answer.member_id: answer.member_id.encode() for answer in answers[:2]}
    assert shares == {member_id: expected.get(member_id, b"") for member_id in shares}
    assert world.state is S.STABLE


@in_world()
async def test_assignment_is_durable_before_anybody_hears_of_it(world: World) -> None:
    joined = await world.join()
    await world.pass_time(0)
    world.log.held = []
    synced = await world.sync(joined.result(), {joined.result().member_id: b"share"})
    assert (len(world.log.held), synced.done(), world.state) == (1, False, S.COMPLETING)
    world.log.held[0].set_result(None)
    await world.settle()
    assert (synced.result().assignment, world.state) == (b"share", S.STABLE)


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_assignment_that_cannot_be_stored_makes_everybody_join_again(world: World, moment: str) -> None:
    joins = [await world.join(), await world.join()]
    await world.pass_time(0)
    answers = sorted((task.result() for task in joins), key=lambda answer: not answer.members)
    follower = await world.sync(answers[1])
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    leader = await world.sync(answers[0], {})
    assert {leader.result().error_code, follower.result().error_code} == {E.NOT_COORDINATOR}
    assert world.state is S.PREPARING


@in_world()
async def test_assignment_of_a_generation_that_is_over_is_not_handed_out(world: World) -> None:
    joined = await world.join()
    await world.pass_time(0)
    world.log.held = []
    synced = await world.sync(joined.result(), {joined.result().member_id: b"old"})
    newcomer = await world.join()  # a rebalance begins while the assignment is on its way to the disk
    assert synced.result().error_code == E.REBALANCE_IN_PROGRESS
    again = await world.join(joined.result().member_id)
    world.log.held[0].set_result(None)
    await world.settle()
    assert {newcomer.result().generation_id, again.result().generation_id} == {2}
    assert world.state is S.COMPLETING
    assert all(member.assignment == b"" for member in world.members.values())


@in_world()
async def test_sync_is_refused_for_strangers_and_other_generations(world: World) -> None:
    (leader,) = await world.stable()
    assert (await world.sync(leader, generation=9)).result().error_code == E.ILLEGAL_GENERATION
    assert (await world.sync(leader, group="other")).result().error_code == E.UNKNOWN_MEMBER_ID
    assert (await world.sync(leader, instance="i")).result().error_code == E.UNKNOWN_MEMBER_ID
    assert (await world.sync(leader, protocol_name="x")).result().error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert (await world.sync(leader, protocol_type="x")).result().error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert (await world.sync(leader)).result().assignment == f"share of {leader.member_id}".encode()


@in_world()
async def test_sync_during_the_join_phase_is_told_to_join_again(world: World) -> None:
    leader, follower = await world.stable(2)
    await world.join(leader.member_id)
    assert (await world.sync(follower)).result().error_code == E.REBALANCE_IN_PROGRESS


# -- Heartbeat ---------------------------------------------------------------------------------------------------------
@in_world()
async def test_heartbeats_keep_a_member_in(world: World) -> None:
    (leader,) = await world.stable()
    for _ in range(5):
        await world.pass_time(SESSION_MS - 1)
        assert world.beat(leader) is E.NONE
    assert len(world.members) == 1


@in_world()
async def test_member_without_heartbeats_is_out_after_its_session_time(world: World) -> None:
    leader, follower = await world.stable(2)
    await world.pass_time(SESSION_MS - 1)
    assert world.beat(leader) is E.NONE
    await world.pass_time(1)
    assert list(world.members) == [leader.member_id]
    assert world.beat(leader) is E.REBALANCE_IN_PROGRESS
    assert world.beat(follower) is E.UNKNOWN_MEMBER_ID
    again = await world.join(leader.member_id)
    assert again.result().generation_id == leader.generation_id + 1


@in_world()
async def test_last_member_that_times_out_leaves_an_empty_group(world: World) -> None:
    await world.stable()
    await world.pass_time(SESSION_MS)
    assert world.state is S.EMPTY
    await world.crash_and_restart()
    assert world.state is S.EMPTY


@in_world()
async def test_heartbeat_of_another_generation_or_instance_is_refused(world: World) -> None:
    (leader,) = await world.stable(instance="i", version=5)
    assert world.beat(leader, generation=7) is E.ILLEGAL_GENERATION
    assert world.beat(leader, instance="j") is E.UNKNOWN_MEMBER_ID
    assert world.beat(leader, instance="i") is E.NONE
    assert world.groups.membership.heartbeat("g", 1, "zombie", "i") is E.FENCED_INSTANCE_ID


@in_world()
async def test_member_whose_join_waits_needs_no_heartbeat(world: World) -> None:
    leader, follower = await world.stable(2, rebalance_timeout_ms=10 * SESSION_MS)
    again = await world.join(leader.member_id, rebalance_timeout_ms=10 * SESSION_MS)
    for _ in range(3):
        await world.pass_time(SESSION_MS - 1)
        assert world.beat(follower) is E.REBALANCE_IN_PROGRESS
    assert not again.done()
    assert leader.member_id in world.members


@in_world()
async def test_new_member_that_never_gets_its_answer_is_dropped(world: World) -> None:
    long_ms = 4 * NEW_MEMBER_JOIN_TIMEOUT_MS
    await world.stable(1, rebalance_timeout_ms=long_ms, session_timeout_ms=1_800_000)
    newcomer = await world.join(rebalance_timeout_ms=long_ms)
    await world.pass_time(NEW_MEMBER_JOIN_TIMEOUT_MS)
    assert newcomer.result().error_code == E.UNKNOWN_MEMBER_ID
    assert len(world.members) == 1


@in_world()
async def test_client_that_disconnects_while_it_waits_is_out_after_its_session_time(world: World) -> None:
    leader, follower = await world.stable(2)
    gone = await world.join(leader.member_id)
    gone.cancel()
    await world.settle()
    await world.join(follower.member_id)
    assert leader.member_id in world.members
    await world.pass_time(SESSION_MS)
    assert leader.member_id not in world.members


# -- LeaveGroup --------------------------------------------------------------------------------------------------------
@in_world()
async def test_member_that_leaves_makes_the_others_join_again_at_once(world: World) -> None:
    leader, follower = await world.stable(2)
    assert await world.leave(leader.member_id) is E.NONE
    assert world.beat(follower) is E.REBALANCE_IN_PROGRESS
    again = await world.join(follower.member_id)
    assert again.result().leader == follower.member_id


@in_world()
async def test_last_member_that_leaves_leaves_an_empty_group_durably(world: World) -> None:
    (leader,) = await world.stable()
    world.log.held = []
    leaving = asyncio.create_task(world.groups.membership.leave("g", [MemberIdentity(leader.member_id, None)]))
    await world.settle()
    assert not leaving.done()  # not answered before it is durable
    world.log.held[0].set_result(None)
    assert await leaving == [E.NONE]
    world.log.held = None
    await world.crash_and_restart()
    assert world.state is S.EMPTY
    group = world.groups.find("g")
    assert group is not None
    assert (group.generation, group.protocol_type, group.leader) == (2, "consumer", None)


@in_world()
async def test_many_members_leave_in_one_request_each_with_its_own_code(world: World) -> None:
    leader, follower = await world.stable(2)
    codes = await world.groups.membership.leave(
        "g",
        [
            MemberIdentity(leader.member_id, None, "bye"),
            MemberIdentity("nobody", None),
            MemberIdentity("", "no-instance"),
            MemberIdentity("", None),
            MemberIdentity(follower.member_id, "wrong-instance"),
        ],
    )
    unknown = E.UNKNOWN_MEMBER_ID
    assert codes == [E.NONE, unknown, unknown, unknown, unknown]
    assert list(world.members) == [follower.member_id]


@in_world()
async def test_leaving_a_group_that_is_not_there_is_refused_member_by_member(world: World) -> None:
    codes = await world.groups.membership.leave("g", [MemberIdentity("a", None), MemberIdentity("b", None)])
    assert codes == [E.UNKNOWN_MEMBER_ID, E.UNKNOWN_MEMBER_ID]


@in_world()
async def test_handed_out_member_id_can_leave(world: World) -> None:
    handed_out = (await world.join(version=5)).result().member_id
    assert await world.leave(handed_out) is E.NONE
    assert (await world.join(handed_out, version=5)).result().error_code == E.UNKNOWN_MEMBER_ID


@in_world()
async def test_waiting_requests_of_a_member_that_is_removed_are_answered(world: World) -> None:
    joins = [await world.join(), await world.join()]
    await world.pass_time(0)
    follower = next(task.result() for task in joins if not task.result().members)
    syncing = await world.sync(follower)
    await world.leave(follower.member_id)
    assert syncing.result().error_code == E.UNKNOWN_MEMBER_ID


# -- static members ----------------------------------------------------------------------------------------------------
@in_world()
async def test_static_member_comes_back_without_a_rebalance(world: World) -> None:
    (old,) = await world.stable(instance="i", version=9)
    new = (await world.join(instance="i", version=9)).result()
    assert new.member_id != old.member_id
    assert (new.generation_id, new.leader, new.skip_assignment) == (old.generation_id, new.member_id, True)
    assert [member.member_id for member in new.members] == [new.member_id]
    synced = (await world.sync(new, instance="i")).result()
    assert synced.assignment == f"share of {old.member_id}".encode()
    assert world.state is S.STABLE


@in_world()
async def test_static_leader_of_an_old_client_is_not_told_to_assign_again(world: World) -> None:
    (old,) = await world.stable(instance="i", version=5)
    new = (await world.join(instance="i", version=5)).result()
    assert (new.leader, new.members, new.skip_assignment) == (old.member_id, [], False)
    assert world.members[new.member_id] is not None


@in_world()
async def test_static_member_that_was_replaced_is_fenced_everywhere(world: World) -> None:
    (old,) = await world.stable(instance="i", version=9)
    await world.join(instance="i", version=9)
    assert (await world.join(old.member_id, instance="i", version=9)).result().error_code == E.FENCED_INSTANCE_ID
    assert (await world.sync(old, instance="i")).result().error_code == E.FENCED_INSTANCE_ID
    assert world.beat(old, instance="i") is E.FENCED_INSTANCE_ID
    assert await world.leave(old.member_id, "i") is E.FENCED_INSTANCE_ID
    who = Committer(old.generation_id, old.member_id, "i")
    assert await world.commit(5, who) is E.FENCED_INSTANCE_ID
    transactional = await world.txn_commit(
        5, generation=old.generation_id, member_id=old.member_id, group_instance_id="i"
    )
    assert transactional is E.FENCED_INSTANCE_ID


@in_world()
async def test_waiting_request_of_a_replaced_static_member_is_fenced_at_once(world: World) -> None:
    leader, follower = await world.stable(2, session_timeout_ms=600_000)
    static = await world.join(instance="i", version=9, session_timeout_ms=600_000)
    await world.join(leader.member_id, session_timeout_ms=600_000)
    assert not static.done()
    again = await world.join(instance="i", version=9, session_timeout_ms=600_000)
    assert static.result().error_code == E.FENCED_INSTANCE_ID
    await world.join(follower.member_id, session_timeout_ms=600_000)
    assert again.result().generation_id == leader.generation_id + 1


@in_world()
async def test_static_member_with_another_subscription_does_not_rebalance_while_the_protocol_stays(
    world: World,
) -> None:
    (old,) = await world.stable(instance="i", version=9)
    new = (await world.join(instance="i", version=9, topics=["u"])).result()
    assert new.generation_id == old.generation_id
    assert world.state is S.STABLE


@in_world()
async def test_static_member_that_changes_the_chosen_protocol_rebalances(world: World) -> None:
    (old,) = await world.stable(instance="i", version=9, protocols=["range", "sticky"])
    new = await world.join(instance="i", version=9, protocols=["sticky", "range"])
    assert (new.result().generation_id, new.result().protocol_name) == (old.generation_id + 1, "sticky")


@in_world()
async def test_new_id_of_a_static_member_is_durable_before_it_is_told(world: World) -> None:
    await world.stable(instance="i", version=9)
    world.log.held = []
    again = await world.join(instance="i", version=9)
    assert not again.done()
    world.log.held[0].set_result(None)
    await world.settle()
    assert again.result().error_code == 0
    world.log.held = None
    await world.crash_and_restart()
    assert list(world.members) == [again.result().member_id]


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_static_member_whose_new_id_cannot_be_stored_keeps_the_old_one(world: World, moment: str) -> None:
    (old,) = await world.stable(instance="i", version=9)
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    again = await world.join(instance="i", version=9)
    assert again.result().error_code == E.NOT_COORDINATOR
    assert list(world.members) == [old.member_id]
    assert world.beat(old, instance="i") is E.NONE


@in_world()
async def test_static_member_stays_in_when_it_misses_a_rebalance(world: World) -> None:
    (static,) = await world.stable(instance="i", version=9, session_timeout_ms=600_000)
    newcomer = await world.join()
    await world.pass_time(REBALANCE_MS)
    assert newcomer.result().generation_id == static.generation_id + 1
    assert newcomer.result().leader == newcomer.result().member_id
    assert static.member_id in world.members


@in_world()
async def test_rebalance_waits_on_if_only_absent_static_members_are_left(world: World) -> None:
    first = await world.join(instance="i", version=9, session_timeout_ms=600_000)
    second = await world.join(instance="j", version=9, session_timeout_ms=600_000)
    await world.pass_time(0)
    leader = next(task.result() for task in (first, second) if task.result().members)
    other = next(task.result() for task in (first, second) if not task.result().members)
    await world.sync(leader, {}, instance="i")
    await world.sync(other, instance="j")
    await world.leave("", "j")
    assert world.state is S.PREPARING
    await world.pass_time(REBALANCE_MS)
    assert (world.state, list(world.members)) == (S.PREPARING, [leader.member_id])
    again = await world.join(leader.member_id, instance="i", version=9, session_timeout_ms=600_000)
    assert again.result().generation_id == leader.generation_id + 1


@in_world()
async def test_administrator_removes_a_static_member_by_its_instance_id(world: World) -> None:
    await world.stable(instance="i", version=9)
    assert await world.leave("", "i") is E.NONE
    assert world.state is S.EMPTY


# -- stopping ----------------------------------------------------------------------------------------------------------
@in_world()
async def test_stop_answers_everybody_who_waits_and_leaves_no_timer(world: World) -> None:
    leader, _ = await world.stable(2)
    waiting = await world.join(leader.member_id)
    await world.join(version=5)
    await world.groups.stop()
    await world.settle()
    assert waiting.result().error_code == E.NOT_COORDINATOR
    assert world.timers.waiting == 0
