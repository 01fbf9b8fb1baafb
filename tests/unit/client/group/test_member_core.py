"""What a group member decides, step by step, without a network and with a time that the test moves."""

from __future__ import annotations

import pytest

from semel.client.group.assignors import (
    ASSIGNORS,
    NO_GENERATION,
    RANGE,
    decode_member,
    encode_assignment,
    encode_subscription,
)
from semel.client.group.core import Departure, MemberCore, Sharing, subscribed_topics
from semel.client.group.membership import NEVER_S
from semel.client.group.states import MembershipState
from semel.client.settings import ConsumerSettings
from semel.client.types import RebalanceError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupResponse,
    JoinGroupResponseMember,
    SyncGroupRequest,
    SyncGroupResponse,
)

TOPICS = frozenset(["t"])
MINE = [TopicPartition("t", 0), TopicPartition("t", 1)]


def member(**options: object) -> MemberCore:
    defaults = {"session_timeout_ms": 9_000, "heartbeat_interval_ms": 3_000, "max_poll_interval_ms": 60_000}
    settings = ConsumerSettings.of(bootstrap_servers="broker:1", group_id="g", **{**defaults, **options})
    return MemberCore(settings, lambda: 0.5, now_s=0.0)


def join(core: MemberCore, generation: int = 1, now_s: float = 0.0) -> None:
    """A generation in which another member leads."""
    core.join(TOPICS, [])
    response = JoinGroupResponse(generation_id=generation, protocol_name="range", leader="other", member_id="m")
    request = core.joined(response, now_s)
    assert isinstance(request, SyncGroupRequest)
    assert (request.generation_id, request.member_id, request.assignments) == (generation, "m", [])
    core.synced(SyncGroupResponse(assignment=encode_assignment(MINE)), now_s)


def beat(core: MemberCore, now_s: float) -> HeartbeatRequest:
    request = core.beat(now_s)
    assert isinstance(request, HeartbeatRequest)
    return request


def test_assignment_waits_for_the_consumer() -> None:
    core = member()
    with pytest.raises(RebalanceError, match="not in a generation"):
        core.identity()
    join(core)
    assert core.state is MembershipState.STABLE
    assert core.take_change().assignment == MINE
    assert core.take_change().assignment is None
    assert (core.identity().generation_id, core.identity().member_id) == (1, "m")


def test_member_id_that_the_coordinator_gave_is_in_the_next_join() -> None:
    core = member()
    core.join(TOPICS, [])
    assert core.joined(JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id="m"), 0.0) is None
    assert core.is_due_to_join(0.0)
    assert core.join(TOPICS, []).member_id == "m"


def claims(core: MemberCore, name: str) -> tuple[frozenset[tuple[str, int]], int]:
    """What the leader reads in its next join; an eager member has given everything back by then."""
    (data,) = [each.metadata for each in core.join(TOPICS, []).protocols if each.name == name]
    read = decode_member("m", None, data, ASSIGNORS[name])
    return read.owned, read.generation


def test_sticky_member_claims_what_it_had_before_it_gave_it_back() -> None:
    core = member(partition_assignment_strategy="range,sticky")
    assert claims(core, "sticky") == (frozenset(), NO_GENERATION)
    core.unanswered(0.0)
    join(core, generation=7)
    core.rejoin("a member came")
    assert claims(core, "sticky") == (frozenset(MINE), 7)


def test_sticky_member_that_lost_its_partitions_claims_nothing() -> None:
    core = member(partition_assignment_strategy="sticky")
    join(core)
    core.reported(ErrorCode.UNKNOWN_MEMBER_ID, core.identity(), 1.0)
    assert claims(core, "sticky") == (frozenset(), NO_GENERATION)


def test_assignment_that_cannot_be_read_is_an_error_and_another_join_follows() -> None:
    core = member()
    core.join(TOPICS, [])
    core.joined(JoinGroupResponse(generation_id=1, protocol_name="range", leader="other", member_id="m"), 0.0)
    core.synced(SyncGroupResponse(assignment=encode_assignment(MINE)[:-3]), 0.0)
    assert "the assignment that the leader of group 'g' made cannot be read" in str(core.take_change().error)
    assert not core.is_due_to_join(0.0)
    assert core.is_due_to_join(1.0)
    join(core, generation=2)
    assert core.take_change() == (False, MINE, None)


def test_leader_shares_out_what_members_want() -> None:
    core = member()
    core.join(TOPICS, [])
    subscription = encode_subscription(TOPICS, [], NO_GENERATION, RANGE)
    members = [JoinGroupResponseMember(name, None, subscription) for name in ("m", "n")]
    response = JoinGroupResponse(generation_id=1, protocol_name="range", leader="m", member_id="m", members=members)
    sharing = core.joined(response, 0.0)
    assert isinstance(sharing, Sharing)
    subscribed = sharing.members()
    assert subscribed_topics(subscribed) == TOPICS
    request = core.sync(sharing, {"t": 3}, sharing.shares(subscribed, {"t": 3}))
    assert request is not None
    assert [entry.member_id for entry in request.assignments] == ["m", "n"]
    assert core.shared_counts == {"t": 3}
    assert core.sync(sharing, {"t": 3}, []) is None, "once"


def test_shares_of_a_generation_that_is_over_are_not_sent() -> None:
    core = member()
    core.join(TOPICS, [])
    response = JoinGroupResponse(generation_id=1, protocol_name="range", leader="m", member_id="m")
    sharing = core.joined(response, 0.0)
    assert isinstance(sharing, Sharing)
    core.unanswered(0.0)
    assert core.sync(sharing, {}, []) is None
    core.not_shared(sharing, 0.0)
    assert core.state is MembershipState.UNJOINED


def test_heartbeats_follow_the_interval_and_one_is_on_its_way_at_a_time() -> None:
    core = member()
    assert core.next_event_s() == NEVER_S
    join(core)
    assert core.next_event_s() == 3.0
    assert core.beat(2.9) is None
    request = beat(core, 3.0)
    assert core.beat(4.0) is None
    core.polled(4.0)
    assert core.next_event_s() == 64.0, "only the time since the last poll is left to watch"
    core.beaten(request, HeartbeatResponse(), 4.0)
    assert core.next_event_s() == 7.0
    core.not_beaten(beat(core, 7.0), 8.0)
    assert core.next_event_s() == 11.0


def test_program_that_does_not_poll_loses_its_partitions() -> None:
    core = member(max_poll_interval_ms=10_000)
    join(core)
    core.take_change()
    assert core.next_event_s() == 3.0
    beat(core, 3.0)
    assert core.next_event_s() == 10.0, "also while a heartbeat has no response"
    departure = core.beat(10.0)
    assert isinstance(departure, Departure)
    assert departure.member_id == "m"
    assert departure.request(2).member_id == "m"
    assert departure.request(3).members[0].member_id == "m"
    assert core.take_change().lost
    assert core.is_due_to_join(10.0)
    assert core.join(TOPICS, []).member_id == ""


def test_static_member_that_does_not_poll_keeps_its_place() -> None:
    core = member(max_poll_interval_ms=10_000, group_instance_id="i")
    join(core)
    assert core.beat(10.0) is None
    assert core.take_change().lost
    assert core.leave("closed") is None


@pytest.mark.parametrize(
    ("code", "state", "lost", "keeps_id"),
    [
        (ErrorCode.REBALANCE_IN_PROGRESS, MembershipState.UNJOINED, False, True),
        (ErrorCode.ILLEGAL_GENERATION, MembershipState.UNJOINED, True, True),
        (ErrorCode.UNKNOWN_MEMBER_ID, MembershipState.UNJOINED, True, False),
        (ErrorCode.FENCED_INSTANCE_ID, MembershipState.FENCED, True, True),
        (ErrorCode.NOT_COORDINATOR, MembershipState.STABLE, False, True),
    ],
)
def test_what_a_heartbeat_s_error_means(code: ErrorCode, state: MembershipState, lost: bool, keeps_id: bool) -> None:
    core = member()
    join(core)
    core.take_change()
    core.beaten(beat(core, 3.0), HeartbeatResponse(error_code=code), 3.0)
    assert core.state is state
    change = core.take_change()
    assert change.lost == lost
    assert (change.error is not None) == (state is MembershipState.FENCED)
    assert (core.member_id == "m") == keeps_id
    assert core.take_doubt() == (code is ErrorCode.NOT_COORDINATOR)
    assert not core.take_doubt()


def test_heartbeat_s_error_from_an_earlier_generation_is_ignored() -> None:
    core = member()
    join(core)
    late = beat(core, 3.0)
    core.rejoin("the subscription changed")
    join(core, generation=2, now_s=4.0)
    core.beaten(late, HeartbeatResponse(error_code=ErrorCode.ILLEGAL_GENERATION), 5.0)
    assert core.state is MembershipState.STABLE
    assert not core.take_change().lost


def test_commit_s_error_from_an_earlier_generation_is_ignored() -> None:
    core = member()
    join(core)
    early = core.identity()
    core.rejoin("the subscription changed")
    join(core, generation=2)
    core.reported(ErrorCode.UNKNOWN_MEMBER_ID, early, 5.0)
    assert core.state is MembershipState.STABLE
    core.reported(ErrorCode.REBALANCE_IN_PROGRESS, core.identity(), 5.0)
    assert core.state is MembershipState.UNJOINED


def test_identity_outlives_the_generation_so_that_a_zombie_is_refused() -> None:
    core = member()
    join(core)
    core.reported(ErrorCode.UNKNOWN_MEMBER_ID, core.identity(), 1.0)
    assert core.generation == NO_GENERATION
    assert (core.identity().generation_id, core.identity().member_id) == (1, "m")


def test_change_during_a_rebalance_is_followed_by_another_one() -> None:
    core = member()
    core.join(TOPICS, [])
    core.rejoin("the subscription changed")
    assert core.state is MembershipState.JOINING
    core.joined(JoinGroupResponse(generation_id=1, protocol_name="range", leader="o", member_id="m"), 0.0)
    core.synced(SyncGroupResponse(assignment=encode_assignment(MINE)), 0.0)
    assert core.is_due_to_join(0.0)
    assert core.take_change().assignment == MINE
    assert core.next_event_s() == 3.0, "the session is kept until then"


def test_lost_response_is_followed_by_a_look_up_and_a_pause() -> None:
    core = member()
    core.join(TOPICS, [])
    core.unanswered(10.0)
    assert core.take_doubt()
    assert not core.is_due_to_join(10.0)
    assert core.is_due_to_join(core.retry_at_s)


def test_leaving_is_told_once() -> None:
    core = member()
    join(core)
    departure = core.leave("closed")
    assert departure is not None
    assert departure.reason == "closed"
    assert core.leave("closed") is None
    assert core.next_event_s() == NEVER_S
