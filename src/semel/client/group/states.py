"""The life of a group member as a table: (state, event) -> (next state, what to do). No I/O, no clock.

    UNJOINED --join sent--> JOINING --joined--> SYNCING --synced--> STABLE
        ^                      |                   |                   |
        +------ rebalance, stale generation, expelled, coordinator lost+

A member that must join again keeps its partitions (cooperative) or gives them back first (eager); one that was expelled
has lost them: others may already read them. FENCED and LEFT are final.
"""

from __future__ import annotations

from enum import Enum, Flag, auto

from semel.protocol.errors import ErrorCode


class MembershipState(Enum):
    UNJOINED = "unjoined"  # not in the current generation; must send JoinGroup
    JOINING = "joining"  # JoinGroup is on its way; the broker waits for all members
    SYNCING = "syncing"  # in the generation, waiting for the assignment
    STABLE = "stable"  # has an assignment; heartbeats keep it
    FENCED = "fenced"  # another process took this group.instance.id
    LEFT = "left"  # closed


class MembershipEvent(Enum):
    JOIN_SENT = "join sent"
    MEMBER_ID_GIVEN = "member id given"  # the broker wants the first JoinGroup again with the id that it gave
    JOINED = "joined"
    SYNCED = "synced"
    REBALANCE = "rebalance"  # the broker, or a change of topics on this side, starts a new generation
    STALE = "stale generation"  # the generation went on without this member
    EXPELLED = "expelled"  # the broker does not know this member (any more)
    COORDINATOR_LOST = "coordinator lost"  # moved, or the connection broke
    BUSY = "busy"  # the coordinator is still loading; try again in a moment
    TAKEN_OVER = "taken over"  # FENCED_INSTANCE_ID
    REFUSED = "refused"  # rights or configuration; a retry would not help
    LEAVE = "leave"


class MembershipEffect(Flag):
    NOTHING = 0
    ADOPT_MEMBER_ID = auto()
    ADOPT_ASSIGNMENT = auto()
    FORGET_GENERATION = auto()
    FORGET_MEMBER_ID = auto()
    LOSE_PARTITIONS = auto()  # without a chance to commit: another member may own them already
    FIND_COORDINATOR = auto()
    BACK_OFF = auto()
    RAISE = auto()
    SEND_LEAVE = auto()


_FORGET = MembershipEffect.FORGET_GENERATION | MembershipEffect.FORGET_MEMBER_ID | MembershipEffect.LOSE_PARTITIONS
_STALE = MembershipEffect.FORGET_GENERATION | MembershipEffect.LOSE_PARTITIONS
_SEARCH = MembershipEffect.FIND_COORDINATOR | MembershipEffect.BACK_OFF

TRANSITIONS: dict[tuple[MembershipState, MembershipEvent], tuple[MembershipState, MembershipEffect]] = {
    (MembershipState.UNJOINED, MembershipEvent.JOIN_SENT): (MembershipState.JOINING, MembershipEffect.NOTHING),
    (MembershipState.UNJOINED, MembershipEvent.REBALANCE): (MembershipState.UNJOINED, MembershipEffect.NOTHING),
    (MembershipState.UNJOINED, MembershipEvent.STALE): (MembershipState.UNJOINED, _STALE),
    (MembershipState.UNJOINED, MembershipEvent.EXPELLED): (MembershipState.UNJOINED, _FORGET),
    (MembershipState.UNJOINED, MembershipEvent.COORDINATOR_LOST): (MembershipState.UNJOINED, _SEARCH),
    (MembershipState.UNJOINED, MembershipEvent.BUSY): (MembershipState.UNJOINED, MembershipEffect.BACK_OFF),
    (MembershipState.UNJOINED, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.SEND_LEAVE),
    (MembershipState.JOINING, MembershipEvent.JOINED): (MembershipState.SYNCING, MembershipEffect.ADOPT_MEMBER_ID),
    (MembershipState.JOINING, MembershipEvent.MEMBER_ID_GIVEN): (
        MembershipState.UNJOINED,
        MembershipEffect.ADOPT_MEMBER_ID,
    ),
    (MembershipState.JOINING, MembershipEvent.REBALANCE): (MembershipState.UNJOINED, MembershipEffect.NOTHING),
    (MembershipState.JOINING, MembershipEvent.STALE): (MembershipState.UNJOINED, _STALE),
    (MembershipState.JOINING, MembershipEvent.EXPELLED): (MembershipState.UNJOINED, _FORGET),
    (MembershipState.JOINING, MembershipEvent.COORDINATOR_LOST): (MembershipState.UNJOINED, _SEARCH),
    (MembershipState.JOINING, MembershipEvent.BUSY): (MembershipState.UNJOINED, MembershipEffect.BACK_OFF),
    (MembershipState.JOINING, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.SEND_LEAVE),
    (MembershipState.SYNCING, MembershipEvent.SYNCED): (MembershipState.STABLE, MembershipEffect.ADOPT_ASSIGNMENT),
    (MembershipState.SYNCING, MembershipEvent.REBALANCE): (MembershipState.UNJOINED, MembershipEffect.NOTHING),
    (MembershipState.SYNCING, MembershipEvent.STALE): (MembershipState.UNJOINED, _STALE),
    (MembershipState.SYNCING, MembershipEvent.EXPELLED): (MembershipState.UNJOINED, _FORGET),
    (MembershipState.SYNCING, MembershipEvent.COORDINATOR_LOST): (MembershipState.UNJOINED, _SEARCH),
    (MembershipState.SYNCING, MembershipEvent.BUSY): (MembershipState.UNJOINED, MembershipEffect.BACK_OFF),
    (MembershipState.SYNCING, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.SEND_LEAVE),
    (MembershipState.STABLE, MembershipEvent.REBALANCE): (MembershipState.UNJOINED, MembershipEffect.NOTHING),
    (MembershipState.STABLE, MembershipEvent.STALE): (MembershipState.UNJOINED, _STALE),
    (MembershipState.STABLE, MembershipEvent.EXPELLED): (MembershipState.UNJOINED, _FORGET),
    # The session outlives a lost connection: the member is still one if it finds the coordinator in time.
    (MembershipState.STABLE, MembershipEvent.COORDINATOR_LOST): (
        MembershipState.STABLE,
        MembershipEffect.FIND_COORDINATOR,
    ),
    (MembershipState.STABLE, MembershipEvent.BUSY): (MembershipState.STABLE, MembershipEffect.BACK_OFF),
    (MembershipState.STABLE, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.SEND_LEAVE),
    (MembershipState.FENCED, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.NOTHING),
    (MembershipState.LEFT, MembershipEvent.LEAVE): (MembershipState.LEFT, MembershipEffect.NOTHING),
}
for _state in (MembershipState.UNJOINED, MembershipState.JOINING, MembershipState.SYNCING, MembershipState.STABLE):
    TRANSITIONS[_state, MembershipEvent.TAKEN_OVER] = (
        MembershipState.FENCED,
        MembershipEffect.LOSE_PARTITIONS | MembershipEffect.RAISE,
    )
    TRANSITIONS[_state, MembershipEvent.REFUSED] = (MembershipState.UNJOINED, MembershipEffect.RAISE)

_EVENT_OF_ERROR: dict[ErrorCode, MembershipEvent] = {
    ErrorCode.MEMBER_ID_REQUIRED: MembershipEvent.MEMBER_ID_GIVEN,
    ErrorCode.REBALANCE_IN_PROGRESS: MembershipEvent.REBALANCE,
    ErrorCode.ILLEGAL_GENERATION: MembershipEvent.STALE,
    ErrorCode.UNKNOWN_MEMBER_ID: MembershipEvent.EXPELLED,
    ErrorCode.NOT_COORDINATOR: MembershipEvent.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: MembershipEvent.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: MembershipEvent.BUSY,
    ErrorCode.FENCED_INSTANCE_ID: MembershipEvent.TAKEN_OVER,
}


class IllegalTransition(AssertionError):
    """An event that this state cannot have: a bug, not a condition."""


def step(state: MembershipState, event: MembershipEvent) -> tuple[MembershipState, MembershipEffect]:
    """The next state, and what the member must do on the way there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a group member that is {state.value} cannot have the event {event.value!r}") from None


def event_of(code: ErrorCode) -> MembershipEvent:
    """What an error from the coordinator means to a member. Other retriable errors are retried after a back-off."""
    if code in _EVENT_OF_ERROR:
        return _EVENT_OF_ERROR[code]
    return MembershipEvent.BUSY if code.retriable else MembershipEvent.REFUSED
