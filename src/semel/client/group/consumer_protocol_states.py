"""The life of a member under the consumer protocol (KIP-848) as a table: (state, event) -> (next state, what to do).

    UNJOINED --join sent--> JOINING --joined--> STABLE --assigned--> RECONCILING
        ^                      |                  ^  |                  |     |
        |                      |                  |  |   <-reconciled---+     |
        +-- coordinator lost, busy, refused --+   +-------- expelled ---------+

There are no generations: responses to heartbeats say what each member gives back and what it gets, one step
after the other, and a member goes on reading what it keeps. One that was expelled has lost its partitions: others may
already read them. FENCED and LEFT are final. No I/O, no clock.
"""

from __future__ import annotations

from enum import Enum

from semel.client.group.states import IllegalTransition, MembershipEffect
from semel.protocol.errors import ErrorCode


class ConsumerProtocolState(Enum):
    UNJOINED = "unjoined"  # has no member epoch; must send a heartbeat that joins
    JOINING = "joining"  # that heartbeat is on its way
    STABLE = "stable"  # owns what the coordinator assigned
    RECONCILING = "reconciling"  # was assigned something else than it owns
    FENCED = "fenced"  # another process took this group.instance.id
    LEFT = "left"  # closed


class ConsumerProtocolEvent(Enum):
    JOIN_SENT = "join sent"
    JOINED = "joined"
    ASSIGNED = "assigned"  # something else than the member owns
    RECONCILED = "reconciled"  # the consumer gave back and took on what was assigned
    EXPELLED = "expelled"  # the coordinator does not know this member, or not at this epoch
    COORDINATOR_LOST = "coordinator lost"  # moved, or the connection broke
    BUSY = "busy"  # the coordinator is still loading; try again in a moment
    TAKEN_OVER = "taken over"  # FENCED_INSTANCE_ID
    REFUSED = "refused"  # rights or configuration; a retry would not help
    LEAVE = "leave"


_S, _E = ConsumerProtocolState, ConsumerProtocolEvent
_FORGET = MembershipEffect.FORGET_GENERATION | MembershipEffect.LOSE_PARTITIONS
_SEARCH = MembershipEffect.FIND_COORDINATOR | MembershipEffect.BACK_OFF
_REFUSE = MembershipEffect.RAISE | MembershipEffect.BACK_OFF
MEMBERS = (_S.STABLE, _S.RECONCILING)

TRANSITIONS: dict[
    tuple[ConsumerProtocolState, ConsumerProtocolEvent], tuple[ConsumerProtocolState, MembershipEffect]
] = {
    (_S.UNJOINED, _E.JOIN_SENT): (_S.JOINING, MembershipEffect.NOTHING),
    (_S.UNJOINED, _E.LEAVE): (_S.LEFT, MembershipEffect.SEND_LEAVE),
    (_S.JOINING, _E.JOINED): (_S.STABLE, MembershipEffect.NOTHING),
    (_S.JOINING, _E.EXPELLED): (_S.UNJOINED, _FORGET | MembershipEffect.BACK_OFF),
    (_S.JOINING, _E.COORDINATOR_LOST): (_S.UNJOINED, _SEARCH),
    (_S.JOINING, _E.BUSY): (_S.UNJOINED, MembershipEffect.BACK_OFF),
    (_S.JOINING, _E.REFUSED): (_S.UNJOINED, _REFUSE),
    (_S.JOINING, _E.LEAVE): (_S.LEFT, MembershipEffect.SEND_LEAVE),
    (_S.STABLE, _E.RECONCILED): (_S.STABLE, MembershipEffect.NOTHING),
    (_S.RECONCILING, _E.RECONCILED): (_S.STABLE, MembershipEffect.NOTHING),
    (_S.FENCED, _E.LEAVE): (_S.LEFT, MembershipEffect.NOTHING),
    (_S.LEFT, _E.LEAVE): (_S.LEFT, MembershipEffect.NOTHING),
}
for _state in MEMBERS:
    TRANSITIONS[_state, _E.ASSIGNED] = (_S.RECONCILING, MembershipEffect.NOTHING)
    TRANSITIONS[_state, _E.EXPELLED] = (_S.UNJOINED, _FORGET)
    # The session outlives a lost connection: the member is still one if it finds the coordinator in time.
    TRANSITIONS[_state, _E.COORDINATOR_LOST] = (_state, _SEARCH)
    TRANSITIONS[_state, _E.BUSY] = (_state, MembershipEffect.BACK_OFF)
    TRANSITIONS[_state, _E.REFUSED] = (_state, _REFUSE)
    TRANSITIONS[_state, _E.LEAVE] = (_S.LEFT, MembershipEffect.SEND_LEAVE)
for _state in (_S.JOINING, *MEMBERS):
    TRANSITIONS[_state, _E.TAKEN_OVER] = (_S.FENCED, MembershipEffect.LOSE_PARTITIONS | MembershipEffect.RAISE)

_EVENT_OF_ERROR: dict[ErrorCode, ConsumerProtocolEvent] = {
    ErrorCode.UNKNOWN_MEMBER_ID: _E.EXPELLED,
    ErrorCode.FENCED_MEMBER_EPOCH: _E.EXPELLED,
    ErrorCode.NOT_COORDINATOR: _E.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: _E.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: _E.BUSY,
    ErrorCode.STALE_MEMBER_EPOCH: _E.BUSY,  # of a commit: the next heartbeat brings the new epoch
    ErrorCode.FENCED_INSTANCE_ID: _E.TAKEN_OVER,
}


def step(state: ConsumerProtocolState, event: ConsumerProtocolEvent) -> tuple[ConsumerProtocolState, MembershipEffect]:
    """The next state, and what the member must do on the way there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(
            f"a member of a consumer group that is {state.value} cannot have the event {event.value!r}"
        ) from None


def event_of(code: ErrorCode, is_joining: bool) -> ConsumerProtocolEvent:
    """What an error from the coordinator means to a member. Other retriable errors are retried after a back-off."""
    if code is ErrorCode.GROUP_ID_NOT_FOUND:  # the group is gone; or it is a classic one, which the member cannot join
        return _E.REFUSED if is_joining else _E.EXPELLED
    if code in _EVENT_OF_ERROR:
        return _EVENT_OF_ERROR[code]
    return _E.BUSY if code.retriable else _E.REFUSED
