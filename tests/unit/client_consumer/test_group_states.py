"""The life of a group member: every state with every event, legal and not."""

from __future__ import annotations

import pytest

from semel.client.group_states import (
    TRANSITIONS,
    IllegalTransition,
    MemberEffect,
    MemberEvent,
    MemberState,
    event_of,
    step,
)
from semel.protocol.errors import ErrorCode

ACTIVE = (MemberState.UNJOINED, MemberState.JOINING, MemberState.SYNCING, MemberState.STABLE)


def walk(*events: MemberEvent, start: MemberState = MemberState.UNJOINED) -> MemberState:
    state = start
    for event in events:
        state, _ = step(state, event)
    return state


def test_member_joins_syncs_and_is_stable():
    assert walk(MemberEvent.JOIN_SENT, MemberEvent.JOINED, MemberEvent.SYNCED) is MemberState.STABLE


def test_first_join_is_sent_again_with_the_given_id():
    state, effect = step(MemberState.JOINING, MemberEvent.MEMBER_ID_GIVEN)
    assert state is MemberState.UNJOINED
    assert effect is MemberEffect.ADOPT_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_expelled_member_loses_its_partitions_and_its_name(state):
    after, effect = step(state, MemberEvent.EXPELLED)
    assert after is MemberState.UNJOINED
    assert effect & MemberEffect.LOSE_PARTITIONS
    assert effect & MemberEffect.FORGET_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_member_of_an_old_generation_loses_its_partitions_but_keeps_its_name(state):
    _, effect = step(state, MemberEvent.STALE)
    assert effect & MemberEffect.LOSE_PARTITIONS
    assert not effect & MemberEffect.FORGET_MEMBER_ID


def test_rebalance_lets_a_member_give_its_partitions_back_in_order():
    state, effect = step(MemberState.STABLE, MemberEvent.REBALANCE)
    assert state is MemberState.UNJOINED
    assert not effect & MemberEffect.LOSE_PARTITIONS


def test_lost_connection_does_not_end_a_stable_membership():
    state, effect = step(MemberState.STABLE, MemberEvent.COORDINATOR_LOST)
    assert state is MemberState.STABLE
    assert effect is MemberEffect.FIND_COORDINATOR


@pytest.mark.parametrize("state", ACTIVE)
def test_fenced_member_never_comes_back(state):
    after, effect = step(state, MemberEvent.TAKEN_OVER)
    assert after is MemberState.FENCED
    assert effect & MemberEffect.RAISE
    for event in MemberEvent:
        if event is not MemberEvent.LEAVE:
            with pytest.raises(IllegalTransition):
                step(MemberState.FENCED, event)
    assert step(MemberState.FENCED, MemberEvent.LEAVE) == (MemberState.LEFT, MemberEffect.NOTHING)


@pytest.mark.parametrize("state", MemberState)
def test_every_state_can_be_left(state):
    assert step(state, MemberEvent.LEAVE)[0] is MemberState.LEFT


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("event", MemberEvent)
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
    if event is MemberEvent.MEMBER_ID_GIVEN and state is not MemberState.JOINING:
        return  # only JoinGroup answers that
    step(state, event)


def test_errors_that_waiting_cures_are_not_raised():
    assert event_of(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) is MemberEvent.BUSY
    assert event_of(ErrorCode.REQUEST_TIMED_OUT) is MemberEvent.BUSY
    assert event_of(ErrorCode.GROUP_AUTHORIZATION_FAILED) is MemberEvent.REFUSED
    assert event_of(ErrorCode.INCONSISTENT_GROUP_PROTOCOL) is MemberEvent.REFUSED
