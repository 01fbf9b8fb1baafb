"""The handlers in every version: answers can be encoded, old forms carry what new forms carry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from semel.broker.groups import Committer, OffsetToCommit, handlers
from semel.broker.turns import MANY
from semel.protocol.api import api_of
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.groups import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    ListGroupsRequest,
    MemberIdentity,
    SyncGroupRequest,
)
from semel.protocol.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from semel.protocol.schema import NO_UUID
from tests.unit.broker_groups.world import World, in_world

HANDLERS: dict[int, Any] = {
    8: handlers.offset_commit,
    9: handlers.offset_fetch,
    11: handlers.join_group,
    12: handlers.heartbeat,
    13: handlers.leave_group,
    14: handlers.sync_group,
    15: handlers.describe_groups,
    16: handlers.list_groups,
    42: handlers.delete_groups,
    47: handlers.offset_delete,
    68: handlers.consumer_group_heartbeat,
    69: handlers.consumer_group_describe,
}
TOPIC_ID = b"T" * 16


class Topics:
    """One topic, t, with two partitions."""

    topic = SimpleNamespace(name="t", id=TOPIC_ID, partitions=[object(), object()])

    def get(self, name: str) -> Any:
        return self.topic if name == "t" else None

    def by_id(self, topic_id: bytes) -> Any:
        return self.topic if topic_id == TOPIC_ID else None

    def partition(self, name: str, index: int) -> Any:
        return self.topic.partitions[index] if name == "t" and index < 2 else None


async def ask(world: World, key: int, request: Any, version: int) -> Any:
    """The answer as a client of that version reads it: request and answer cross the wire."""
    api = api_of(key)
    broker = SimpleNamespace(groups=world.groups, topics=Topics(), settings=world.settings)
    context = SimpleNamespace(version=version, client_id="c", client_host="/127.0.0.1")
    answer = HANDLERS[key](broker, context, api.request.decode(api.request.encode(request, version), version))
    if isinstance(answer, Awaitable):
        task = asyncio.ensure_future(answer)
        await world.settle()
        await world.pass_time(0)
        answer = await task
    return api.response.decode(api.response.encode(answer, version), version)


def commit_request(version: int, **changes: Any) -> OffsetCommitRequest:
    by_id = version >= 10
    parts = changes.pop("parts", [OffsetCommitRequestPartition(0, 5, committed_metadata="note")])
    topic = OffsetCommitRequestTopic("" if by_id else "t", TOPIC_ID if by_id else NO_UUID, parts)
    return OffsetCommitRequest(group_id="g", topics=[topic], **changes)


@pytest.mark.parametrize("version", range(10))
@in_world()
async def test_life_of_a_member_in_every_version_of_join(world: World, version: int) -> None:
    protocols = [JoinGroupRequestProtocol("range", b"\0\0\0\0\0\0\xff\xff\xff\xff")]
    request = JoinGroupRequest("g", 10_000, 10_000, "", None, "consumer", protocols)
    joined = await ask(world, 11, request, version)
    if version >= 4:
        assert (joined.error_code, joined.protocol_name) == (E.MEMBER_ID_REQUIRED, None if version >= 7 else "")
        request.member_id = joined.member_id
        joined = await ask(world, 11, request, version)
    assert (joined.error_code, joined.generation_id, joined.leader) == (0, 1, joined.member_id)
    sync_version = min(version, 5)
    named = {"protocol_type": "consumer", "protocol_name": "range"} if sync_version >= 5 else {}
    synced = await ask(world, 14, SyncGroupRequest("g", 1, joined.member_id, **named), sync_version)
    assert synced.error_code == 0
    beat = await ask(world, 12, HeartbeatRequest("g", 1, joined.member_id), min(version, 4))
    assert beat.error_code == 0
    leave_version = min(version, 5)
    if leave_version < 3:
        leaving = LeaveGroupRequest("g", joined.member_id)
    else:
        leaving = LeaveGroupRequest("g", members=[MemberIdentity(joined.member_id), MemberIdentity("zz", "i")])
    left = await ask(world, 13, leaving, leave_version)
    assert left.error_code == 0
    if leave_version >= 3:
        assert [member.error_code for member in left.members] == [0, E.UNKNOWN_MEMBER_ID]
    assert world.groups.find("g").state.value == "Empty"  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [0, 1, 2])
@in_world()
async def test_error_of_the_only_member_that_leaves_is_the_error_of_old_answers(world: World, version: int) -> None:
    assert (await ask(world, 13, LeaveGroupRequest("g", "zz"), version)).error_code == E.UNKNOWN_MEMBER_ID


@in_world()
async def test_version_0_members_have_their_session_timeout_as_rebalance_timeout(world: World) -> None:
    await ask(world, 11, JoinGroupRequest("g", 7000, -1, "", None, "x", [JoinGroupRequestProtocol("p", b"")]), 0)
    (member,) = world.members.values()
    assert (member.rebalance_timeout_ms, member.client_host) == (7000, "/127.0.0.1")


@in_world()
async def test_sync_from_version_5_on_must_name_its_protocol(world: World) -> None:
    await world.stable()
    answer = await ask(world, 14, SyncGroupRequest("g", 1, next(iter(world.members))), 5)
    assert answer.error_code == E.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("version", range(2, 11))
@in_world()
async def test_commit_in_every_version_judges_partition_by_partition(world: World, version: int) -> None:
    parts = [
        OffsetCommitRequestPartition(0, 5, committed_metadata="note"),
        OffsetCommitRequestPartition(1, 6, committed_metadata="x" * 4097),
        OffsetCommitRequestPartition(2, 7, committed_metadata=None),
    ]
    request = commit_request(version, parts=parts)
    other = OffsetCommitRequestTopic("" if version >= 10 else "zz", b"Z" * 16 if version >= 10 else NO_UUID, parts[:1])
    request.topics.append(other)
    answer = await ask(world, 8, request, version)
    unknown = E.UNKNOWN_TOPIC_ID if version >= 10 else E.UNKNOWN_TOPIC_OR_PARTITION
    assert [[part.error_code for part in topic.partitions] for topic in answer.topics] == [
        [0, E.OFFSET_METADATA_TOO_LARGE, E.UNKNOWN_TOPIC_OR_PARTITION],
        [unknown],
    ]
    committed = world.groups.commits.committed("g", "t", 0)
    assert committed is not None
    assert (committed.offset, committed.metadata, committed.topic_id) == (5, "note", TOPIC_ID)
    assert world.committed(partition=1) is None


@in_world()
async def test_refused_commit_refuses_all_partitions_that_exist(world: World) -> None:
    await world.stable()
    parts = [OffsetCommitRequestPartition(0, 5), OffsetCommitRequestPartition(9, 5)]
    answer = await ask(world, 8, commit_request(9, parts=parts), 9)
    assert [part.error_code for part in answer.topics[0].partitions] == [
        E.UNKNOWN_MEMBER_ID,
        E.UNKNOWN_TOPIC_OR_PARTITION,
    ]


@pytest.mark.parametrize("version", [9, 10])
@in_world()
async def test_of_very_many_offsets_those_that_were_stored_before_the_disk_was_full_are_acknowledged(
    world: World, version: int
) -> None:
    count = 2 * MANY + 10
    topics = SimpleNamespace(name="t", id=TOPIC_ID, partitions=[object()] * count)
    append, appends = world.log.append, []

    def append_until_full(*args: Any, **kwargs: Any) -> Any:
        appends.append(args)
        if len(appends) > 1:
            world.log.refuse = E.KAFKA_STORAGE_ERROR
        return append(*args, **kwargs)

    parts = [OffsetCommitRequestPartition(index, 5) for index in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topics, "topic", topics)
        patch.setattr(world.log, "append", append_until_full)
        answer = await ask(world, 8, commit_request(version, parts=parts), version)
    assert len(appends) == 2
    codes = [part.error_code for part in answer.topics[0].partitions]
    assert codes == [E.NONE] * MANY + [E.NOT_COORDINATOR] * (count - MANY)
    assert [world.committed(partition=index) for index in (0, MANY - 1, MANY, count - 1)] == [5, 5, None, None]


@in_world()
async def test_retention_time_of_old_versions_is_obeyed(world: World) -> None:
    await ask(world, 8, commit_request(4, retention_time_ms=1000), 4)
    committed = world.groups.commits.committed("g", "t", 0)
    assert committed is not None
    assert committed.expire_time_ms == world.clock.now_ms() + 1000


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("version", range(1, 11))
@in_world()
async def test_fetch_in_every_version(world: World, version: int, everything: bool) -> None:
    if everything and version == 1:
        return  # null came with version 2
    await ask(world, 8, commit_request(9), 9)
    if version < 8:
        topics = None if everything else [OffsetFetchRequestTopics("t", partition_indexes=[0, 1])]
        answer = await ask(world, 9, OffsetFetchRequest("g", topics), version)
        found = answer.topics
    else:
        named = OffsetFetchRequestTopics("t") if version < 10 else OffsetFetchRequestTopics(topic_id=TOPIC_ID)
        named.partition_indexes = [0, 1]
        groups = [
            OffsetFetchRequestGroup("g", topics=None if everything else [named]),
            OffsetFetchRequestGroup("none", topics=None if everything else [named]),
        ]
        answer = await ask(world, 9, OffsetFetchRequest(groups=groups), version)
        assert [group.group_id for group in answer.groups] == ["g", "none"]
        assert [part.committed_offset for topic in answer.groups[1].topics for part in topic.partitions] == (
            [] if everything else [-1, -1]
        )
        found = answer.groups[0].topics
    assert [(topic.name, topic.topic_id) for topic in found if version >= 8] == (
        [] if version < 8 else [("", TOPIC_ID)] if version >= 10 else [("t", NO_UUID)]
    )
    parts = [(part.partition_index, part.committed_offset, part.metadata) for part in found[0].partitions]
    assert parts == [(0, 5, "note")] + ([] if everything else [(1, -1, "")])


@in_world()
async def test_topics_may_come_while_all_offsets_of_a_group_are_fetched(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.groups.commits.commit("g", Committer(), [OffsetToCommit(name, 0, 1)])
    broker = SimpleNamespace(groups=world.groups, topics=Topics())
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup("g", topics=None)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semel.broker.turns.TURN_S", -1.0)  # as if there were very many: others run after each topic
        fetching = asyncio.ensure_future(handlers.offset_fetch(broker, SimpleNamespace(version=9), request))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await world.groups.commits.commit("g", Committer(), [OffsetToCommit("d", 0, 1)])
        found = (await fetching).groups[0].topics
    assert [topic.name for topic in found] == ["a", "b", "c"]


@in_world()
async def test_fetch_by_an_unknown_topic_id_says_so(world: World) -> None:
    topics = [OffsetFetchRequestTopics(topic_id=b"Z" * 16, partition_indexes=[0])]
    answer = await ask(world, 9, OffsetFetchRequest(groups=[OffsetFetchRequestGroup("g", topics=topics)]), 10)
    assert answer.groups[0].topics[0].partitions[0].error_code == E.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize("version", [7, 8, 9])
@in_world()
async def test_stable_offsets_are_refused_while_a_transaction_may_change_them(world: World, version: int) -> None:
    await world.commit(1)
    await world.commit(2, partition=1)
    await world.txn_commit(5)

    async def fetch(require_stable: bool) -> list[tuple[int, int]]:
        if version < 8:
            topics = [OffsetFetchRequestTopics("t", partition_indexes=[0, 1])]
            answer = await ask(world, 9, OffsetFetchRequest("g", topics, require_stable=require_stable), version)
            parts = answer.topics[0].partitions
        else:
            named = [OffsetFetchRequestTopics("t", partition_indexes=[0, 1])]
            groups = [OffsetFetchRequestGroup("g", topics=named)]
            request = OffsetFetchRequest(groups=groups, require_stable=require_stable)
            parts = (await ask(world, 9, request, version)).groups[0].topics[0].partitions
        return [(part.error_code, part.committed_offset) for part in parts]

    assert await fetch(True) == [(E.UNSTABLE_OFFSET_COMMIT, -1), (0, 2)]
    assert await fetch(False) == [(0, 1), (0, 2)]
    world.end_transaction(commit=True)
    assert await fetch(True) == [(0, 5), (0, 2)]


@pytest.mark.parametrize("version", range(7))
@in_world()
async def test_describe_in_every_version(world: World, version: int) -> None:
    (leader,) = await world.stable()
    answer = await ask(world, 15, DescribeGroupsRequest(["g", "none"], version >= 3), version)
    group, missing = answer.groups
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    (member,) = group.members
    assert (member.member_id, member.client_id, member.client_host) == (leader.member_id, "c", "/127.0.0.1")
    assert member.member_assignment == f"share of {leader.member_id}".encode()
    assert group.authorized_operations == (3400 if version >= 3 else -(2**31))
    assert (missing.group_state, missing.error_code) == ("Dead", E.GROUP_ID_NOT_FOUND if version >= 6 else 0)


@in_world()
async def test_group_in_a_rebalance_is_described_without_subscriptions(world: World) -> None:
    leader, _ = await world.stable(2)
    await world.join(leader.member_id)
    answer = await ask(world, 15, DescribeGroupsRequest(["g"]), 5)
    assert (answer.groups[0].group_state, answer.groups[0].protocol_data) == ("PreparingRebalance", "")
    assert [member.member_metadata for member in answer.groups[0].members] == [b"", b""]


@pytest.mark.parametrize("version", range(6))
@in_world()
async def test_list_in_every_version(world: World, version: int) -> None:
    await world.stable()
    await world.commit(1, group="simple")
    answer = await ask(world, 16, ListGroupsRequest(), version)
    listed = [(group.group_id, group.protocol_type, group.group_state, group.group_type) for group in answer.groups]
    state = version >= 4
    kind = "classic" if version >= 5 else ""
    assert listed == [
        ("g", "consumer", "Stable" if state else "", kind),
        ("simple", "", "Empty" if state else "", kind),
    ]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"states_filter": [" stable", "Dead"]}, ["g"]),
        ({"states_filter": ["nonsense"]}, []),
        ({"types_filter": ["CLASSIC"]}, ["g", "simple"]),
        ({"types_filter": ["consumer"]}, []),
        ({"states_filter": ["Empty"], "types_filter": ["classic", "share"]}, ["simple"]),
    ],
)
@in_world()
async def test_list_filters_states_and_types(world: World, filters: dict[str, list[str]], expected: list[str]) -> None:
    await world.stable()
    await world.commit(1, group="simple")
    answer = await ask(world, 16, ListGroupsRequest(**filters), 5)
    assert [group.group_id for group in answer.groups] == expected


@pytest.mark.parametrize("version", range(3))
@in_world()
async def test_delete_groups_in_every_version(world: World, version: int) -> None:
    await world.stable()
    await world.commit(1, group="simple")
    answer = await ask(world, 42, DeleteGroupsRequest(["g", "simple", "simple", "none"]), version)
    assert [(result.group_id, result.error_code) for result in answer.results] == [
        ("g", E.NON_EMPTY_GROUP),
        ("simple", 0),
        ("none", E.GROUP_ID_NOT_FOUND),
    ]


@in_world()
async def test_delete_offsets_judges_partition_by_partition(world: World) -> None:
    await world.commit(5)
    topics = [
        OffsetDeleteRequestTopic("t", [OffsetDeleteRequestPartition(0), OffsetDeleteRequestPartition(7)]),
        OffsetDeleteRequestTopic("zz", [OffsetDeleteRequestPartition(0)]),
    ]
    answer = await ask(world, 47, OffsetDeleteRequest("g", topics), 0)
    assert [[part.error_code for part in topic.partitions] for topic in answer.topics] == [[0, 3], [3]]
    assert world.committed() is None
    assert (await ask(world, 47, OffsetDeleteRequest("none", topics), 0)).error_code == E.GROUP_ID_NOT_FOUND


# -- the consumer protocol ---------------------------------------------------------------------------------------------
def consumer_join(version: int, **changes: Any) -> ConsumerGroupHeartbeatRequest:
    fields = {"rebalance_timeout_ms": 1000, "subscribed_topic_names": ["t"], "topic_partitions": []}
    return ConsumerGroupHeartbeatRequest("g", "m" if version else "", **{**fields, **changes})


@pytest.mark.parametrize("version", [0, 1])
@in_world()
async def test_consumer_member_in_every_version(world: World, version: int) -> None:
    world.topics.create("t", 2)
    joined = await ask(world, 68, consumer_join(version), version)
    assert (joined.error_code, joined.member_epoch, joined.heartbeat_interval_ms) == (0, 2, 5000)
    assert joined.member_id, "before version 1 the broker makes up the id"
    assert [each.partitions for each in joined.assignment.topic_partitions] == [[0, 1]]
    described = (await ask(world, 69, ConsumerGroupDescribeRequest(["g", "none", ""]), version)).groups
    assert [(each.group_state, each.error_code) for each in described] == [
        ("Stable", 0),
        ("", E.GROUP_ID_NOT_FOUND),
        ("", E.INVALID_GROUP_ID),
    ]
    assert described[0].members[0].member_type == (1 if version else -1)
    assert (await ask(world, 15, DescribeGroupsRequest(["g"]), 6)).groups[0].error_message == (
        "Group g is not a classic group."
    )
    left = await ask(world, 68, ConsumerGroupHeartbeatRequest("g", joined.member_id, -1), version)
    assert (left.error_code, left.member_epoch, left.heartbeat_interval_ms) == (0, -1, 0)


@pytest.mark.parametrize("off", [{"group.version": 0}, {"group.coordinator.rebalance.protocols": ("classic",)}])
@in_world()
async def test_consumer_protocol_can_be_switched_off(world: World, off: dict[str, Any]) -> None:
    world.settings.update(off)
    assert (await ask(world, 68, consumer_join(1), 1)).error_code == E.UNSUPPORTED_VERSION
    described = await ask(world, 69, ConsumerGroupDescribeRequest(["g"]), 1)
    assert described.groups[0].error_code == E.UNSUPPORTED_VERSION


@in_world()
async def test_member_of_a_consumer_group_reads_offsets_at_its_epoch(world: World) -> None:
    world.topics.create("t", 1)
    joined = await ask(world, 68, consumer_join(1), 1)

    async def fetch(member_id: str | None, epoch: int) -> int:
        asked = [OffsetFetchRequestGroup("g", member_id, epoch, topics=None)]
        return int((await ask(world, 9, OffsetFetchRequest(groups=asked), 9)).groups[0].error_code)

    assert await fetch("m", joined.member_epoch) == 0
    assert await fetch("m", joined.member_epoch - 1) == E.STALE_MEMBER_EPOCH
    assert await fetch("x", joined.member_epoch) == E.UNKNOWN_MEMBER_ID
    assert await fetch(None, -1) == 0
