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


class State(Enum):
    UNJOINED = "unjoined"  # not in the current generation; must send JoinGroup
    JOINING = "joining"  # JoinGroup is on its way; the broker waits for all members
    SYNCING = "syncing"  # in the generation, waiting for the assignment
    STABLE = "stable"  # has an assignment; heartbeats keep it
    FENCED = "fenced"  # another process took this group.instance.id
    LEFT = "left"  # closed


class Event(Enum):
    JOIN_SENT = "join sent"
    MEMBER_ID_GIVEN = "member id given"  # the broker wants the first JoinGroup again with the id that it gave
    JOINED = "joined"
    SYNCED = "synced"
    REBALANCE = "rebalance"  # the broker, or a change of topics on this side, asks for a new generation
    STALE = "stale generation"  # the generation went on without this member
    EXPELLED = "expelled"  # the broker does not know this member (any more)
    COORDINATOR_LOST = "coordinator lost"  # moved, or the connection broke
    BUSY = "busy"  # the coordinator is still loading; try again in a moment
    TAKEN_OVER = "taken over"  # FENCED_INSTANCE_ID
    REFUSED = "refused"  # rights or configuration; nothing that waiting would cure
    LEAVE = "leave"


class Effect(Flag):
    NOTHING = 0
    ADOPT_MEMBER_ID = auto()
    ADOPT_ASSIGNMENT = auto()
    FORGET_GENERATION = auto()
    FORGET_MEMBER_ID = auto()
    LOSE_PARTITIONS = auto()  # without a chance to commit: somebody else may own them already
    FIND_COORDINATOR = auto()
    BACK_OFF = auto()
    RAISE = auto()
    SEND_LEAVE = auto()


_FORGET = Effect.FORGET_GENERATION | Effect.FORGET_MEMBER_ID | Effect.LOSE_PARTITIONS
_STALE = Effect.FORGET_GENERATION | Effect.LOSE_PARTITIONS
_SEARCH = Effect.FIND_COORDINATOR | Effect.BACK_OFF

TRANSITIONS: dict[tuple[State, Event], tuple[State, Effect]] = {
    (State.UNJOINED, Event.JOIN_SENT): (State.JOINING, Effect.NOTHING),
    (State.UNJOINED, Event.REBALANCE): (State.UNJOINED, Effect.NOTHING),
    (State.UNJOINED, Event.STALE): (State.UNJOINED, _STALE),
    (State.UNJOINED, Event.EXPELLED): (State.UNJOINED, _FORGET),
    (State.UNJOINED, Event.COORDINATOR_LOST): (State.UNJOINED, _SEARCH),
    (State.UNJOINED, Event.BUSY): (State.UNJOINED, Effect.BACK_OFF),
    (State.UNJOINED, Event.LEAVE): (State.LEFT, Effect.SEND_LEAVE),
    (State.JOINING, Event.JOINED): (State.SYNCING, Effect.ADOPT_MEMBER_ID),
    (State.JOINING, Event.MEMBER_ID_GIVEN): (State.UNJOINED, Effect.ADOPT_MEMBER_ID),
    (State.JOINING, Event.REBALANCE): (State.UNJOINED, Effect.NOTHING),
    (State.JOINING, Event.STALE): (State.UNJOINED, _STALE),
    (State.JOINING, Event.EXPELLED): (State.UNJOINED, _FORGET),
    (State.JOINING, Event.COORDINATOR_LOST): (State.UNJOINED, _SEARCH),
    (State.JOINING, Event.BUSY): (State.UNJOINED, Effect.BACK_OFF),
    (State.JOINING, Event.LEAVE): (State.LEFT, Effect.SEND_LEAVE),
    (State.SYNCING, Event.SYNCED): (State.STABLE, Effect.ADOPT_ASSIGNMENT),
    (State.SYNCING, Event.REBALANCE): (State.UNJOINED, Effect.NOTHING),
    (State.SYNCING, Event.STALE): (State.UNJOINED, _STALE),
    (State.SYNCING, Event.EXPELLED): (State.UNJOINED, _FORGET),
    (State.SYNCING, Event.COORDINATOR_LOST): (State.UNJOINED, _SEARCH),
    (State.SYNCING, Event.BUSY): (State.UNJOINED, Effect.BACK_OFF),
    (State.SYNCING, Event.LEAVE): (State.LEFT, Effect.SEND_LEAVE),
    (State.STABLE, Event.REBALANCE): (State.UNJOINED, Effect.NOTHING),
    (State.STABLE, Event.STALE): (State.UNJOINED, _STALE),
    (State.STABLE, Event.EXPELLED): (State.UNJOINED, _FORGET),
    # The session outlives a lost connection: the member is still one if it finds the coordinator in time.
    (State.STABLE, Event.COORDINATOR_LOST): (State.STABLE, Effect.FIND_COORDINATOR),
    (State.STABLE, Event.BUSY): (State.STABLE, Effect.BACK_OFF),
    (State.STABLE, Event.LEAVE): (State.LEFT, Effect.SEND_LEAVE),
    (State.FENCED, Event.LEAVE): (State.LEFT, Effect.NOTHING),
    (State.LEFT, Event.LEAVE): (State.LEFT, Effect.NOTHING),
}
for _state in (State.UNJOINED, State.JOINING, State.SYNCING, State.STABLE):
    TRANSITIONS[_state, Event.TAKEN_OVER] = (State.FENCED, Effect.LOSE_PARTITIONS | Effect.RAISE)
    TRANSITIONS[_state, Event.REFUSED] = (State.UNJOINED, Effect.RAISE)

_EVENT_OF_ERROR: dict[ErrorCode, Event] = {
    ErrorCode.MEMBER_ID_REQUIRED: Event.MEMBER_ID_GIVEN,
    ErrorCode.REBALANCE_IN_PROGRESS: Event.REBALANCE,
    ErrorCode.ILLEGAL_GENERATION: Event.STALE,
    ErrorCode.UNKNOWN_MEMBER_ID: Event.EXPELLED,
    ErrorCode.NOT_COORDINATOR: Event.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: Event.COORDINATOR_LOST,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: Event.BUSY,
    ErrorCode.FENCED_INSTANCE_ID: Event.TAKEN_OVER,
}


class IllegalTransition(AssertionError):
    """An event that this state cannot have: a bug, not a condition."""


def step(state: State, event: Event) -> tuple[State, Effect]:
    """The next state, and what the member must do on the way there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a group member that is {state.value} cannot have the event {event.value!r}") from None


def event_of(code: ErrorCode) -> Event:
    """What an error from the coordinator means to a member. Other retriable errors count as a short trouble."""
    if code in _EVENT_OF_ERROR:
        return _EVENT_OF_ERROR[code]
    return Event.BUSY if code.retriable else Event.REFUSED
