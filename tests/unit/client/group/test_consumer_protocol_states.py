"""The life of a member under the consumer protocol: every state with every event, legal and not."""

from __future__ import annotations

import pytest

from semel.client.group.consumer_protocol_states import (
    MEMBERS,
    TRANSITIONS,
    ConsumerProtocolEvent,
    ConsumerProtocolState,
    event_of,
    step,
)
from semel.client.group.states import IllegalTransition, MembershipEffect
from semel.protocol.errors import ErrorCode

ERRORS = [code for code in ErrorCode if code is not ErrorCode.NONE]


def walk(*events: ConsumerProtocolEvent) -> ConsumerProtocolState:
    state = ConsumerProtocolState.UNJOINED
    for event in events:
        state, _ = step(state, event)
    return state


def test_member_joins_and_follows_assignments() -> None:
    event = ConsumerProtocolEvent
    assert walk(event.JOIN_SENT, event.JOINED) is ConsumerProtocolState.STABLE
    assert walk(event.JOIN_SENT, event.JOINED, event.ASSIGNED) is ConsumerProtocolState.RECONCILING
    assert (
        walk(event.JOIN_SENT, event.JOINED, event.ASSIGNED, event.ASSIGNED, event.RECONCILED)
        is ConsumerProtocolState.STABLE
    )


@pytest.mark.parametrize("state", MEMBERS)
def test_expelled_member_loses_its_partitions_and_its_epoch(state: ConsumerProtocolState) -> None:
    after, effect = step(state, ConsumerProtocolEvent.EXPELLED)
    assert after is ConsumerProtocolState.UNJOINED
    assert effect & MembershipEffect.LOSE_PARTITIONS
    assert effect & MembershipEffect.FORGET_GENERATION


@pytest.mark.parametrize("state", MEMBERS)
def test_lost_connection_does_not_end_a_membership(state: ConsumerProtocolState) -> None:
    after, effect = step(state, ConsumerProtocolEvent.COORDINATOR_LOST)
    assert after is state
    assert not effect & MembershipEffect.LOSE_PARTITIONS


def test_fenced_member_never_comes_back() -> None:
    for state in (ConsumerProtocolState.JOINING, *MEMBERS):
        after, effect = step(state, ConsumerProtocolEvent.TAKEN_OVER)
        assert after is ConsumerProtocolState.FENCED
        assert effect & MembershipEffect.RAISE
    legal = [event for event in ConsumerProtocolEvent if (ConsumerProtocolState.FENCED, event) in TRANSITIONS]
    assert legal == [ConsumerProtocolEvent.LEAVE]


@pytest.mark.parametrize("state", ConsumerProtocolState)
def test_every_state_can_be_left(state: ConsumerProtocolState) -> None:
    assert step(state, ConsumerProtocolEvent.LEAVE)[0] is ConsumerProtocolState.LEFT


@pytest.mark.parametrize("state", ConsumerProtocolState)
@pytest.mark.parametrize("event", ConsumerProtocolEvent)
def test_whatever_is_not_in_the_table_is_refused_by_name(
    state: ConsumerProtocolState, event: ConsumerProtocolEvent
) -> None:
    if (state, event) in TRANSITIONS:
        assert step(state, event) == TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            step(state, event)


@pytest.mark.parametrize("state", [ConsumerProtocolState.JOINING, *MEMBERS])
@pytest.mark.parametrize("code", ERRORS)
def test_any_error_of_the_coordinator_has_a_transition(state: ConsumerProtocolState, code: ErrorCode) -> None:
    step(state, event_of(code, is_joining=state is ConsumerProtocolState.JOINING))


def test_errors_that_waiting_cures_are_not_raised() -> None:
    assert event_of(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, is_joining=True) is ConsumerProtocolEvent.BUSY
    for code in (
        ErrorCode.UNRELEASED_INSTANCE_ID,
        ErrorCode.UNSUPPORTED_ASSIGNOR,
        ErrorCode.INVALID_REGULAR_EXPRESSION,
        ErrorCode.GROUP_MAX_SIZE_REACHED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
    ):
        assert event_of(code, is_joining=True) is ConsumerProtocolEvent.REFUSED


def test_missing_group_refuses_a_join_and_expels_a_member() -> None:
    assert event_of(ErrorCode.GROUP_ID_NOT_FOUND, is_joining=True) is ConsumerProtocolEvent.REFUSED
    assert event_of(ErrorCode.GROUP_ID_NOT_FOUND, is_joining=False) is ConsumerProtocolEvent.EXPELLED
