"""The life of a classic group as one table: what each event means in each state. Pure, no I/O.

    Empty                no members; may have positions
    PreparingRebalance   members are being collected; everybody has to join again
    CompletingRebalance  a generation is formed; its leader's assignment is awaited
    Stable               everybody has an assignment
    Dead                 deleted; an object that somebody still holds

A cell says which state comes next and what the coordinator has to do. Guards that look at members, generations and
protocols are checked before the table is asked (`Group.check_member` and friends), so that every cell is certain.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from semel.protocol.errors import ErrorCode


class GroupState(Enum):
    """A state, by the name that Kafka's tools show."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Event(Enum):
    """What can happen to a group."""

    ID_REQUESTED = auto()  # a JoinGroup without a member id, from a client that has to come back with one
    JOIN_NEW = auto()  # a member that the group does not know yet (or only as pending)
    JOIN_REPLACING = auto()  # a static member under a new member id; the chosen protocol stays
    JOIN_REPLACING_CHANGED = auto()  # a static member under a new member id; another protocol would be chosen
    JOIN_SAME = auto()  # a follower, with the protocols that it had
    JOIN_SAME_LEADER = auto()  # the leader, with the protocols that it had
    JOIN_CHANGED = auto()  # a known member with other protocols
    JOIN_DONE = auto()  # all are here, or the time is over; there are members, and one that waits
    JOIN_DONE_NOBODY = auto()  # the same, and no member is left
    JOIN_DONE_NOBODY_WAITS = auto()  # the same; only static members are left and none of them came back
    SYNC_LEADER = auto()
    SYNC_FOLLOWER = auto()
    SYNC_OVERDUE = auto()  # some members of this generation never asked for their assignment
    ASSIGNMENT_STORED = auto()  # the leader's assignment is durable
    ASSIGNMENT_LOST = auto()  # it could not be written
    HEARTBEAT = auto()
    MEMBERS_LEFT = auto()  # by LeaveGroup
    MEMBER_EXPIRED = auto()  # by session time-out
    PENDING_EXPIRED = auto()  # a member id was handed out and never used
    COMMIT = auto()  # positions from a valid member of this generation
    COMMIT_SIMPLE = auto()  # positions from somebody who does not use group management
    TXN_COMMIT = auto()
    TXN_COMMIT_SIMPLE = auto()
    DELETE_POSITIONS = auto()  # of a group whose subscriptions the coordinator can read
    DELETE_POSITIONS_OPAQUE = auto()  # of a group with a protocol type of its own
    DELETE = auto()
    EXPIRE = auto()  # no positions left and nobody there


class Act(Enum):
    """What the coordinator does about it."""

    IGNORE = auto()
    REFUSE = auto()  # answer with the cell's error
    ACCEPT = auto()  # go on, nothing about the group changes
    ACCEPT_ALIVE = auto()  # the same, and the member's session starts anew; the cell's error is the answer
    PREPARE = auto()  # begin a rebalance: waiting SyncGroups are told, the join phase starts
    TRY_COMPLETE = auto()  # end the join phase if everybody is here and it is not the initial delay
    COMPLETE_IF_ALL = auto()  # end the join phase if everybody is here
    START_GENERATION = auto()  # answer all JoinGroups, await the SyncGroups
    BECOME_EMPTY = auto()  # journal a generation without members
    WAIT_LONGER = auto()  # another round of the rebalance time-out
    ANSWER_GENERATION = auto()  # answer this JoinGroup with the current generation
    STORE_MEMBER = auto()  # journal the new member id, then answer: no rebalance
    AWAIT_LEADER = auto()  # the answer to this SyncGroup comes with the leader's
    STORE_ASSIGNMENT = auto()  # journal the assignment
    HAND_OUT = auto()  # give everybody their assignment
    ANSWER_ASSIGNMENT = auto()
    WRITE_TOMBSTONES = auto()  # for the group and its positions


class Cell(NamedTuple):
    """One cell of the table. `to` is None where the state stays."""

    act: Act
    to: GroupState | None = None
    error: ErrorCode = ErrorCode.NONE


def _refuse(error: ErrorCode) -> Cell:
    return Cell(Act.REFUSE, error=error)


_SKIP = Cell(Act.IGNORE)
_OK = Cell(Act.ACCEPT)
_OK_ALIVE = Cell(Act.ACCEPT_ALIVE)
_JOIN_ALIVE = Cell(Act.ACCEPT_ALIVE, error=ErrorCode.REBALANCE_IN_PROGRESS)
_GONE = _refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE)
_NO_GROUP = _refuse(ErrorCode.GROUP_ID_NOT_FOUND)
_STRANGER = _refuse(ErrorCode.UNKNOWN_MEMBER_ID)
_IN_USE = _refuse(ErrorCode.NON_EMPTY_GROUP)
_JOIN_FIRST = _refuse(ErrorCode.REBALANCE_IN_PROGRESS)
_PREPARE = Cell(Act.PREPARE, GroupState.PREPARING)
_TRY = Cell(Act.TRY_COMPLETE)
_IF_ALL = Cell(Act.COMPLETE_IF_ALL)
_START = Cell(Act.START_GENERATION, GroupState.COMPLETING)
_EMPTIED = Cell(Act.BECOME_EMPTY, GroupState.EMPTY)
_LONGER = Cell(Act.WAIT_LONGER)
_CURRENT = Cell(Act.ANSWER_GENERATION)
_STORE_ID = Cell(Act.STORE_MEMBER)
_STORE = Cell(Act.STORE_ASSIGNMENT)
_AWAIT = Cell(Act.AWAIT_LEADER)
_HAND_OUT = Cell(Act.HAND_OUT, GroupState.STABLE)
_ASSIGNED = Cell(Act.ANSWER_ASSIGNMENT)
_DELETED = Cell(Act.WRITE_TOMBSTONES, GroupState.DEAD)

# fmt: off
STATES = (GroupState.EMPTY, GroupState.PREPARING, GroupState.COMPLETING, GroupState.STABLE, GroupState.DEAD)
_ROWS: dict[Event, tuple[Cell, Cell, Cell, Cell, Cell]] = {
    #                               Empty       Preparing    Completing   Stable      Dead
    Event.ID_REQUESTED:            (_OK,        _OK,         _OK,         _OK,        _GONE),
    Event.JOIN_NEW:                (_PREPARE,   _TRY,        _PREPARE,    _PREPARE,   _GONE),
    Event.JOIN_REPLACING:          (_STRANGER,  _TRY,        _PREPARE,    _STORE_ID,  _GONE),
    Event.JOIN_REPLACING_CHANGED:  (_STRANGER,  _TRY,        _PREPARE,    _PREPARE,   _GONE),
    Event.JOIN_SAME:               (_STRANGER,  _TRY,        _CURRENT,    _CURRENT,   _GONE),
    Event.JOIN_SAME_LEADER:        (_STRANGER,  _TRY,        _CURRENT,    _PREPARE,   _GONE),
    Event.JOIN_CHANGED:            (_STRANGER,  _TRY,        _PREPARE,    _PREPARE,   _GONE),
    Event.JOIN_DONE:               (_SKIP,      _START,      _SKIP,       _SKIP,      _SKIP),
    Event.JOIN_DONE_NOBODY:        (_SKIP,      _EMPTIED,    _SKIP,       _SKIP,      _SKIP),
    Event.JOIN_DONE_NOBODY_WAITS:  (_SKIP,      _LONGER,     _SKIP,       _SKIP,      _SKIP),
    Event.SYNC_LEADER:             (_STRANGER,  _JOIN_FIRST, _STORE,      _ASSIGNED,  _GONE),
    Event.SYNC_FOLLOWER:           (_STRANGER,  _JOIN_FIRST, _AWAIT,      _ASSIGNED,  _GONE),
    Event.SYNC_OVERDUE:            (_SKIP,      _SKIP,       _PREPARE,    _PREPARE,   _SKIP),
    Event.ASSIGNMENT_STORED:       (_SKIP,      _SKIP,       _HAND_OUT,   _SKIP,      _SKIP),
    Event.ASSIGNMENT_LOST:         (_SKIP,      _SKIP,       _PREPARE,    _SKIP,      _SKIP),
    Event.HEARTBEAT:               (_STRANGER,  _JOIN_ALIVE, _OK_ALIVE,   _OK_ALIVE,  _GONE),
    Event.MEMBERS_LEFT:            (_SKIP,      _TRY,        _PREPARE,    _PREPARE,   _SKIP),
    Event.MEMBER_EXPIRED:          (_SKIP,      _IF_ALL,     _PREPARE,    _PREPARE,   _SKIP),
    Event.PENDING_EXPIRED:         (_SKIP,      _IF_ALL,     _SKIP,       _SKIP,      _SKIP),
    Event.COMMIT:                  (_STRANGER,  _OK_ALIVE,   _JOIN_FIRST, _OK_ALIVE,  _GONE),
    Event.COMMIT_SIMPLE:           (_OK,        _STRANGER,   _STRANGER,   _STRANGER,  _GONE),
    Event.TXN_COMMIT:              (_STRANGER,  _OK,         _OK,         _OK,        _GONE),
    Event.TXN_COMMIT_SIMPLE:       (_OK,        _OK,         _OK,         _OK,        _GONE),
    Event.DELETE_POSITIONS:        (_OK,        _OK,         _OK,         _OK,        _NO_GROUP),
    Event.DELETE_POSITIONS_OPAQUE: (_OK,        _IN_USE,     _IN_USE,     _IN_USE,    _NO_GROUP),
    Event.DELETE:                  (_DELETED,      _IN_USE,     _IN_USE,     _IN_USE,    _NO_GROUP),
    Event.EXPIRE:                  (_DELETED,      _SKIP,       _SKIP,       _SKIP,      _SKIP),
}
# fmt: on

TABLE: dict[tuple[GroupState, Event], Cell] = {
    (state, event): cell for event, row in _ROWS.items() for state, cell in zip(STATES, row, strict=True)
}


def decide(state: GroupState, event: Event) -> Cell:
    """What an event means in a state."""
    return TABLE[state, event]
