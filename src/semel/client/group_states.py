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


class MemberState(Enum):
    UNJOINED = "unjoined"  # not in the current generation; must send JoinGroup
    JOINING = "joining"  # JoinGroup is on its way; the broker waits for all members
    SYNCING = "syncing"  # in the generation, waiting for the assignment
    STABLE = "stable"  # has an assignment; heartbeats keep it
    FENCED = "fenced"  # another process took this group.instance.id
    LEFT = "left"  # closed


class MemberEvent(Enum):
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


class MemberEffect(Flag):
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


_FORGET = MemberEffect.FORGET_GENERATION | MemberEffect.FORGET_MEMBER_ID | MemberEffect.LOSE_PARTITIONS
_STALE = MemberEffect.FORGET_GENERATION | MemberEffect.LOSE_PARTITIONS
_SEARCH = MemberEffect.FIND_COORDINATOR | MemberEffect.BACK_OFF

TRANSITIONS: dict[tuple[MemberState, MemberEvent], tuple[MemberState, MemberEffect]] = {
    (MemberState.UNJOINED, MemberEvent.JOIN_SENT): (MemberState.JOINING, MemberEffect.NOTHING),
    (MemberState.UNJOINED, MemberEvent.REBALANCE): (MemberState.UNJOINED, MemberEffect.NOTHING),
    (MemberState.UNJOINED, MemberEvent.STALE): (MemberState.UNJOINED, _STALE),
    (MemberState.UNJOINED, MemberEvent.EXPELLED): (MemberState.UNJOINED, _FORGET),
    (MemberState.UNJOINED, MemberEvent.COORDINATOR_LOST): (MemberState.UNJOINED, _SEARCH),
    (MemberState.UNJOINED, MemberEvent.BUSY): (MemberState.UNJOINED, MemberEffect.BACK_OFF),
    (MemberState.UNJOINED, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.SEND_LEAVE),
    (MemberState.JOINING, MemberEvent.JOINED): (MemberState.SYNCING, MemberEffect.ADOPT_MEMBER_ID),
    (MemberState.JOINING, MemberEvent.MEMBER_ID_GIVEN): (MemberState.UNJOINED, MemberEffect.ADOPT_MEMBER_ID),
    (MemberState.JOINING, MemberEvent.REBALANCE): (MemberState.UNJOINED, MemberEffect.NOTHING),
    (MemberState.JOINING, MemberEvent.STALE): (MemberState.UNJOINED, _STALE),
    (MemberState.JOINING, MemberEvent.EXPELLED): (MemberState.UNJOINED, _FORGET),
    (MemberState.JOINING, MemberEvent.COORDINATOR_LOST): (MemberState.UNJOINED, _SEARCH),
    (MemberState.JOINING, MemberEvent.BUSY): (MemberState.UNJOINED, MemberEffect.BACK_OFF),
    (MemberState.JOINING, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.SEND_LEAVE),
    (MemberState.SYNCING, MemberEvent.SYNCED): (MemberState.STABLE, MemberEffect.ADOPT_ASSIGNMENT),
    (MemberState.SYNCING, MemberEvent.REBALANCE): (MemberState.UNJOINED, MemberEffect.NOTHING),
    (MemberState.SYNCING, MemberEvent.STALE): (MemberState.UNJOINED, _STALE),
    (MemberState.SYNCING, MemberEvent.EXPELLED): (MemberState.UNJOINED, _FORGET),
    (MemberState.SYNCING, MemberEvent.COORDINATOR_LOST): (MemberState.UNJOINED, _SEARCH),
    (MemberState.SYNCING, MemberEvent.BUSY): (MemberState.UNJOINED, MemberEffect.BACK_OFF),
    (MemberState.SYNCING, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.SEND_LEAVE),
    (MemberState.STABLE, MemberEvent.REBALANCE): (MemberState.UNJOINED, MemberEffect.NOTHING),
    (MemberState.STABLE, MemberEvent.STALE): (MemberState.UNJOINED, _STALE),
    (MemberState.STABLE, MemberEvent.EXPELLED): (MemberState.UNJOINED, _FORGET),
    # The session outlives a lost connection: the member is still one if it finds the coordinator in time.
    (MemberState.STABLE, MemberEvent.COORDINATOR_LOST): (MemberState.STABLE, MemberEffect.FIND_COORDINATOR),
    (MemberState.STABLE, MemberEvent.BUSY): (MemberState.STABLE, MemberEffect.BACK_OFF),
    (MemberState.STABLE, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.SEND_LEAVE),
    (MemberState.FENCED, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.NOTHING),
    (MemberState.LEFT, MemberEvent.LEAVE): (MemberState.LEFT, MemberEffect.NOTHING),
}
for _state in (MemberState.UNJOINED, MemberState.JOINING, MemberState.SYNCING, MemberState.STABLE):
    TRANSITIONS[_state, MemberEvent.TAKEN_OVER] = (
        MemberState.FENCED,
        MemberEffect.LOSE_PARTITIONS | MemberEffect.RAISE,
    )
    TRANSITIONS[_state, MemberEvent.REFUSED] = (MemberState.UNJOINED, MemberEffect.RAISE)

_EVENT_OF_ERROR: dict[ErrorCode, MemberEvent] = {
    ErrorCode.MEMBER_ID_REQUIRED: MemberEvent.MEMBER_ID_GIVEN,
    ErrorCode.REBALANCE_IN_PROGRESS: MemberEvent.REBALANCE,
    ErrorCode.ILLEGAL_GENERATION: MemberEvent.STALE,
    ErrorCode.UNKNOWN_MEMBER_ID: MemberEvent.EXPELLED,
    ErrorCode.NOT_COORDINATOR: MemberEvent.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: MemberEvent.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: MemberEvent.BUSY,
    ErrorCode.FENCED_INSTANCE_ID: MemberEvent.TAKEN_OVER,
}


class IllegalTransition(AssertionError):
    """An event that this state cannot have: a bug, not a condition."""


def step(state: MemberState, event: MemberEvent) -> tuple[MemberState, MemberEffect]:
    """The next state, and what the member must do on the way there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a group member that is {state.value} cannot have the event {event.value!r}") from None


def event_of(code: ErrorCode) -> MemberEvent:
    """What an error from the coordinator means to a member. Other retriable errors are retried after a back-off."""
    if code in _EVENT_OF_ERROR:
        return _EVENT_OF_ERROR[code]
    return MemberEvent.BUSY if code.retriable else MemberEvent.REFUSED
