"""Groups over the bare protocol: every answer here is Apache Kafka's, and semel's is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.cluster import (
    FIND_COORDINATOR,
    METADATA,
    FindCoordinatorRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from semel.protocol.messages.groups import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    SYNC_GROUP,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    ListGroupsRequest,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from semel.protocol.messages.offsets import (
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
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
from semel.protocol.messages.topics import CREATE_TOPICS, CreatableTopic, CreateTopicsRequest
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.waiting import eventually

SUBSCRIPTION = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"


class Groups:
    """A group of its own for one test, and words for what its members do."""

    def __init__(self, cluster: Cluster, client: DirectClient) -> None:
        self.cluster, self.client = cluster, client
        self.group, self.topic = cluster.unique("group"), cluster.unique("topic")
        topic = CreatableTopic(name=self.topic, num_partitions=2, replication_factor=1)
        created = client.call(CREATE_TOPICS, CreateTopicsRequest(topics=[topic], timeout_ms=10_000), 7)
        self.topic_id = created.topics[0].topic_id
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Kafka makes its internal topic with the first question for a coordinator, and new topics take a moment."""

        def ask() -> tuple[Any, Any, Any]:
            search = FindCoordinatorRequest(coordinator_keys=[self.group])
            look = MetadataRequest(topics=[MetadataRequestTopic(name=self.topic)])
            return (
                self.client.call(FIND_COORDINATOR, search, 4).coordinators[0],
                self.client.call(METADATA, look, 12).topics[0],
                self.client.call(DESCRIBE_GROUPS, DescribeGroupsRequest([self.group]), 5).groups[0],
            )

        def is_ready(answers: tuple[Any, Any, Any]) -> bool:
            return not any(answer.error_code for answer in answers) and len(answers[1].partitions) == 2

        eventually(ask, is_ready, otherwise="the coordinator, the topic and the group are not ready")

    def join_request(self, member_id: str = "", **changes: Any) -> JoinGroupRequest:
        names = changes.pop("protocols", ["range"])
        metadata = changes.pop("metadata", SUBSCRIPTION)
        fields = {
            "group_id": self.group,
            "session_timeout_ms": 45_000,
            "rebalance_timeout_ms": 60_000,
            "member_id": member_id,
            "protocol_type": "consumer",
            "protocols": [JoinGroupRequestProtocol(name, metadata) for name in names],
        }
        return JoinGroupRequest(**{**fields, **changes})

    def join(self, member_id: str = "", *, version: int = 9, client: DirectClient | None = None, **changes: Any) -> Any:
        """Joins; takes the second step where a member id is required."""
        answer = (client or self.client).call(JOIN_GROUP, self.join_request(member_id, **changes), version)
        if answer.error_code == E.MEMBER_ID_REQUIRED:
            answer = (client or self.client).call(JOIN_GROUP, self.join_request(answer.member_id, **changes), version)
        return answer

    def sync(self, joined: Any, shares: dict[str, bytes] | None = None, **changes: Any) -> Any:
        assignments = [SyncGroupRequestAssignment(*share) for share in (shares or {}).items()]
        fields = {"protocol_type": "consumer", "protocol_name": joined.protocol_name, "assignments": assignments}
        request = SyncGroupRequest(
            self.group, changes.pop("generation", joined.generation_id), joined.member_id, **{**fields, **changes}
        )
        return self.client.call(SYNC_GROUP, request, 5)

    def member(self, **changes: Any) -> Any:
        """The only member of a stable group."""
        joined = self.join(**changes)
        instance = {"group_instance_id": changes["group_instance_id"]} if "group_instance_id" in changes else {}
        assert self.sync(joined, {joined.member_id: b"share"}, **instance).error_code == 0
        return joined

    def beat(self, joined: Any, instance: str | None = None, **changes: Any) -> int:
        fields = {"generation_id": joined.generation_id, "member_id": joined.member_id}
        request = HeartbeatRequest(group_id=self.group, group_instance_id=instance, **{**fields, **changes})
        return int(self.client.call(HEARTBEAT, request, 4).error_code)

    def leave(self, *members: MemberIdentity) -> list[int]:
        answer = self.client.call(LEAVE_GROUP, LeaveGroupRequest(self.group, members=list(members)), 5)
        assert answer.error_code == 0
        return [member.error_code for member in answer.members]

    def commit(self, offset: int, version: int = 9, partition: int = 0, group: str | None = None, **who: Any) -> int:
        part = OffsetCommitRequestPartition(partition, offset, committed_metadata="note")
        topic = OffsetCommitRequestTopic(name=self.topic, partitions=[part])
        if version >= 10:
            topic = OffsetCommitRequestTopic(topic_id=self.topic_id, partitions=[part])
        request = OffsetCommitRequest(group_id=group or self.group, topics=[topic], **who)
        return int(self.client.call(OFFSET_COMMIT, request, version).topics[0].partitions[0].error_code)

    def fetch(self, group: str | None = None) -> dict[int, int]:
        asked = [OffsetFetchRequestGroup(group or self.group, topics=None)]
        answer = self.client.call(OFFSET_FETCH, OffsetFetchRequest(groups=asked), 9).groups[0]
        return {part.partition_index: part.committed_offset for topic in answer.topics for part in topic.partitions}

    def state(self) -> str:
        return str(self.client.call(DESCRIBE_GROUPS, DescribeGroupsRequest([self.group]), 5).groups[0].group_state)


@pytest.fixture
def groups(cluster: Cluster) -> Iterator[Groups]:
    with DirectClient(cluster.bootstrap) as client:
        yield Groups(cluster, client)


# -- joining -----------------------------------------------------------------------------------------------------------
def test_member_id_is_handed_out_then_used(groups: Groups) -> None:
    first = groups.client.call(JOIN_GROUP, groups.join_request(), 9)
    assert (first.error_code, first.generation_id, first.protocol_name) == (E.MEMBER_ID_REQUIRED, -1, None)
    assert first.member_id.startswith("raw-")
    joined = groups.client.call(JOIN_GROUP, groups.join_request(first.member_id), 9)
    assert (joined.error_code, joined.generation_id, joined.leader) == (0, 1, first.member_id)
    assert (joined.protocol_type, joined.protocol_name, joined.skip_assignment) == ("consumer", "range", False)
    assert [(member.member_id, member.metadata) for member in joined.members] == [(first.member_id, SUBSCRIPTION)]


@pytest.mark.parametrize("version", range(10))
def test_every_version_joins(groups: Groups, version: int) -> None:
    joined = groups.join(version=version)
    assert (joined.error_code, joined.generation_id) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"group_id": ""}, E.INVALID_GROUP_ID),
        ({"session_timeout_ms": 5999}, E.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, E.INVALID_SESSION_TIMEOUT),
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"protocols": []}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, E.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_first_join_that_cannot_be_is_refused(groups: Groups, changes: dict[str, Any], code: E) -> None:
    answer = groups.client.call(JOIN_GROUP, groups.join_request(**changes), 9)
    assert (answer.error_code, answer.member_id) == (code, changes.get("member_id", ""))
    assert groups.client.call(JOIN_GROUP, groups.join_request(**changes), 5).protocol_name == ""


@pytest.mark.parametrize("changes", [{"protocols": ["other"]}, {"protocol_type": "connect"}])
def test_join_that_does_not_fit_the_group_is_refused(groups: Groups, changes: dict[str, Any]) -> None:
    groups.member()
    answer = groups.client.call(JOIN_GROUP, groups.join_request(**changes), 9)
    assert (answer.error_code, answer.member_id) == (E.INCONSISTENT_GROUP_PROTOCOL, "")
    assert groups.state() == "Stable"


def test_second_member_makes_the_first_join_again(groups: Groups) -> None:
    first = groups.member()
    with DirectClient(groups.cluster.bootstrap) as other:
        handed_out = other.call(JOIN_GROUP, groups.join_request(), 9).member_id
        other.send(JOIN_GROUP, groups.join_request(handed_out), 9)
        eventually(lambda: groups.beat(first), lambda code: code == E.REBALANCE_IN_PROGRESS)
        assert groups.state() == "PreparingRebalance"
        assert groups.sync(first).error_code == E.REBALANCE_IN_PROGRESS
        again, second = groups.join(first.member_id), other.receive(JOIN_GROUP, 9)
        assert {again.generation_id, second.generation_id} == {2}
        assert (again.leader, len(again.members), second.members) == (first.member_id, 2, [])
        assert groups.state() == "CompletingRebalance"
        assert groups.beat(again) == E.NONE
        assert groups.commit(1, generation_id_or_member_epoch=2, member_id=first.member_id) == E.REBALANCE_IN_PROGRESS
        other.send(
            SYNC_GROUP,
            SyncGroupRequest(
                groups.group, 2, second.member_id, protocol_type="consumer", protocol_name=second.protocol_name
            ),
            5,
        )
        assert groups.sync(again, {second.member_id: b"two"}).assignment == b""
        assert other.receive(SYNC_GROUP, 5).assignment == b"two"
    assert groups.state() == "Stable"


def test_follower_that_joins_unchanged_keeps_its_generation_and_a_changed_one_does_not(groups: Groups) -> None:
    first = groups.member()
    with DirectClient(groups.cluster.bootstrap) as other:
        handed_out = other.call(JOIN_GROUP, groups.join_request(), 9).member_id
        other.send(JOIN_GROUP, groups.join_request(handed_out), 9)
        eventually(lambda: groups.beat(first), lambda code: code == E.REBALANCE_IN_PROGRESS)
        leader, follower = groups.join(first.member_id), other.receive(JOIN_GROUP, 9)
        assert groups.sync(leader, {}).error_code == 0
        same = groups.join(follower.member_id)
        assert (same.error_code, same.generation_id, same.members) == (0, 2, [])
        other.send(JOIN_GROUP, groups.join_request(follower.member_id, metadata=SUBSCRIPTION + b""), 9)
        assert other.receive(JOIN_GROUP, 9).generation_id == 2
        other.send(JOIN_GROUP, groups.join_request(follower.member_id, metadata=b"\0\0\0\0\0\0\xff\xff\xff\xff"), 9)
        eventually(lambda: groups.beat(leader), lambda code: code == E.REBALANCE_IN_PROGRESS)
        assert groups.join(leader.member_id).generation_id == 3
        assert other.receive(JOIN_GROUP, 9).generation_id == 3


def test_leader_that_joins_again_starts_a_generation(groups: Groups) -> None:
    first = groups.member()
    assert groups.join(first.member_id).generation_id == 2


def test_session_ends_without_heartbeats(groups: Groups) -> None:
    joined = groups.member(session_timeout_ms=6000)
    eventually(groups.state, lambda state: state == "Empty")
    assert groups.beat(joined) == E.UNKNOWN_MEMBER_ID


# -- sync and heartbeat ------------------------------------------------------------------------------------------------
def test_sync_and_heartbeat_are_refused_with_kafkas_codes(groups: Groups) -> None:
    joined = groups.member()
    assert groups.sync(joined).assignment == b"share"
    assert groups.sync(joined, generation=5).error_code == E.ILLEGAL_GENERATION
    assert groups.sync(joined, protocol_name="x").error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert groups.sync(joined, protocol_type=None).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert groups.sync(joined, group_instance_id="i").error_code == E.UNKNOWN_MEMBER_ID
    assert groups.beat(joined) == 0
    assert groups.beat(joined, generation_id=5) == E.ILLEGAL_GENERATION
    assert groups.beat(joined, member_id="x") == E.UNKNOWN_MEMBER_ID
    assert groups.beat(joined, "i") == E.UNKNOWN_MEMBER_ID
    assert groups.client.call(HEARTBEAT, HeartbeatRequest("", 1, "m"), 4).error_code == E.INVALID_GROUP_ID
    assert groups.client.call(HEARTBEAT, HeartbeatRequest("not there", 1, "m"), 4).error_code == E.UNKNOWN_MEMBER_ID
    assert groups.client.call(SYNC_GROUP, SyncGroupRequest("not there", 1, "m"), 3).error_code == E.UNKNOWN_MEMBER_ID
    assert groups.client.call(SYNC_GROUP, SyncGroupRequest("", 1, "m"), 3).error_code == E.INVALID_GROUP_ID


# -- leaving -----------------------------------------------------------------------------------------------------------
def test_members_leave_each_with_its_own_code(groups: Groups) -> None:
    joined = groups.member()
    codes = groups.leave(MemberIdentity("x"), MemberIdentity("", "i"), MemberIdentity(joined.member_id, None, "bye"))
    assert codes == [E.UNKNOWN_MEMBER_ID, E.UNKNOWN_MEMBER_ID, 0]
    assert groups.state() == "Empty"
    assert groups.leave(MemberIdentity(joined.member_id)) == [E.UNKNOWN_MEMBER_ID]
    assert groups.client.call(LEAVE_GROUP, LeaveGroupRequest("not there", "m"), 2).error_code == E.UNKNOWN_MEMBER_ID
    assert groups.client.call(LEAVE_GROUP, LeaveGroupRequest("", members=[]), 5).error_code == E.INVALID_GROUP_ID


def test_handed_out_member_id_can_leave(groups: Groups) -> None:
    handed_out = groups.client.call(JOIN_GROUP, groups.join_request(), 9).member_id
    assert groups.leave(MemberIdentity(handed_out)) == [0]
    assert groups.join(handed_out).error_code == E.UNKNOWN_MEMBER_ID


# -- static members ----------------------------------------------------------------------------------------------------
def test_static_member_comes_back_without_a_rebalance(groups: Groups) -> None:
    old = groups.member(group_instance_id="i")
    assert old.member_id.startswith("i-")
    new = groups.join(group_instance_id="i")
    assert new.member_id != old.member_id
    assert (new.error_code, new.generation_id, new.leader, new.skip_assignment) == (0, 1, new.member_id, True)
    assert [(member.member_id, member.group_instance_id) for member in new.members] == [(new.member_id, "i")]
    assert groups.sync(new, group_instance_id="i").assignment == b"share"
    assert groups.beat(old, "i") == E.FENCED_INSTANCE_ID
    assert groups.sync(old, group_instance_id="i").error_code == E.FENCED_INSTANCE_ID
    assert groups.join(old.member_id, group_instance_id="i").error_code == E.FENCED_INSTANCE_ID
    assert groups.leave(MemberIdentity(old.member_id, "i")) == [E.FENCED_INSTANCE_ID]
    fenced = {"generation_id_or_member_epoch": 1, "member_id": old.member_id, "group_instance_id": "i"}
    assert groups.commit(1, **fenced) == E.FENCED_INSTANCE_ID
    assert groups.commit(1, **{**fenced, "member_id": new.member_id}) == 0


def test_static_leader_of_an_older_version_learns_that_another_leads(groups: Groups) -> None:
    old = groups.member(group_instance_id="i")
    new = groups.join(version=8, group_instance_id="i")
    assert (new.generation_id, new.leader, new.members) == (1, old.member_id, [])


def test_static_member_that_changes_the_protocol_rebalances(groups: Groups) -> None:
    groups.member(group_instance_id="i", protocols=["a", "b"])
    new = groups.join(group_instance_id="i", protocols=["b", "a"])
    assert (new.error_code, new.generation_id, new.protocol_name) == (0, 2, "b")


def test_static_member_is_removed_by_its_instance_id(groups: Groups) -> None:
    groups.member(group_instance_id="i")
    assert groups.leave(MemberIdentity("", "i")) == [0]
    assert groups.state() == "Empty"


# -- positions ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", range(2, 11))
def test_every_version_commits(groups: Groups, version: int) -> None:
    assert groups.commit(version, version) == 0
    assert groups.fetch() == {0: version}


def test_commits_are_refused_with_kafkas_codes(groups: Groups) -> None:
    joined = groups.member()
    who = {"generation_id_or_member_epoch": 1, "member_id": joined.member_id}
    assert groups.commit(1, **who) == 0
    assert groups.commit(2) == E.UNKNOWN_MEMBER_ID
    assert groups.commit(2, **{**who, "generation_id_or_member_epoch": 2}) == E.ILLEGAL_GENERATION
    assert groups.commit(2, **{**who, "member_id": "x"}) == E.UNKNOWN_MEMBER_ID
    assert groups.commit(2, **who, group_instance_id="i") == E.UNKNOWN_MEMBER_ID
    assert groups.commit(2, partition=7, **who) == E.UNKNOWN_TOPIC_OR_PARTITION
    other = groups.cluster.unique("group")
    assert groups.commit(2, 8, group=other, **who) == E.ILLEGAL_GENERATION
    assert groups.commit(2, 9, group=other, **who) == E.GROUP_ID_NOT_FOUND
    assert groups.commit(2, 10, group=other, **who) == E.GROUP_ID_NOT_FOUND
    assert groups.fetch() == {0: 1}
    assert groups.fetch(other) == {}


def test_simple_consumer_commits_to_an_empty_group_even_with_a_member_id(groups: Groups) -> None:
    joined = groups.member()
    groups.leave(MemberIdentity(joined.member_id))
    assert groups.commit(3) == 0
    assert groups.commit(4, member_id="x") == 0
    assert groups.commit(5, generation_id_or_member_epoch=2, member_id=joined.member_id) == E.UNKNOWN_MEMBER_ID
    assert groups.fetch() == {0: 4}


def test_offsets_are_fetched_in_old_and_new_forms(groups: Groups) -> None:
    groups.commit(5)
    old = groups.client.call(
        OFFSET_FETCH,
        OffsetFetchRequest(groups.group, [OffsetFetchRequestTopics(groups.topic, partition_indexes=[0, 1, 7])]),
        5,
    )
    parts = [(p.partition_index, p.committed_offset, p.metadata, p.error_code) for p in old.topics[0].partitions]
    assert (parts, old.error_code) == ([(0, 5, "note", 0), (1, -1, "", 0), (7, -1, "", 0)], 0)
    asked = [
        OffsetFetchRequestTopics(topic_id=groups.topic_id, partition_indexes=[0]),
        OffsetFetchRequestTopics(topic_id=b"?" * 16, partition_indexes=[0]),
    ]
    request = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(groups.group, topics=asked), OffsetFetchRequestGroup("not there", topics=None)]
    )
    new = groups.client.call(OFFSET_FETCH, request, 10)
    found = {
        topic.topic_id: [(part.committed_offset, part.error_code) for part in topic.partitions]
        for topic in new.groups[0].topics
    }
    assert found == {groups.topic_id: [(5, 0)], b"?" * 16: [(-1, E.UNKNOWN_TOPIC_ID)]}
    assert (new.groups[1].group_id, new.groups[1].topics, new.groups[1].error_code) == ("not there", [], 0)


def test_offsets_are_deleted_unless_they_are_read(groups: Groups) -> None:
    joined = groups.member(metadata=b"\0\0\0\0\0\1" + _string(groups.topic) + b"\xff\xff\xff\xff")
    groups.commit(5, generation_id_or_member_epoch=1, member_id=joined.member_id)

    def delete() -> dict[tuple[str, int], int]:
        asked = [
            OffsetDeleteRequestTopic(groups.topic, [OffsetDeleteRequestPartition(0), OffsetDeleteRequestPartition(7)]),
            OffsetDeleteRequestTopic("not-there", [OffsetDeleteRequestPartition(0)]),
        ]
        answer = groups.client.call(OFFSET_DELETE, OffsetDeleteRequest(groups.group, asked), 0)
        assert answer.error_code == 0
        return {(topic.name, p.partition_index): p.error_code for topic in answer.topics for p in topic.partitions}

    unknown = E.UNKNOWN_TOPIC_OR_PARTITION
    expected = {(groups.topic, 0): E.GROUP_SUBSCRIBED_TO_TOPIC, (groups.topic, 7): unknown, ("not-there", 0): unknown}
    assert delete() == expected
    groups.leave(MemberIdentity(joined.member_id))
    assert delete() == {**expected, (groups.topic, 0): 0}
    assert groups.fetch() == {}
    missing = groups.client.call(OFFSET_DELETE, OffsetDeleteRequest("not there", []), 0)
    assert missing.error_code == E.GROUP_ID_NOT_FOUND


# -- administration ----------------------------------------------------------------------------------------------------
def test_groups_are_described_and_listed(groups: Groups) -> None:
    joined = groups.member()
    answer = groups.client.call(DESCRIBE_GROUPS, DescribeGroupsRequest([groups.group, "not there"], True), 6)
    described = {group.group_id: group for group in answer.groups}
    group, missing = described[groups.group], described["not there"]
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    assert group.authorized_operations == 3400
    (member,) = group.members
    assert (member.member_id, member.client_id, member.client_host) == (joined.member_id, "raw", "/127.0.0.1")
    assert (member.member_metadata, member.member_assignment) == (SUBSCRIPTION, b"share")
    assert (missing.error_code, missing.group_state) == (E.GROUP_ID_NOT_FOUND, "Dead")
    assert missing.error_message == "Group not there not found."

    def listed(**filters: list[str]) -> list[tuple[str, str, str]]:
        answer = groups.client.call(LIST_GROUPS, ListGroupsRequest(**filters), 5)
        return [(g.protocol_type, g.group_state, g.group_type) for g in answer.groups if g.group_id == groups.group]

    shown = [("consumer", "Stable", "classic")]
    assert listed() == listed(states_filter=["sTable"]) == listed(types_filter=["Classic"]) == shown
    assert listed(states_filter=["Empty"]) == listed(types_filter=["consumer"]) == []


def test_only_empty_groups_are_deleted(groups: Groups) -> None:
    joined = groups.member()
    groups.commit(5, generation_id_or_member_epoch=1, member_id=joined.member_id)

    def delete() -> dict[str, int]:
        answer = groups.client.call(DELETE_GROUPS, DeleteGroupsRequest([groups.group, "not there"]), 2)
        return {result.group_id: result.error_code for result in answer.results}

    assert delete() == {groups.group: E.NON_EMPTY_GROUP, "not there": E.GROUP_ID_NOT_FOUND}
    groups.leave(MemberIdentity(joined.member_id))
    assert delete()[groups.group] == 0
    assert (groups.fetch(), groups.state()) == ({}, "Dead")
    assert delete()[groups.group] == E.GROUP_ID_NOT_FOUND


def _string(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()
