"""The life of a group member: every state with every event, legal and not."""

from __future__ import annotations

import pytest

from semel.client.group_states import TRANSITIONS, Effect, Event, IllegalTransition, State, event_of, step
from semel.protocol.errors import ErrorCode

ACTIVE = (State.UNJOINED, State.JOINING, State.SYNCING, State.STABLE)


def walk(*events: Event, start: State = State.UNJOINED) -> State:
    state = start
    for event in events:
        state, _ = step(state, event)
    return state


def test_member_joins_syncs_and_is_stable():
    assert walk(Event.JOIN_SENT, Event.JOINED, Event.SYNCED) is State.STABLE


def test_first_join_is_sent_again_with_the_given_id():
    state, effect = step(State.JOINING, Event.MEMBER_ID_GIVEN)
    assert state is State.UNJOINED
    assert effect is Effect.ADOPT_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_expelled_member_loses_its_partitions_and_its_name(state):
    after, effect = step(state, Event.EXPELLED)
    assert after is State.UNJOINED
    assert effect & Effect.LOSE_PARTITIONS
    assert effect & Effect.FORGET_MEMBER_ID


@pytest.mark.parametrize("state", ACTIVE)
def test_member_of_an_old_generation_loses_its_partitions_but_keeps_its_name(state):
    _, effect = step(state, Event.STALE)
    assert effect & Effect.LOSE_PARTITIONS
    assert not effect & Effect.FORGET_MEMBER_ID


def test_rebalance_lets_a_member_give_its_partitions_back_in_order():
    state, effect = step(State.STABLE, Event.REBALANCE)
    assert state is State.UNJOINED
    assert not effect & Effect.LOSE_PARTITIONS


def test_lost_connection_does_not_end_a_stable_membership():
    state, effect = step(State.STABLE, Event.COORDINATOR_LOST)
    assert state is State.STABLE
    assert effect is Effect.FIND_COORDINATOR


@pytest.mark.parametrize("state", ACTIVE)
def test_fenced_member_never_comes_back(state):
    after, effect = step(state, Event.TAKEN_OVER)
    assert after is State.FENCED
    assert effect & Effect.RAISE
    for event in Event:
        if event is not Event.LEAVE:
            with pytest.raises(IllegalTransition):
                step(State.FENCED, event)
    assert step(State.FENCED, Event.LEAVE) == (State.LEFT, Effect.NOTHING)


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_left(state):
    assert step(state, Event.LEAVE)[0] is State.LEFT


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
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
    if event is Event.MEMBER_ID_GIVEN and state is not State.JOINING:
        return  # only JoinGroup answers that
    step(state, event)


def test_errors_that_waiting_cures_are_not_raised():
    assert event_of(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) is Event.BUSY
    assert event_of(ErrorCode.REQUEST_TIMED_OUT) is Event.BUSY
    assert event_of(ErrorCode.GROUP_AUTHORIZATION_FAILED) is Event.REFUSED
    assert event_of(ErrorCode.INCONSISTENT_GROUP_PROTOCOL) is Event.REFUSED
