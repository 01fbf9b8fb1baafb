"""The life of a group member: every state with every event, legal and not."""

from __future__ import annotations

import pytest

from semel.client.group.states import (
    TRANSITIONS,
    IllegalTransition,
    MembershipEffect,
    MembershipEvent,
    MembershipState,
    event_of,
    step,
)
from semel.protocol.errors import ErrorCode

ACTIVE = (MembershipState.UNJOINED, MembershipState.JOINING, MembershipState.SYNCING, MembershipState.STABLE)


def walk(*events: MembershipEvent, start: MembershipState = MembershipState.UNJOINED) -> MembershipState:
    state = start
    for event in events:
        state, _ = step(state, event)
    return state


def test_member_joins_syncs_and_is_stable():
    assert walk(MembershipEvent.JOIN_SENT, MembershipEvent.JOINED, MembershipEvent.SYNCED) is MembershipState.STABLE


def test_first_join_is_sent_again_with_the_given_id():
    state, effect = step(MembershipState.JOINING, MembershipEvent.MEMBER_ID_GIVEN)
    assert state is MembershipState.UNJOINED
    assert effect is MembershipEffect.ADOPT_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_expelled_member_loses_its_partitions_and_its_name(state):
    after, effect = step(state, MembershipEvent.EXPELLED)
    assert after is MembershipState.UNJOINED
    assert effect & MembershipEffect.LOSE_PARTITIONS
    assert effect & MembershipEffect.FORGET_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_member_of_an_old_generation_loses_its_partitions_but_keeps_its_name(state):
    _, effect = step(state, MembershipEvent.STALE)
    assert effect & MembershipEffect.LOSE_PARTITIONS
    assert not effect & MembershipEffect.FORGET_MEMBER_ID


def test_rebalance_lets_a_member_give_its_partitions_back_in_order():
    state, effect = step(MembershipState.STABLE, MembershipEvent.REBALANCE)
    assert state is MembershipState.UNJOINED
    assert not effect & MembershipEffect.LOSE_PARTITIONS


def test_lost_connection_does_not_end_a_stable_membership():
    state, effect = step(MembershipState.STABLE, MembershipEvent.COORDINATOR_LOST)
    assert state is MembershipState.STABLE
    assert effect is MembershipEffect.FIND_COORDINATOR


@pytest.mark.parametrize("state", ACTIVE)
def test_fenced_member_never_comes_back(state):
    after, effect = step(state, MembershipEvent.TAKEN_OVER)
    assert after is MembershipState.FENCED
    assert effect & MembershipEffect.RAISE
    for event in MembershipEvent:
        if event is not MembershipEvent.LEAVE:
            with pytest.raises(IllegalTransition):
                step(MembershipState.FENCED, event)
    assert step(MembershipState.FENCED, MembershipEvent.LEAVE) == (MembershipState.LEFT, MembershipEffect.NOTHING)


@pytest.mark.parametrize("state", MembershipState)
def test_every_state_can_be_left(state):
    assert step(state, MembershipEvent.LEAVE)[0] is MembershipState.LEFT


@pytest.mark.parametrize("state", MembershipState)
@pytest.mark.parametrize("event", MembershipEvent)
def test_whatever_is_not_in_the_table_is_refused_by_name(state, event):
    if (state, event) in TRANSITIONS:
        assert step(state, event) == TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            step(state, event)


@pytest.mark.parametrize("state", ACTIVE)
@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.NONE])
def test_any_error_of_the_coordinator_has_an_answer_where_it_can_come(state, code):
    event = event_of(code)
    if event is MembershipEvent.MEMBER_ID_GIVEN and state is not MembershipState.JOINING:
        return  # only JoinGroup answers that
    step(state, event)


def test_errors_that_waiting_cures_are_not_raised():
    assert event_of(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) is MembershipEvent.BUSY
    assert event_of(ErrorCode.REQUEST_TIMED_OUT) is MembershipEvent.BUSY
    assert event_of(ErrorCode.GROUP_AUTHORIZATION_FAILED) is MembershipEvent.REFUSED
    assert event_of(ErrorCode.INCONSISTENT_GROUP_PROTOCOL) is MembershipEvent.REFUSED
