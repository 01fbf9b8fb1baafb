"""What a member decides under the consumer protocol, step by step, without a network and with a time that the test
moves."""

from __future__ import annotations

from uuid import UUID

import pytest

from semel.client.errors import FatalError, FencedError, UnsupportedByBrokerError
from semel.client.group.consumer_protocol_core import (
    JOINS,
    LEAVES,
    LEAVES_FOR_A_WHILE,
    ConsumerProtocolCore,
    HeartbeatDeparture,
)
from semel.client.group.consumer_protocol_states import ConsumerProtocolState
from semel.client.group.membership import NEVER_S
from semel.client.metadata import Metadata, TopicMetadata
from semel.client.settings import ConsumerSettings
from semel.client.types import RebalanceError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

TOPICS = frozenset(["t"])
T, U, T_AGAIN = (UUID(int=number).bytes for number in (1, 2, 3))
INTERVAL_MS = 5_000


class Member:
    """A core, and a consumer that takes on what it is offered when the test says so."""

    def __init__(self, **options: object) -> None:
        settings = {"max_poll_interval_ms": 60_000, "group_protocol": "consumer", **options}
        self.metadata = Metadata()
        self.knows("t", T)
        self.core = ConsumerProtocolCore(
            ConsumerSettings.of(bootstrap_servers="broker:1", group_id="g", **settings),
            self.metadata,
            lambda: 0.5,
            "m",
            now_s=0.0,
        )
        self.owned: set[TopicPartition] = set()

    def knows(self, name: str, topic_id: bytes) -> None:
        self.metadata.topics[name] = TopicMetadata(name, topic_id, False, {})

    def join(self, topics: frozenset[str] = TOPICS) -> ConsumerGroupHeartbeatRequest:
        return self.core.join(topics, self.owned)

    def joined(self, *numbers: int, epoch: int = 1, now_s: float = 0.0) -> None:
        """In the group, with these partitions of t."""
        self.join()
        self.core.responded(answer(epoch, {T: list(numbers)}), now_s)
        self.adopt()
        if self.core.wants_to_join:
            self.join()
            self.core.responded(answer(epoch), now_s)

    def beat(self, now_s: float) -> ConsumerGroupHeartbeatRequest:
        request = self.core.beat(now_s)
        assert isinstance(request, ConsumerGroupHeartbeatRequest)
        return request

    def adopt(self) -> bool:
        """Whether there was something to take on."""
        change = self.core.take_change()
        if change.lost:
            self.owned = set()
        if change.assignment is None:
            return False
        before, self.owned = self.owned, set(change.assignment)
        self.core.adopted(self.owned, bool(before - self.owned))
        return True


def answer(epoch: int, assigned: dict[bytes, list[int]] | None = None) -> ConsumerGroupHeartbeatResponse:
    response = ConsumerGroupHeartbeatResponse(member_id="m", member_epoch=epoch, heartbeat_interval_ms=INTERVAL_MS)
    if assigned is not None:
        response.assignment = Assignment([TopicPartitions(*each) for each in assigned.items()])
    return response


def refusal(code: ErrorCode) -> ConsumerGroupHeartbeatResponse:
    return ConsumerGroupHeartbeatResponse(error_code=code)


def of_t(*numbers: int) -> set[TopicPartition]:
    return {TopicPartition("t", number) for number in numbers}


# --- joining ---


def test_first_heartbeat_tells_everything_and_joins_with_epoch_0() -> None:
    member = Member(group_remote_assignor="range", group_instance_id="i")
    request = member.join()
    assert (request.member_epoch, request.member_id, request.instance_id) == (JOINS, "m", "i")
    assert (request.subscribed_topic_names, request.server_assignor) == (["t"], "range")
    assert (request.rebalance_timeout_ms, request.topic_partitions) == (60_000, [])
    assert member.core.is_rebalancing
    assert not member.core.is_due_to_join(10.0), "one at a time"


def test_member_without_partitions_hears_so() -> None:
    member = Member()
    with pytest.raises(RebalanceError, match="not in a generation"):
        member.core.identity()
    member.join()
    member.core.responded(answer(1), 0.0)
    assert member.core.take_change().assignment == []
    assert (member.core.identity().generation_id, member.core.identity().member_id) == (1, "m")


def test_first_assignment_comes_although_the_subscription_changed_before_it_was_taken() -> None:
    member = Member()
    member.join()
    member.core.responded(answer(1), 0.0)
    member.core.rejoin("the subscription changed")
    member.join()
    member.core.responded(answer(1), 0.0)
    assert member.core.take_change().assignment == []


def test_what_a_member_took_on_is_acknowledged_at_once_and_only_once() -> None:
    member = Member()
    member.join()
    member.core.responded(answer(1, {T: [0, 1]}), 0.0)
    assert not member.core.wants_to_join, "not before the consumer has it"
    assert member.adopt()
    assert member.owned == of_t(0, 1)
    assert member.core.is_due_to_join(0.0)
    request = member.join()
    assert request.topic_partitions == [TopicPartitions(T, [0, 1])]
    assert (request.member_epoch, request.subscribed_topic_names, request.rebalance_timeout_ms) == (1, None, -1)
    member.core.responded(answer(1), 0.0)
    assert not member.core.wants_to_join
    assert member.core.state is ConsumerProtocolState.STABLE
    assert member.beat(5.0).topic_partitions is None


# --- heartbeats ---


def test_heartbeats_follow_the_interval_of_the_coordinator() -> None:
    member = Member()
    assert member.core.next_event_s() == NEVER_S
    member.joined(0)
    assert member.core.next_event_s() == 5.0
    assert member.core.beat(4.9) is None
    request = member.beat(5.0)
    assert member.core.beat(6.0) is None, "one at a time"
    assert not member.core.wants_to_join
    response = answer(1)
    response.heartbeat_interval_ms = 1_000
    member.core.beaten(request, response, 6.0)
    assert member.core.next_event_s() == 7.0


def test_lost_response_is_followed_by_a_heartbeat_that_tells_everything() -> None:
    member = Member()
    member.joined(0)
    member.core.not_beaten(member.beat(5.0), 6.0)
    assert member.core.take_doubt()
    assert 6.0 < member.core.next_event_s() < 7.0, "soon: the session goes on"
    request = member.beat(7.0)
    assert (request.member_epoch, request.subscribed_topic_names) == (1, ["t"])
    assert request.topic_partitions == [TopicPartitions(T, [0])]
    member.core.beaten(request, answer(2, {T: [0, 1]}), 7.0)
    assert member.adopt()
    assert member.owned == of_t(0, 1)
    assert member.core.identity().generation_id == 2


def test_same_assignment_again_is_no_change() -> None:
    member = Member()
    member.joined(0)
    member.core.beaten(member.beat(5.0), answer(1, {T: [0]}), 5.0)
    assert member.core.take_change().assignment is None
    assert member.core.state is ConsumerProtocolState.STABLE


@pytest.mark.parametrize("code", [ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE])
def test_moved_coordinator_is_looked_for_and_the_partitions_stay(code: ErrorCode) -> None:
    member = Member()
    member.joined(0)
    member.core.beaten(member.beat(5.0), refusal(code), 5.0)
    assert member.core.take_doubt()
    assert not member.core.take_change().lost
    assert member.core.beat(5.0) is None, "after a pause"
    assert member.beat(6.0).subscribed_topic_names == ["t"]


def test_coordinator_that_loads_is_asked_again() -> None:
    member = Member()
    member.join()
    member.core.responded(refusal(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), 0.0)
    assert not member.core.take_doubt()
    assert not member.core.is_due_to_join(0.0)
    assert member.core.is_due_to_join(1.0)


# --- giving back ---


def test_revocation_is_acknowledged_when_the_consumer_has_given_back() -> None:
    member = Member()
    member.joined(0, 1, 2)
    member.core.beaten(member.beat(5.0), answer(1, {T: [0]}), 5.0)
    change = member.core.take_change()
    assert change.assignment == sorted(of_t(0))
    assert member.core.take_change().assignment is None
    request = member.beat(10.0)
    assert request.topic_partitions is None, "the consumer still commits, and owns what it owned"
    member.core.beaten(request, answer(1), 10.0)
    member.core.adopted(change.assignment, True)
    assert member.core.wants_to_join
    assert member.core.next_event_s() <= 10.0, "also where the program does not come back to poll()"
    acknowledged = member.core.join(TOPICS, change.assignment)
    assert (acknowledged.member_epoch, acknowledged.topic_partitions) == (1, [TopicPartitions(T, [0])])
    member.core.responded(answer(2), 10.0)
    assert member.core.identity().generation_id == 2


def test_assignment_that_changes_while_the_consumer_gives_back_replaces_the_other() -> None:
    member = Member()
    member.joined(0, 1)
    member.core.beaten(member.beat(5.0), answer(1, {T: [0]}), 5.0)
    first = member.core.take_change().assignment
    member.core.beaten(member.beat(10.0), answer(1, {T: [1]}), 10.0)
    second = member.core.take_change().assignment
    assert (first, second) == (sorted(of_t(0)), sorted(of_t(1)))
    member.core.adopted(of_t(1), True)
    assert member.core.join(TOPICS, of_t(1)).topic_partitions == [TopicPartitions(T, [1])]


def test_news_wait_for_the_response_to_the_heartbeat_before() -> None:
    member = Member()
    member.joined(0, 1)
    member.core.beaten(member.beat(5.0), answer(1, {T: [0]}), 5.0)
    change = member.core.take_change()
    request = member.beat(10.0)
    member.core.adopted(change.assignment or [], True)
    assert not member.core.wants_to_join
    member.core.beaten(request, answer(1), 10.5)
    assert member.core.next_event_s() <= 10.5
    assert member.beat(10.5).topic_partitions == [TopicPartitions(T, [0])]


# --- topics ---


def test_topic_that_the_metadata_does_not_have_waits_and_the_rest_is_taken_on() -> None:
    member = Member()
    member.join(frozenset(["t", "u"]))
    member.core.responded(answer(1, {T: [0], U: [0]}), 0.0)
    assert member.adopt()
    assert member.owned == of_t(0)
    assert member.core.has_unknown_topics
    assert not member.adopt()
    member.knows("u", U)
    assert not member.core.has_unknown_topics
    assert member.adopt()
    assert member.owned == {*of_t(0), TopicPartition("u", 0)}
    assert member.core.state is ConsumerProtocolState.STABLE


def test_partitions_of_a_topic_created_again_come_after_the_old_ones_went() -> None:
    member = Member()
    member.joined(0)
    member.knows("t", T_AGAIN)
    member.core.beaten(member.beat(5.0), answer(2, {T_AGAIN: [0]}), 5.0)
    assert member.adopt()
    assert member.owned == set()
    assert member.adopt()
    assert member.owned == of_t(0)
    assert member.join().topic_partitions == [TopicPartitions(T_AGAIN, [0])]


def test_new_subscription_is_told_at_once() -> None:
    member = Member()
    member.joined(0)
    member.knows("u", U)
    member.core.rejoin("the subscription changed")
    assert member.core.is_due_to_join(0.0)
    member.owned = set()  # the consumer does not want t any more
    request = member.join(frozenset(["u"]))
    assert (request.member_epoch, request.subscribed_topic_names, request.topic_partitions) == (1, ["u"], [])
    member.core.responded(answer(2, {U: [0]}), 0.0)
    assert member.adopt()
    assert member.owned == {TopicPartition("u", 0)}


def test_topic_that_is_wanted_again_before_the_coordinator_took_it_away_is_read_again() -> None:
    member = Member()
    member.joined(0)
    member.core.rejoin("the subscription changed")
    member.owned = set()
    member.join(frozenset(["u"]))
    member.core.responded(answer(1), 0.0)
    assert not member.adopt()
    member.core.rejoin("the subscription changed")
    member.join()
    member.core.responded(answer(1), 0.0)
    assert member.adopt()
    assert member.owned == of_t(0)


def test_interrupted_call_is_followed_by_a_heartbeat_that_tells_everything() -> None:
    """As the driver says it after Ctrl-C: whatever the response was, the next one has it again."""
    member = Member()
    member.join()
    member.core.responded(answer(1, {T: [0]}), 0.0)
    offered = member.core.take_change().assignment
    member.core.unanswered(0.0)
    member.core.rejoin("a call was interrupted")
    assert member.core.is_due_to_join(0.0)
    request = member.core.join(TOPICS, offered or [])
    assert request.topic_partitions == [TopicPartitions(T, [0])], "what the consumer took on, it owns"
    assert (request.subscribed_topic_names, request.rebalance_timeout_ms) == (["t"], 60_000)
    member.core.responded(answer(1, {T: [0]}), 0.0)
    assert not member.core.wants_to_join
    assert member.core.state is ConsumerProtocolState.STABLE


# --- the end of a membership ---


@pytest.mark.parametrize(
    "code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.GROUP_ID_NOT_FOUND]
)
def test_expelled_member_loses_its_partitions_and_joins_again_under_its_id(code: ErrorCode) -> None:
    member = Member()
    member.joined(0)
    before = member.core.identity()
    member.core.beaten(member.beat(5.0), refusal(code), 5.0)
    assert member.core.take_change().lost
    assert member.core.identity() == before, "so that the coordinator refuses its commits"
    assert member.core.renewed(before) is None
    assert member.core.next_event_s() == NEVER_S
    assert member.core.is_due_to_join(5.0)
    request = member.join()
    assert (request.member_epoch, request.member_id, request.topic_partitions) == (JOINS, "m", [])
    member.core.responded(answer(7, {T: [0]}), 5.0)
    assert member.core.renewed(before) is None, "others may have read on since"


def test_response_to_a_heartbeat_from_before_the_end_is_ignored() -> None:
    member = Member()
    member.joined(0)
    late = member.beat(5.0)
    member.core.reported(ErrorCode.UNKNOWN_MEMBER_ID, member.core.identity(), 5.0)
    assert member.core.take_change().lost
    member.join()
    member.core.beaten(late, answer(1, {T: [0]}), 6.0)
    member.core.not_beaten(late, 6.0)
    assert member.core.is_rebalancing
    member.core.responded(answer(3), 6.0)
    assert member.core.identity().generation_id == 3


def test_program_that_does_not_poll_leaves() -> None:
    member = Member(max_poll_interval_ms=10_000)
    member.joined(0)
    member.beat(5.0)
    assert member.core.next_event_s() == 10.0, "also while a heartbeat has no response"
    departure = member.core.beat(10.0)
    assert isinstance(departure, HeartbeatDeparture)
    assert departure.request(1).member_epoch == LEAVES
    assert member.core.take_change().lost
    assert member.core.beat(11.0) is None
    assert member.core.leave("closed") is None, "it has left"


def test_static_member_leaves_for_a_while() -> None:
    member = Member(group_instance_id="i")
    assert member.core.leave("closed") is None
    member = Member(group_instance_id="i")
    member.joined(0)
    departure = member.core.leave("closed")
    assert departure is not None
    request = departure.request(1)
    assert (request.member_epoch, request.instance_id, request.member_id) == (LEAVES_FOR_A_WHILE, "i", "m")


def test_member_that_leaves_while_it_joins_says_so_and_ignores_the_response() -> None:
    member = Member()
    member.join()
    assert member.core.leave("closed") is not None
    member.core.responded(answer(1, {T: [0]}), 0.0)
    assert member.core.state is ConsumerProtocolState.LEFT


def test_second_holder_of_an_instance_id_is_refused_until_the_first_has_left() -> None:
    member = Member(group_instance_id="i")
    member.join()
    member.core.responded(refusal(ErrorCode.UNRELEASED_INSTANCE_ID), 0.0)
    error = member.core.take_change().error
    assert isinstance(error, FatalError)
    assert "same group.instance.id is in the group" in str(error)
    assert member.core.is_due_to_join(1.0), "a program that polls on gets in when it is free"


def test_member_whose_instance_id_was_taken_stops() -> None:
    member = Member(group_instance_id="i")
    member.joined(0)
    member.core.beaten(member.beat(5.0), refusal(ErrorCode.FENCED_INSTANCE_ID), 5.0)
    change = member.core.take_change()
    assert change.lost
    assert isinstance(change.error, FencedError)
    assert member.core.is_fenced
    assert not member.core.wants_to_join


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.UNSUPPORTED_ASSIGNOR, r"group\.remote\.assignor"),
        (ErrorCode.GROUP_MAX_SIZE_REACHED, r"group\.consumer\.max\.size"),
        (ErrorCode.INVALID_REGULAR_EXPRESSION, "RE2"),
        (ErrorCode.GROUP_ID_NOT_FOUND, r"group\.protocol=classic"),
        (ErrorCode.GROUP_AUTHORIZATION_FAILED, "ACL"),
    ],
)
def test_refused_join_says_what_to_do(code: ErrorCode, words: str) -> None:
    member = Member()
    member.join()
    member.core.responded(refusal(code), 0.0)
    error = member.core.take_change().error
    assert error is not None
    with pytest.raises(type(error), match=words):
        raise error
    assert error.code is code


def test_broker_without_the_protocol_is_named_with_the_setting() -> None:
    member = Member()
    assert "group.protocol=classic" in str(member.core.unsupported("broker:1"))
    member.join()
    member.core.responded(refusal(ErrorCode.UNSUPPORTED_VERSION), 0.0)
    error = member.core.take_change().error
    assert isinstance(error, UnsupportedByBrokerError)
    assert "group.protocol=consumer needs a broker" in str(error)


# --- commits ---


def test_commit_of_an_older_epoch_may_be_repeated_under_the_new_one() -> None:
    member = Member()
    member.joined(0, epoch=3)
    old = member.core.identity()
    member.core.beaten(member.beat(5.0), answer(5), 5.0)
    renewed = member.core.renewed(old)
    assert renewed == member.core.identity()
    assert renewed is not None
    assert renewed.generation_id == 5


def test_stale_epoch_of_a_commit_brings_the_next_heartbeat_forward() -> None:
    member = Member()
    member.joined(0)
    member.core.reported(ErrorCode.STALE_MEMBER_EPOCH, member.core.identity(), 1.0)
    request = member.beat(1.0)
    assert request.topic_partitions == [TopicPartitions(T, [0])], "it tells everything"


def test_committed_offsets_are_fetched_by_a_member_of_its_epoch() -> None:
    member = Member()
    assert member.core.reader() is None
    member.joined(0, epoch=4)
    reader = member.core.reader()
    assert reader is not None
    assert (reader.member_id, reader.generation_id) == ("m", 4)
