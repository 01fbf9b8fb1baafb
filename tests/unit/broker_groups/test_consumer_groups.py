"""Groups of the consumer protocol as members see them, with time, crashes and lost writes in the test's hands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.broker.groups import Committer
from semel.broker.groups.classic_group import GroupError, GroupState
from semel.broker.groups.consumer.model import ConsumerGroupState as S
from semel.broker.groups.consumer.planner import Beat, check_request
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.groups import (
    CONSUMER_ASSIGNMENT,
    ConsumerGroupHeartbeatRequest,
    ConsumerProtocolAssignment,
    ConsumerProtocolTopic,
    JoinGroupResponse,
    MemberIdentity,
    TopicPartitions,
)
from tests.unit.broker_groups.world import SESSION_MS as CLASSIC_SESSION_MS
from tests.unit.broker_groups.world import World, in_world

SESSION_MS = 45_000
REBALANCE_MS = 30_000


class Member:
    """What a client keeps about itself."""

    def __init__(self, world: World, member_id: str, instance_id: str | None = None, **fields: Any) -> None:
        self.world, self.id, self.instance_id, self.fields = world, member_id, instance_id, fields
        self.epoch = 0
        self.has: dict[bytes, list[int]] = {}

    async def join(self) -> Member:
        fields = {
            "rebalance_timeout_ms": REBALANCE_MS,
            "subscribed_topic_names": ["t"],
            "topic_partitions": [],
            **self.fields,
        }
        await self.send(member_epoch=0, **fields)
        return self

    async def beat(self, **changes: Any) -> Member:
        owned = [TopicPartitions(*entry) for entry in self.has.items()]
        await self.send(**{"member_epoch": self.epoch, "topic_partitions": owned, **changes})
        return self

    async def send(self, **fields: Any) -> None:
        request = ConsumerGroupHeartbeatRequest("g", self.id, instance_id=self.instance_id, **fields)
        check_request(request, 1, ("uniform", "range"))
        answer = await self.world.groups.consumers.heartbeat(Beat(request, "client", "/127.0.0.1"))
        if answer.epoch >= 0:
            self.epoch = answer.epoch
            if answer.assigned is not None:
                topics = sorted({topic for topic, _ in answer.assigned})
                self.has = {each: sorted(i for topic, i in answer.assigned if topic == each) for each in topics}

    @property
    def count(self) -> int:
        return sum(map(len, self.has.values()))


def state(world: World) -> S | None:
    group = world.groups.find_consumer_group("g")
    return None if group is None else group.state


async def settle(*members: Member) -> None:
    for _ in range(4):
        for member in members:
            await member.beat()


async def refused(work: Any) -> E:
    with pytest.raises(GroupError) as error:
        await work
    return error.value.code


@in_world()
async def test_two_members_share_and_the_one_that_stays_gets_all(world: World) -> None:
    topic = world.topics.create("t", 4)
    first = await Member(world, "a").join()
    assert first.has == {topic: [0, 1, 2, 3]}
    second = await Member(world, "b").join()
    assert (second.count, state(world)) == (0, S.RECONCILING)
    await settle(first, second)
    assert (first.count, second.count, state(world)) == (2, 2, S.STABLE)
    await first.send(member_epoch=-1)
    await settle(second)
    assert second.count == 4


@in_world()
async def test_heartbeat_without_news_writes_nothing(world: World) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    written = world.log.writes
    await settle(member)
    assert world.log.writes == written


@in_world()
async def test_member_without_heartbeats_is_out_after_the_session_time(world: World) -> None:
    world.topics.create("t", 2)
    first, second = await Member(world, "a").join(), await Member(world, "b").join()
    await settle(first, second)
    await world.pass_time(SESSION_MS - 1)
    await first.beat()
    await world.pass_time(1)
    assert await refused(second.beat()) is E.UNKNOWN_MEMBER_ID
    await settle(first)
    assert first.count == 2


@in_world()
async def test_member_that_gives_nothing_back_is_out_after_its_rebalance_time(world: World) -> None:
    world.topics.create("t", 2)
    stubborn, second = await Member(world, "a").join(), await Member(world, "b").join()
    holds = stubborn.has
    await stubborn.beat()  # its response takes one back, and it never returns it
    for _ in range(4):
        assert second.count == 0
        await world.pass_time(REBALANCE_MS // 4 - 1)
        await second.beat()
        stubborn.has = holds
        await stubborn.beat()
    await world.pass_time(4)
    assert await refused(stubborn.beat()) is E.UNKNOWN_MEMBER_ID
    await settle(second)
    assert second.count == 2


@pytest.mark.parametrize("fault", ["refuse", "lose"])
@in_world()
async def test_member_that_could_not_be_removed_is_out_when_the_log_is_back(world: World, fault: str) -> None:
    world.topics.create("t", 2)
    await Member(world, "a").join()
    setattr(world.log, fault, E.KAFKA_STORAGE_ERROR)
    await world.pass_time(SESSION_MS + 1)
    setattr(world.log, fault, None)
    await world.settle()
    assert state(world) is not S.EMPTY, "the log did not take it"
    await world.pass_time(SESSION_MS + 1)
    assert state(world) is S.EMPTY


@in_world()
async def test_member_that_gives_nothing_back_and_could_not_be_removed_is_out_when_the_log_is_back(
    world: World,
) -> None:
    world.topics.create("t", 2)
    stubborn, second = await Member(world, "a").join(), await Member(world, "b").join()
    holds = stubborn.has
    await stubborn.beat()  # its response takes one back, and it never returns it
    world.log.refuse = E.KAFKA_STORAGE_ERROR
    await world.pass_time(REBALANCE_MS + 1)
    world.log.refuse = None
    stubborn.has = holds
    await stubborn.beat()
    await second.beat()
    await world.pass_time(SESSION_MS // 2)
    assert await refused(stubborn.beat()) is E.UNKNOWN_MEMBER_ID
    await settle(second)
    assert second.count == 2


@pytest.mark.parametrize("moment", ["joined", "shared", "revoking"])
@in_world()
async def test_group_goes_on_after_a_crash(world: World, moment: str) -> None:
    world.topics.create("t", 4)
    first = await Member(world, "a").join()
    members = [first]
    if moment != "joined":
        members.append(await Member(world, "b").join())
    if moment == "shared":
        await settle(*members)
    elif moment == "revoking":
        await first.beat()
    before = world.groups.find_consumer_group("g")
    assert before is not None
    await world.crash_and_restart()
    after = world.groups.find_consumer_group("g")
    assert after is not None
    assert vars(after) == vars(before)
    await settle(*members)
    assert [member.count for member in members] == ([4] if moment == "joined" else [2, 2])
    await world.pass_time(SESSION_MS)
    assert state(world) is S.EMPTY, "the sessions run on after a crash"


@in_world()
async def test_answer_comes_only_when_the_change_is_durable(world: World) -> None:
    world.topics.create("t", 2)
    world.log.held = []
    joining = asyncio.create_task(Member(world, "a").join())
    await world.settle()
    assert (joining.done(), state(world)) == (False, None)
    world.log.held[0].set_result(None)
    assert (await joining).count == 2


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_change_that_cannot_be_written_did_not_happen(world: World, moment: str) -> None:
    world.topics.create("t", 2)
    await world.commit(5)
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    assert await refused(Member(world, "a").join()) is E.NOT_COORDINATOR
    setattr(world.log, moment, None)
    await world.settle()  # after a failed fsync the partition is read again
    assert state(world) is None
    assert (await Member(world, "a").join()).count == 2


@in_world()
async def test_client_that_goes_away_during_a_write_does_not_confuse_the_group(world: World) -> None:
    world.topics.create("t", 4)
    first = await Member(world, "a").join()
    world.log.held = []
    gone = asyncio.create_task(Member(world, "b").join())
    await world.settle()
    gone.cancel()
    waiting = asyncio.create_task(first.beat())
    await world.settle()
    assert not waiting.done(), "the group is not looked at before the write is applied"
    world.log.held[0].set_result(None)
    world.log.held = None
    await world.settle()
    await waiting
    group = world.groups.find_consumer_group("g")
    assert group is not None
    assert sorted(group.subscriptions) == ["a", "b"]
    await world.pass_time(SESSION_MS)
    assert state(world) is S.EMPTY, "the member that went away has a session too"


@in_world()
async def test_static_member_comes_back_to_what_it_had(world: World) -> None:
    topic = world.topics.create("t", 2)
    old = await Member(world, "a", "i").join()
    assert await refused(Member(world, "b", "i").join()) is E.UNRELEASED_INSTANCE_ID
    await old.send(member_epoch=-2)
    epoch = old.epoch
    new = await Member(world, "b", "i").join()
    assert (new.epoch, new.has) == (epoch, {topic: [0, 1]})
    assert await refused(old.beat()) is E.FENCED_INSTANCE_ID


@in_world()
async def test_static_member_that_stays_away_is_out_after_the_session_time(world: World) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a", "i").join()
    await member.send(member_epoch=-2)
    await world.pass_time(SESSION_MS)
    assert state(world) is S.EMPTY


@in_world(group_consumer_max_size=1)
async def test_group_takes_no_more_members_than_its_limit(world: World) -> None:
    world.topics.create("t", 2)
    await Member(world, "a").join()
    assert await refused(Member(world, "b").join()) is E.GROUP_MAX_SIZE_REACHED


@in_world()
async def test_topics_that_grow_come_and_go_are_noticed(world: World) -> None:
    topic = world.topics.create("t", 1)
    member = await Member(world, "a", subscribed_topic_names=["t", "u"]).join()
    world.topics.create("t", 2)
    other = world.topics.create("u", 1)
    await settle(member)
    assert member.has == {topic: [0, 1], other: [0]}
    world.topics.delete("t")
    await settle(member)
    assert member.has == {other: [0]}


@in_world()
async def test_topics_by_expression_are_noticed_when_they_come(world: World) -> None:
    first = world.topics.create("app-1", 1)
    fields = {"subscribed_topic_names": None, "subscribed_topic_regex": "app-.*"}
    member = await Member(world, "a", **fields).join()
    second = world.topics.create("app-2", 1)
    world.topics.create("other", 1)
    await settle(member)
    assert member.has == {first: [0], second: [0]}
    assert world.groups.find_consumer_group("g").subscribes("app-9")  # type: ignore[union-attr]


@in_world()
async def test_epoch_of_a_lost_response_passes_and_others_are_fenced(world: World) -> None:
    world.topics.create("t", 1)
    member = await Member(world, "a").join()
    before = member.epoch
    await member.beat(subscribed_topic_names=["t", "u"])
    assert member.epoch == before + 1
    await member.beat(member_epoch=before)
    assert await refused(member.beat(member_epoch=before - 1)) is E.FENCED_MEMBER_EPOCH
    assert await refused(member.beat(member_epoch=before + 5)) is E.FENCED_MEMBER_EPOCH
    assert await refused(member.beat(member_epoch=before, topic_partitions=None)) is E.FENCED_MEMBER_EPOCH


# -- offsets ---------------------------------------------------------------------------------------------------------
@in_world()
async def test_offsets_need_the_members_epoch(world: World) -> None:
    world.topics.create("t", 1)
    member = await Member(world, "a").join()
    assert await world.commit(5, Committer(member.epoch, "a")) is E.NONE
    assert await world.commit(6, Committer(member.epoch - 1, "a")) is E.STALE_MEMBER_EPOCH
    assert await world.commit(6, Committer(member.epoch, "b")) is E.UNKNOWN_MEMBER_ID
    assert await world.commit(6, Committer(member.epoch, "a"), version=8) is E.UNSUPPORTED_VERSION
    assert await world.commit(6) is E.UNKNOWN_MEMBER_ID
    assert await world.txn_commit(6, generation=member.epoch - 1, member_id="a") is E.ILLEGAL_GENERATION
    assert await world.txn_commit(6, generation=member.epoch, member_id="a") is E.NONE
    world.end_transaction(commit=True)
    assert world.committed() == 6
    await world.crash_and_restart()
    assert (world.committed(), world.groups.find("g")) == (6, None)


@in_world()
async def test_member_behind_its_epoch_may_commit_what_it_kept(world: World) -> None:
    """KIP-1251: a rebalance refuses no commit that is on its way, of partitions that stay or are being given back."""
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    before = member.epoch
    await Member(world, "b").join()
    await member.beat()  # the response takes one back, and it gives it back
    await member.beat()
    assert member.epoch == before + 1
    (kept,) = member.has[world.topics.get("t").id]  # type: ignore[union-attr]
    late = Committer(before, "a")
    assert await world.commit(5, late, partition=kept) is E.NONE
    assert await world.txn_commit(6, generation=before, member_id="a", partition=kept) is E.NONE
    world.end_transaction(commit=True)
    assert await world.commit(7, late, partition=1 - kept) is E.STALE_MEMBER_EPOCH
    assert await world.txn_commit(7, generation=before, member_id="a", partition=1 - kept) is E.ILLEGAL_GENERATION
    assert await world.commit(7, Committer(before - 1, "a"), partition=kept) is E.STALE_MEMBER_EPOCH
    assert await world.commit(7, Committer(before + 2, "a"), partition=kept) is E.STALE_MEMBER_EPOCH
    await world.crash_and_restart()
    assert (world.committed(partition=kept), world.committed(partition=1 - kept)) == (6, None)
    assert await world.commit(8, late, partition=kept) is E.NONE


@in_world()
async def test_partition_that_is_being_given_back_takes_its_last_commit(world: World) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    before = member.epoch
    await Member(world, "b").join()
    await member.beat()  # the response takes one back
    for partition in (0, 1):
        assert await world.commit(5, Committer(before, "a"), partition=partition) is E.NONE


@in_world()
async def test_transaction_that_names_no_member_commits_offsets(world: World) -> None:
    world.topics.create("t", 1)
    await Member(world, "a").join()
    assert await world.txn_commit(6) is E.NONE
    world.end_transaction(commit=True)
    assert world.committed() == 6
    assert await world.txn_commit(7, member_id="x") is E.UNKNOWN_MEMBER_ID
    assert await world.commit(7) is E.UNKNOWN_MEMBER_ID


@in_world()
async def test_unread_offsets_expire_and_empty_groups_with_them(world: World) -> None:
    world.topics.create("t", 1)
    member = await Member(world, "a").join()
    who = Committer(member.epoch, "a")
    await world.commit(5, who)
    await world.commit(6, who, topic="unread")
    world.clock.advance_ms(8 * 86_400_000)
    await world.groups.expire_now()
    assert (world.committed(), world.committed(topic="unread")) == (5, None)
    await member.send(member_epoch=-1)
    await world.groups.expire_now()
    assert world.groups.find_consumer_group("g") is None
    await world.crash_and_restart()
    assert (world.groups.find_consumer_group("g"), world.groups.find("g")) == (None, None)


# -- both protocols ----------------------------------------------------------------------------------------------------
@in_world()
async def test_empty_group_changes_its_protocol(world: World) -> None:
    world.topics.create("t", 1)
    (classic,) = await world.stable()
    await world.commit(5, Committer(classic.generation_id, classic.member_id))
    assert await refused(Member(world, "a").join()) is E.GROUP_ID_NOT_FOUND  # its assignments cannot be read
    await world.leave(classic.member_id)
    member = await Member(world, "a").join()
    assert (world.groups.find("g"), world.committed(), member.count) == (None, 5, 1)
    await world.crash_and_restart()
    assert world.groups.find("g") is None
    await settle(member)
    await member.send(member_epoch=-1)
    joined = await world.join()
    await world.pass_time(0)
    assert (joined.result().generation_id, state(world)) == (1, None)
    await world.crash_and_restart()
    assert (state(world), world.committed()) == (None, 5)


@pytest.mark.parametrize("existed", [True, False])
@in_world()
async def test_nobody_joins_the_other_way_while_a_group_is_changing(world: World, existed: bool) -> None:
    world.topics.create("t", 1)
    if existed:
        await world.commit(5)
    world.log.held = []
    joining = asyncio.create_task(Member(world, "a").join())
    await world.settle()
    assert (await world.join()).result().error_code == E.COORDINATOR_NOT_AVAILABLE
    world.log.held[0].set_result(None)
    assert (await joining).count == 1


@in_world()
async def test_operator_deletes_groups_and_removes_members(world: World) -> None:
    world.topics.create("t", 1)
    member = await Member(world, "a", "i").join()
    await world.commit(5, Committer(member.epoch, "a"))
    assert await world.groups.delete("g") is E.NON_EMPTY_GROUP
    gone = [MemberIdentity("", "i"), MemberIdentity("x", None)]
    assert await world.groups.membership.leave("g", gone) == [E.NONE, E.UNKNOWN_MEMBER_ID]
    assert await world.groups.delete("g") is E.NONE
    await world.crash_and_restart()
    assert (state(world), world.committed()) == (None, None)


@in_world()
async def test_stop_leaves_no_timer(world: World) -> None:
    world.topics.create("t", 2)
    first, second = await Member(world, "a").join(), await Member(world, "b").join()
    await first.beat()
    assert second.count == 0
    await world.groups.stop()
    assert world.timers.waiting == 0


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_a_consumer_group_stays_where_a_classic_one_cannot_take_its_place(world: World, moment: str) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    await member.send(member_epoch=-1)
    assert state(world) is S.EMPTY
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    joining = await world.join()
    assert (await joining).error_code == E.NOT_COORDINATOR
    setattr(world.log, moment, None)
    await world.settle()
    assert state(world) is S.EMPTY
    assert world.groups.find("g") is None
    assert (await Member(world, "b").join()).count == 2
    await world.crash_and_restart()
    assert state(world) is not None
    assert world.groups.find("g") is None


@in_world()
async def test_a_consumer_group_without_members_is_gone_once_a_classic_one_took_its_place(world: World) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    await member.send(member_epoch=-1)
    world.log.held = []
    joining = await world.join()
    assert state(world) is S.EMPTY  # until the record is durable
    while world.log.held:
        world.log.held.pop(0).set_result(None)
        await world.settle()
    world.log.held = None
    await world.pass_time(0)
    assert (await joining).error_code == 0
    assert state(world) is None
    await world.crash_and_restart()
    assert state(world) is None
    assert world.groups.find("g") is not None


@in_world()
async def test_after_a_failed_fsync_a_consumer_group_is_as_its_log_says(world: World) -> None:
    world.topics.create("t", 2)
    member = await Member(world, "a").join()
    before = world.groups.find_consumer_group("g")
    world.log.lose = E.KAFKA_STORAGE_ERROR
    assert await refused(Member(world, "b").join()) is E.NOT_COORDINATOR
    world.log.lose = None
    await world.settle()
    after = world.groups.find_consumer_group("g")
    assert after is not None
    assert after is not before  # it was rebuilt
    assert list(after.subscriptions) == ["a"]
    assert (await member.beat()).count == 2
    assert (await Member(world, "b").join()).epoch > member.epoch
    await world.pass_time(SESSION_MS + 1)  # sessions go on: both are out
    assert state(world) is S.EMPTY


# -- migration ---------------------------------------------------------------------------------------------------------
async def lone_consumer(world: World, *partitions: int) -> JoinGroupResponse:
    """The only member of a classic group, which has these partitions."""
    joining = await world.join()
    await world.pass_time(0)
    joined = joining.result()
    named = ConsumerProtocolAssignment([ConsumerProtocolTopic("t", list(partitions))])
    data = b"\0\0" + CONSUMER_ASSIGNMENT.encode(named, 0)
    assert (await world.sync(joined, {joined.member_id: data})).result().error_code == 0
    return joined


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_classic_group_goes_on_where_its_upgrade_cannot_be_written(world: World, moment: str) -> None:
    world.topics.create("t", 2)
    classic = await lone_consumer(world, 0, 1)
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    assert await refused(Member(world, "a").join()) is E.NOT_COORDINATOR
    setattr(world.log, moment, None)
    await world.settle()
    assert (world.state, state(world), world.beat(classic)) == (GroupState.STABLE, None, E.NONE)
    assert (await Member(world, "a").join()).count == 0
    assert (world.groups.find("g"), world.beat(classic)) == (None, E.REBALANCE_IN_PROGRESS)


@pytest.mark.parametrize("moment", ["refuse", "lose"])
@in_world()
async def test_group_of_both_kinds_stays_where_its_downgrade_cannot_be_written(world: World, moment: str) -> None:
    world.topics.create("t", 2)
    classic, member = await lone_consumer(world, 0, 1), await Member(world, "a").join()
    setattr(world.log, moment, E.KAFKA_STORAGE_ERROR)
    assert await refused(member.send(member_epoch=-1)) is E.NOT_COORDINATOR
    setattr(world.log, moment, None)
    await world.settle()
    assert (state(world), world.groups.find("g")) == (S.RECONCILING, None)
    assert (await member.beat()).count == 0
    await member.send(member_epoch=-1)
    assert (state(world), world.state) == (None, GroupState.PREPARING)
    assert list(world.members) == [classic.member_id]


@in_world()
async def test_requests_that_wait_are_sent_again_after_an_upgrade(world: World) -> None:
    world.topics.create("t", 2)
    await lone_consumer(world, 0, 1)
    waiting = await world.join()
    assert not waiting.done()
    await Member(world, "a").join()
    answer = await waiting
    assert answer.error_code == E.REBALANCE_IN_PROGRESS
    assert (await world.join(answer.member_id)).result().error_code == 0


@in_world()
async def test_sessions_go_on_after_a_migration(world: World) -> None:
    world.topics.create("t", 2)
    classic, member = await lone_consumer(world, 0, 1), await Member(world, "a").join()
    await world.pass_time(CLASSIC_SESSION_MS - 1)
    await member.beat()
    assert world.beat(classic, generation=-1) is E.ILLEGAL_GENERATION  # it is still there
    await world.pass_time(1)
    await settle(member)
    assert (member.count, world.beat(classic)) == (2, E.UNKNOWN_MEMBER_ID)
    again = await world.join()
    assert again.result().error_code == 0
    for _ in range(SESSION_MS // (CLASSIC_SESSION_MS - 1) + 1):  # the member of the consumer protocol is silent
        world.beat(again.result())
        await world.pass_time(CLASSIC_SESSION_MS - 1)
    assert (state(world), list(world.members)) == (None, [again.result().member_id])
    await world.pass_time(CLASSIC_SESSION_MS)
    assert world.members == {}
