"""Groups of the consumer protocol (KIP-848) over the bare protocol: every answer is Apache Kafka's, and semel's too."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.cluster import FIND_COORDINATOR, FindCoordinatorRequest
from semel.protocol.messages.groups import (
    CONSUMER_ASSIGNMENT,
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    CONSUMER_SUBSCRIPTION,
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    SYNC_GROUP,
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    ConsumerProtocolTopic,
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
    TopicPartitions,
)
from semel.protocol.messages.offsets import (
    OFFSET_COMMIT,
    OFFSET_FETCH,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
)
from semel.protocol.messages.topics import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    CreatableTopic,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
)
from semel.protocol.messages.transactions import (
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
    AddOffsetsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.waiting import eventually, until

Owned = dict[bytes, list[int]]
BEFORE_A_SESSION_ENDS_S = 30.0  # of 45 s: its end would also take a member out of its group


class Member:
    """What a client keeps about itself."""

    def __init__(self, groups: Groups, **fields: Any) -> None:
        self.groups = groups
        self.id = fields.pop("member_id", None) or str(uuid.uuid4())
        self.epoch = 0
        self.has: Owned = {}
        self.fields = fields

    def join(self, **changes: Any) -> Any:
        fields = {
            "rebalance_timeout_ms": 60_000,
            "subscribed_topic_names": [self.groups.topic],
            "topic_partitions": [],
            **self.fields,
            **changes,
        }
        return self._send(0, **fields)

    def beat(self, **changes: Any) -> Any:
        """A heartbeat that says what the member has."""
        owned = [TopicPartitions(*entry) for entry in self.has.items()]
        instance = {"instance_id": self.fields["instance_id"]} if "instance_id" in self.fields else {}
        return self._send(self.epoch, **{"topic_partitions": owned, **instance, **changes})

    def leave(self, epoch: int = -1) -> Any:
        instance = {"instance_id": self.fields["instance_id"]} if "instance_id" in self.fields else {}
        return self._send(epoch, **instance)

    def _send(self, epoch: int, **fields: Any) -> Any:
        fields = {"member_epoch": epoch, "member_id": self.id, **fields}
        request = ConsumerGroupHeartbeatRequest(group_id=self.groups.group, **fields)
        answer = self.groups.client.call(CONSUMER_GROUP_HEARTBEAT, request, 1)
        if answer.error_code == 0 and epoch >= 0:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                self.has = {each.topic_id: sorted(each.partitions) for each in answer.assignment.topic_partitions}
        return answer

    @property
    def partitions(self) -> list[int]:
        return self.has.get(self.groups.topic_id, [])


class Groups:
    """A group and a topic with 4 partitions for one test."""

    def __init__(self, cluster: Cluster, client: DirectClient) -> None:
        self.cluster, self.client = cluster, client
        self.group, self.topic = cluster.unique("consumers"), cluster.unique("read")
        self.topic_id = self.create(self.topic, 4)

        def ready() -> bool:
            request = FindCoordinatorRequest(coordinator_keys=[self.group])
            found = client.call(FIND_COORDINATOR, request, 4).coordinators[0]
            return bool(found.error_code == 0 and self.describe().error_code == E.GROUP_ID_NOT_FOUND)

        until(ready)

    def create(self, name: str, partitions: int) -> bytes:
        topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        created = self.client.call(CREATE_TOPICS, CreateTopicsRequest(topics=[topic], timeout_ms=10_000), 7)
        return bytes(created.topics[0].topic_id)

    def member(self, **fields: Any) -> Member:
        return Member(self, **fields)

    def describe(self) -> Any:
        return self.client.call(CONSUMER_GROUP_DESCRIBE, ConsumerGroupDescribeRequest([self.group], True), 1).groups[0]

    def shown(self, member: Member) -> list[int]:
        """The partitions that a member has, as the group's description says."""
        (entry,) = [each for each in self.describe().members if each.member_id == member.id]
        return sorted(index for topic in entry.assignment.topic_partitions for index in topic.partitions)

    def alone(self, **fields: Any) -> Member:
        """A member that has everything."""
        member = self.member(**fields)
        assert member.join().error_code == 0
        until(lambda: member.beat().error_code == 0 and member.partitions == [0, 1, 2, 3])
        return member

    def commit(
        self, offset: int, who: Member | None = None, version: int = 9, partition: int = 0, **changes: Any
    ) -> int:
        part = OffsetCommitRequestPartition(partition, offset)
        topic = OffsetCommitRequestTopic(name=self.topic, partitions=[part])
        fields = {} if who is None else {"generation_id_or_member_epoch": who.epoch, "member_id": who.id}
        request = OffsetCommitRequest(group_id=self.group, topics=[topic], **{**fields, **changes})
        return int(self.client.call(OFFSET_COMMIT, request, version).topics[0].partitions[0].error_code)


@pytest.fixture
def groups(cluster: Cluster) -> Iterator[Groups]:
    with DirectClient(cluster.bootstrap) as client:
        yield Groups(cluster, client)


# -- joining, sharing, leaving -----------------------------------------------------------------------------------------
def test_first_member_gets_everything(groups: Groups) -> None:
    member = groups.member()
    joined = member.join()
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (0, member.id, 2)
    assert joined.heartbeat_interval_ms == 5000
    assert joined.assignment is not None
    until(lambda: member.partitions == [0, 1, 2, 3] or member.beat().error_code != 0)
    quiet = member.beat(topic_partitions=None)
    assert (quiet.error_code, quiet.assignment) == (0, None)


def test_second_member_waits_for_what_the_first_gives_back(groups: Groups) -> None:
    first = groups.alone()
    second = groups.member()
    assert second.join().error_code == 0
    until(lambda: first.beat().error_code == 0 and len(first.partitions) == 2)
    epoch = first.epoch
    for _ in range(3):
        second.beat()
    assert second.partitions == [], "nobody has given anything back yet"
    assert groups.shown(first) == [0, 1, 2, 3], "what is not given back yet is still read"
    until(lambda: first.beat().error_code == 0 and first.epoch > epoch)  # it reports that it let go
    until(lambda: second.beat().error_code == 0 and len(second.partitions) == 2)
    assert sorted(first.partitions + second.partitions) == [0, 1, 2, 3]
    eventually(lambda: groups.describe().group_state, lambda state: state == "Stable")


def test_partitions_of_a_member_that_leaves_go_to_the_others(groups: Groups) -> None:
    first, second = groups.alone(), groups.member()
    second.join()
    until(lambda: first.beat().error_code == 0 and second.beat().error_code == 0 and len(second.partitions) == 2)
    left = second.leave()
    assert (left.error_code, left.member_id, left.member_epoch, left.assignment) == (0, second.id, -1, None)
    until(
        lambda: first.beat().error_code == 0 and first.partitions == [0, 1, 2, 3],
        "the partitions were not taken over",
        BEFORE_A_SESSION_ENDS_S,
    )
    assert second.beat().error_code == E.UNKNOWN_MEMBER_ID


def test_new_partitions_are_handed_out(groups: Groups) -> None:
    member = groups.alone()
    topic = CreatePartitionsTopic(groups.topic, 6, None)
    groups.client.call(CREATE_PARTITIONS, CreatePartitionsRequest([topic], 10_000), 3)
    until(lambda: member.beat().error_code == 0 and member.partitions == [0, 1, 2, 3, 4, 5])


def test_topic_that_comes_later_is_handed_out(groups: Groups) -> None:
    later = groups.cluster.unique("later")
    member = groups.member(subscribed_topic_names=[later])
    assert member.join().assignment.topic_partitions == []
    topic_id = groups.create(later, 2)
    until(lambda: member.beat().error_code == 0 and member.has == {topic_id: [0, 1]})


def test_subscription_can_change(groups: Groups) -> None:
    member = groups.alone()
    other = groups.cluster.unique("other")
    other_id = groups.create(other, 1)
    member.beat(subscribed_topic_names=[other])
    until(lambda: member.beat().error_code == 0 and member.has == {other_id: [0]})


def test_topics_by_expression(groups: Groups) -> None:
    member = groups.member(subscribed_topic_names=None, subscribed_topic_regex=groups.topic + "(|-more)")
    assert member.join().error_code == 0
    until(lambda: member.beat().error_code == 0 and member.partitions == [0, 1, 2, 3])
    bad = groups.member(subscribed_topic_names=None, subscribed_topic_regex="a(")
    assert bad.join().error_code == E.INVALID_REGULAR_EXPRESSION


def test_members_choose_the_assignor(groups: Groups) -> None:
    member = groups.alone(server_assignor="range")
    assert groups.describe().assignor_name == "range"
    assert member.beat(server_assignor="magic").error_code == E.UNSUPPORTED_ASSIGNOR


def test_of_two_assignors_with_as_many_votes_the_brokers_first_is_used(groups: Groups) -> None:
    groups.alone(server_assignor="range")
    assert groups.member(server_assignor="uniform").join().error_code == 0
    assert groups.describe().assignor_name == "uniform"


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"member_id": ""}, E.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, E.INVALID_REQUEST),
        ({"topic_partitions": None}, E.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, E.INVALID_REQUEST),
        ({"instance_id": ""}, E.INVALID_REQUEST),
        ({"rack_id": ""}, E.INVALID_REQUEST),
        ({"member_epoch": -3}, E.INVALID_REQUEST),
        ({"member_epoch": -2}, E.INVALID_REQUEST),
        ({"member_epoch": 3}, E.GROUP_ID_NOT_FOUND),
        ({"member_epoch": -1}, E.GROUP_ID_NOT_FOUND),
        ({"server_assignor": "magic"}, E.UNSUPPORTED_ASSIGNOR),
    ],
)
def test_first_heartbeat_that_cannot_be_is_refused(groups: Groups, changes: dict[str, Any], code: E) -> None:
    assert groups.member().join(**changes).error_code == code
    assert groups.describe().error_code == E.GROUP_ID_NOT_FOUND


def test_group_id_must_not_be_empty(groups: Groups) -> None:
    request = ConsumerGroupHeartbeatRequest("", "m", 0, rebalance_timeout_ms=1, subscribed_topic_names=["t"])
    assert groups.client.call(CONSUMER_GROUP_HEARTBEAT, request, 0).error_code == E.INVALID_REQUEST


def test_wrong_epochs_are_fenced(groups: Groups) -> None:
    member = groups.alone()
    assert member.beat(member_epoch=member.epoch + 1).error_code == E.FENCED_MEMBER_EPOCH
    assert groups.member().beat(member_epoch=1).error_code == E.UNKNOWN_MEMBER_ID
    assert member.beat().error_code == 0


def test_member_whose_answer_was_lost_may_repeat_its_last_epoch(groups: Groups) -> None:
    member = groups.alone()
    before = member.epoch
    other = groups.create(groups.cluster.unique("x"), 1)
    assert other
    member.beat(subscribed_topic_names=[groups.topic, "not-there-yet"])
    until(lambda: member.beat().error_code == 0 and member.epoch > before)
    repeated = member.beat(member_epoch=before)
    assert (repeated.error_code, repeated.member_epoch) == (0, member.epoch)


def test_member_that_lost_everything_may_join_again(groups: Groups) -> None:
    member = groups.alone()
    again = member.join()
    assert (again.error_code, again.member_epoch) == (0, member.epoch)
    assert again.assignment is not None


# -- static members ----------------------------------------------------------------------------------------------------
def test_static_member_comes_back_to_what_it_had(groups: Groups) -> None:
    old = groups.alone(instance_id="i")
    epoch = old.epoch
    rival = groups.member(instance_id="i")
    assert rival.join().error_code == E.UNRELEASED_INSTANCE_ID
    away = old.leave(-2)
    assert (away.error_code, away.member_epoch) == (0, -2)
    new = groups.member(instance_id="i")
    joined = new.join()
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (0, new.id, epoch)
    assert new.partitions == [0, 1, 2, 3]
    assert old.beat(member_epoch=epoch).error_code == E.FENCED_INSTANCE_ID
    assert old.leave().error_code == E.FENCED_INSTANCE_ID
    assert groups.member(instance_id="other").beat(member_epoch=1).error_code == E.UNKNOWN_MEMBER_ID


def test_operator_removes_a_static_member(groups: Groups) -> None:
    member = groups.alone(instance_id="i")
    answer = groups.client.call(LEAVE_GROUP, LeaveGroupRequest(groups.group, members=[MemberIdentity("", "i")]), 5)
    assert [each.error_code for each in answer.members] == [0]
    eventually(lambda: groups.describe().group_state, lambda state: state == "Empty", BEFORE_A_SESSION_ENDS_S)
    assert member.beat().error_code == E.UNKNOWN_MEMBER_ID


# -- positions ---------------------------------------------------------------------------------------------------------
def test_positions_need_the_members_epoch(groups: Groups) -> None:
    member = groups.alone()
    assert groups.commit(5, member) == 0
    assert groups.commit(6, member, generation_id_or_member_epoch=member.epoch + 7) == E.STALE_MEMBER_EPOCH
    assert groups.commit(6, member, member_id="x") == E.UNKNOWN_MEMBER_ID
    assert groups.commit(6) == E.UNKNOWN_MEMBER_ID
    assert groups.commit(6, member, version=8) == E.UNSUPPORTED_VERSION

    def fetch(member_id: str | None, epoch: int) -> tuple[int, list[int]]:
        asked = [OffsetFetchRequestGroup(groups.group, member_id, epoch, None)]
        answer = groups.client.call(OFFSET_FETCH, OffsetFetchRequest(groups=asked), 9).groups[0]
        return answer.error_code, [part.committed_offset for topic in answer.topics for part in topic.partitions]

    assert fetch(member.id, member.epoch) == (0, [5])
    assert fetch(None, -1) == (0, [5])
    assert fetch(member.id, member.epoch + 7) == (E.STALE_MEMBER_EPOCH, [])
    assert fetch("x", member.epoch) == (E.UNKNOWN_MEMBER_ID, [])
    member.leave()
    eventually(lambda: groups.describe().group_state, lambda state: state == "Empty", BEFORE_A_SESSION_ENDS_S)
    assert groups.commit(7) == 0
    assert fetch(None, -1) == (0, [7])


def test_member_behind_its_epoch_may_commit_what_it_kept(groups: Groups) -> None:
    """KIP-1251. A member that does not know of the rebalance yet commits with the epoch that it knows."""
    first = groups.alone()
    before, second = first.epoch, groups.member()
    assert second.join().error_code == 0
    until(lambda: first.beat().error_code == 0 and first.epoch > before)
    kept = first.partitions
    late = {"generation_id_or_member_epoch": before}
    codes = [groups.commit(5, first, partition=index, **late) for index in range(4)]
    assert codes == [0 if index in kept else E.STALE_MEMBER_EPOCH for index in range(4)]
    too_early = {"generation_id_or_member_epoch": before - 1}
    assert groups.commit(6, first, partition=kept[0], **too_early) == E.STALE_MEMBER_EPOCH


def test_transaction_that_names_no_member_commits_offsets_of_a_group_with_members(groups: Groups) -> None:
    groups.alone()
    transactional_id = groups.cluster.unique("t")

    def init() -> Any:
        return groups.client.call(INIT_PRODUCER_ID, InitProducerIdRequest(transactional_id, 60_000), 4)

    until(lambda: init().error_code == 0)
    owner = init()
    who = (transactional_id, owner.producer_id, owner.producer_epoch)
    until(lambda: groups.client.call(ADD_OFFSETS_TO_TXN, AddOffsetsToTxnRequest(*who, groups.group), 3).error_code == 0)

    def commit(member_id: str) -> int:
        topic = TxnOffsetCommitRequestTopic(groups.topic, [TxnOffsetCommitRequestPartition(0, 5)])
        request = TxnOffsetCommitRequest(who[0], groups.group, *who[1:], member_id=member_id, topics=[topic])
        return int(groups.client.call(TXN_OFFSET_COMMIT, request, 3).topics[0].partitions[0].error_code)

    assert commit("") == 0
    assert commit("x") == E.UNKNOWN_MEMBER_ID
    assert groups.client.call(END_TXN, EndTxnRequest(*who, committed=False), 3).error_code == 0


# -- administration and the other protocol -----------------------------------------------------------------------------
def test_groups_are_described_listed_and_deleted(groups: Groups) -> None:
    member = groups.alone()
    eventually(lambda: groups.describe().group_state, lambda state: state == "Stable")
    group = groups.describe()
    epoch = group.group_epoch
    assert (group.error_code, group.assignment_epoch, group.assignor_name) == (0, epoch, "uniform")
    assert group.authorized_operations == 3400
    (shown,) = group.members
    assert (shown.member_id, shown.member_epoch, shown.client_id, shown.client_host) == (
        member.id, epoch, "raw", "/127.0.0.1",
    )  # fmt: skip
    assert (shown.subscribed_topic_names, shown.subscribed_topic_regex, shown.member_type) == ([groups.topic], "", 1)
    for assignment in (shown.assignment, shown.target_assignment):
        (topic,) = assignment.topic_partitions
        assert (topic.topic_id, topic.topic_name, sorted(topic.partitions)) == (
            groups.topic_id, groups.topic, [0, 1, 2, 3],
        )  # fmt: skip
    listed = groups.client.call(LIST_GROUPS, ListGroupsRequest(types_filter=["consumer"]), 5)
    assert [(g.protocol_type, g.group_state, g.group_type) for g in listed.groups if g.group_id == groups.group] == [
        ("consumer", "Stable", "consumer")
    ]
    classic = groups.client.call(DESCRIBE_GROUPS, DescribeGroupsRequest([groups.group]), 6).groups[0]
    assert (classic.error_code, classic.group_state) == (E.GROUP_ID_NOT_FOUND, "Dead")

    def delete() -> int:
        answer = groups.client.call(DELETE_GROUPS, DeleteGroupsRequest([groups.group]), 2)
        return int(answer.results[0].error_code)

    assert delete() == E.NON_EMPTY_GROUP
    member.leave()
    eventually(delete, lambda code: code == 0, BEFORE_A_SESSION_ENDS_S)
    assert groups.describe().error_code == E.GROUP_ID_NOT_FOUND


def classic_join(groups: Groups, protocol_type: str = "consumer") -> Any:
    protocols = [JoinGroupRequestProtocol("range", b"\0\0\0\0\0\0\xff\xff\xff\xff")]
    request = JoinGroupRequest(groups.group, 10_000, 10_000, "", None, protocol_type, protocols)
    return groups.client.call(JOIN_GROUP, request, 3)


def test_empty_group_changes_its_protocol_with_its_next_member(groups: Groups) -> None:
    member = groups.alone()
    groups.commit(5, member)
    assert classic_join(groups, "connect").error_code == E.INCONSISTENT_GROUP_PROTOCOL
    heartbeat = HeartbeatRequest(groups.group, 1, "m")
    assert groups.client.call(HEARTBEAT, heartbeat, 3).error_code == E.UNKNOWN_MEMBER_ID
    member.leave()
    eventually(lambda: groups.describe().group_state, lambda state: state == "Empty", BEFORE_A_SESSION_ENDS_S)
    joined = classic_join(groups)
    assert (joined.error_code, joined.generation_id) == (0, 1)
    assert groups.describe().error_code == E.GROUP_ID_NOT_FOUND
    groups.client.call(LEAVE_GROUP, LeaveGroupRequest(groups.group, members=[MemberIdentity(joined.member_id)]), 5)
    back = groups.member()
    assert (back.join().error_code, back.epoch) == (0, 2)
    assert groups.commit(6, back) == 0


# -- migration: both protocols in one group ----------------------------------------------------------------------------
class ClassicMember:
    """A consumer of the classic protocol. `has` is what its last SyncGroup told, `held` what it has not given back."""

    def __init__(self, groups: Groups, protocol: str = "range", rebalance_timeout_ms: int = 60_000) -> None:
        self.groups, self.protocol, self.rebalance_timeout_ms = groups, protocol, rebalance_timeout_ms
        self.id, self.generation = "", -1
        self.has: list[int] = []
        self.held: set[int] = set()

    def join(self, *owned: int, protocol_type: str = "consumer") -> Any:
        held = [ConsumerProtocolTopic(self.groups.topic, list(owned))] if owned else []
        subscription = ConsumerProtocolSubscription([self.groups.topic], owned_partitions=held)
        metadata = struct.pack(">h", 1) + CONSUMER_SUBSCRIPTION.encode(subscription, 1)
        request = JoinGroupRequest(
            group_id=self.groups.group,
            session_timeout_ms=45_000,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            member_id=self.id,
            protocol_type=protocol_type,
            protocols=[JoinGroupRequestProtocol(self.protocol, metadata)],
        )
        answer = self.groups.client.call(JOIN_GROUP, request, 9)
        if answer.error_code == E.MEMBER_ID_REQUIRED:
            self.id = answer.member_id
            return self.join(*owned, protocol_type=protocol_type)
        if answer.error_code == 0:
            self.generation, self.held = answer.generation_id, set(owned)
        return answer

    def sync(self, *leader_assigns: int) -> int:
        named = ConsumerProtocolAssignment([ConsumerProtocolTopic(self.groups.topic, list(leader_assigns))])
        data = struct.pack(">h", 1) + CONSUMER_ASSIGNMENT.encode(named, 1)
        given = [SyncGroupRequestAssignment(self.id, data)] if leader_assigns else []
        request = SyncGroupRequest(
            self.groups.group, self.generation, self.id, None, "consumer", self.protocol, assignments=given
        )
        answer = self.groups.client.call(SYNC_GROUP, request, 5)
        if answer.error_code == 0:
            topics = CONSUMER_ASSIGNMENT.decode_from(answer.assignment, 1, 2)[0].assigned_partitions
            self.has = sorted(index for topic in topics for index in topic.partitions)
            self.held |= set(self.has)
        return int(answer.error_code)

    def heartbeat(self) -> int:
        request = HeartbeatRequest(self.groups.group, self.generation, self.id)
        return int(self.groups.client.call(HEARTBEAT, request, 4).error_code)

    def follow(self, *, keeps: bool = False) -> None:
        """Joins again if it has to, with what it has or without."""
        if self.heartbeat() == E.REBALANCE_IN_PROGRESS:
            assert self.join(*(self.has if keeps else ())).error_code == 0
            assert self.sync() in (E.NONE, E.REBALANCE_IN_PROGRESS)

    def leads(self) -> ClassicMember:
        """The only member of a classic group, with everything assigned to itself."""
        other = copy(self.groups)
        other.group = f"{self.groups.group}-first"
        other.alone()  # Kafka's coordinator learns of a topic a moment after its brokers do
        assert self.join().error_code == 0
        assert (self.sync(0, 1, 2, 3), self.has) == (0, [0, 1, 2, 3])
        return self


def kind_of(groups: Groups) -> str:
    listed = groups.client.call(LIST_GROUPS, ListGroupsRequest(), 5).groups
    return next((each.group_type for each in listed if each.group_id == groups.group), "none")


def share(old: ClassicMember, new: Member, *, keeps: bool = False) -> None:
    """Until each has two of the partitions; the broker never hands out what the other one still holds."""

    def step() -> bool:
        assert new.beat().error_code == 0
        assert old.held.isdisjoint(new.partitions)
        old.follow(keeps=keeps)
        return (len(old.has), len(new.partitions), old.heartbeat()) == (2, 2, 0)

    until(step)
    assert sorted(old.has + new.partitions) == [0, 1, 2, 3]


def test_classic_group_becomes_a_consumer_group_and_a_classic_one_again(groups: Groups) -> None:
    old, new = ClassicMember(groups).leads(), groups.member()
    assert new.join().error_code == 0
    assert kind_of(groups) == "consumer"
    assert (old.heartbeat(), new.partitions) == (E.REBALANCE_IN_PROGRESS, [])
    joined = old.join()  # it gave everything back before, as consumers without cooperation do
    assert (joined.error_code, joined.leader, joined.members) == (0, "", [])
    assert old.sync() == 0
    share(old, new)
    assert sorted(each.member_type for each in groups.describe().members) == [0, 1]
    who = {"generation_id_or_member_epoch": old.generation, "member_id": old.id}
    assert groups.commit(5, version=8, **who) == E.NONE
    assert groups.commit(5, version=8, **{**who, "generation_id_or_member_epoch": 99}) == E.ILLEGAL_GENERATION
    assert new.leave().error_code == 0
    assert kind_of(groups) == "classic"
    assert old.heartbeat() == E.REBALANCE_IN_PROGRESS
    last = old.generation
    assert (old.join().leader, old.generation) == (old.id, last + 1)
    assert (old.sync(0, 1, 2, 3), old.has, old.heartbeat()) == (0, [0, 1, 2, 3], 0)


def test_cooperative_member_gives_back_before_the_others_get_it(groups: Groups) -> None:
    old, new = ClassicMember(groups, "cooperative-sticky").leads(), groups.member()
    assert new.join().error_code == 0
    share(old, new, keeps=True)


def test_classic_member_joins_and_leaves_a_consumer_group(groups: Groups) -> None:
    new, old = groups.alone(), ClassicMember(groups)
    assert ClassicMember(groups).join(protocol_type="connect").error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert old.join().error_code == 0
    assert ClassicMember(groups, "roundrobin").join().error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert (old.sync(), old.has) == (0, [])
    share(old, new)
    left = groups.client.call(LEAVE_GROUP, LeaveGroupRequest(groups.group, members=[MemberIdentity(old.id)]), 5)
    assert [each.error_code for each in left.members] == [0]
    until(lambda: new.beat().error_code == 0 and new.partitions == [0, 1, 2, 3])
    assert (kind_of(groups), old.heartbeat()) == ("consumer", E.UNKNOWN_MEMBER_ID)


def test_classic_member_that_does_not_join_again_is_removed(groups: Groups) -> None:
    old, new = ClassicMember(groups, rebalance_timeout_ms=500).leads(), groups.member()
    assert new.join().error_code == 0
    until(lambda: old.heartbeat() == E.UNKNOWN_MEMBER_ID)
    until(lambda: new.beat().error_code == 0 and new.partitions == [0, 1, 2, 3])


def test_group_of_both_kinds_survives_kill_9(semel_broker: SemelBroker) -> None:
    with DirectClient(semel_broker.bootstrap) as client:
        groups = Groups(Cluster("semel", semel_broker), client)
        old, new = ClassicMember(groups).leads(), groups.member()
        assert (new.join().error_code, old.join().error_code, old.sync()) == (0, 0, 0)
        until(lambda: new.beat().error_code == 0 and len(new.partitions) == 2)
    semel_broker.kill()
    semel_broker.start()
    with DirectClient(semel_broker.bootstrap) as client:
        groups.client = client
        assert (old.heartbeat(), old.sync(), new.beat().error_code) == (0, 0, 0)
        assert sorted(old.has + new.partitions) == [0, 1, 2, 3]
        assert new.leave().error_code == 0
    semel_broker.kill()
    semel_broker.start()
    with DirectClient(semel_broker.bootstrap) as client:
        groups.client = client
        assert (kind_of(groups), old.join().leader) == ("classic", old.id)


def test_migration_can_be_switched_off(tmp_path: Path) -> None:
    with (
        SemelBroker(tmp_path, "--set", "group.consumer.migration.policy=disabled") as broker,
        DirectClient(broker.bootstrap) as client,
    ):
        groups = Groups(Cluster("semel", broker), client)
        old, new = ClassicMember(groups).leads(), groups.member()
        assert new.join().error_code == E.GROUP_ID_NOT_FOUND
        assert (kind_of(groups), old.heartbeat()) == ("classic", 0)
