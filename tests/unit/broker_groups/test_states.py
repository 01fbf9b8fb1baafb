"""The table of group states, pair by pair."""

from __future__ import annotations

import pytest

from semel.broker.groups.classic_group import STATES, TABLE, Act, Cell, GroupEvent, GroupState, decide
from semel.protocol.errors import ErrorCode as E

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = STATES

# One letter for each outcome; a row has one for each state: Empty, Preparing, Completing, Stable, Dead.
OUTCOMES = {
    ".": Cell(Act.IGNORE),
    "o": Cell(Act.ACCEPT),
    "a": Cell(Act.ACCEPT_ALIVE),
    "r": Cell(Act.ACCEPT_ALIVE, None, E.REBALANCE_IN_PROGRESS),
    "R": Cell(Act.REFUSE, None, E.REBALANCE_IN_PROGRESS),
    "U": Cell(Act.REFUSE, None, E.UNKNOWN_MEMBER_ID),
    "C": Cell(Act.REFUSE, None, E.COORDINATOR_NOT_AVAILABLE),
    "N": Cell(Act.REFUSE, None, E.NON_EMPTY_GROUP),
    "G": Cell(Act.REFUSE, None, E.GROUP_ID_NOT_FOUND),
    "P": Cell(Act.PREPARE, PREPARING),
    "t": Cell(Act.TRY_COMPLETE),
    "i": Cell(Act.COMPLETE_IF_ALL),
    "S": Cell(Act.START_GENERATION, COMPLETING),
    "E": Cell(Act.BECOME_EMPTY, EMPTY),
    "w": Cell(Act.WAIT_LONGER),
    "g": Cell(Act.SEND_GENERATION),
    "m": Cell(Act.STORE_MEMBER),
    "l": Cell(Act.AWAIT_LEADER),
    "s": Cell(Act.STORE_ASSIGNMENT),
    "H": Cell(Act.HAND_OUT, STABLE),
    "n": Cell(Act.ANSWER_ASSIGNMENT),
    "D": Cell(Act.WRITE_TOMBSTONES, DEAD),
}
EXPECTED = {
    GroupEvent.ID_REQUESTED: "ooooC",
    GroupEvent.JOIN_NEW: "PtPPC",
    GroupEvent.JOIN_REPLACING: "UtPmC",
    GroupEvent.JOIN_REPLACING_CHANGED: "UtPPC",
    GroupEvent.JOIN_SAME: "UtggC",
    GroupEvent.JOIN_SAME_LEADER: "UtgPC",
    GroupEvent.JOIN_CHANGED: "UtPPC",
    GroupEvent.JOIN_DONE: ".S...",
    GroupEvent.JOIN_DONE_NOBODY: ".E...",
    GroupEvent.JOIN_DONE_NOBODY_WAITS: ".w...",
    GroupEvent.SYNC_LEADER: "URsnC",
    GroupEvent.SYNC_FOLLOWER: "URlnC",
    GroupEvent.SYNC_OVERDUE: "..PP.",
    GroupEvent.ASSIGNMENT_STORED: "..H..",
    GroupEvent.ASSIGNMENT_LOST: "..P..",
    GroupEvent.HEARTBEAT: "UraaC",
    GroupEvent.MEMBERS_LEFT: ".tPP.",
    GroupEvent.MEMBER_EXPIRED: ".iPP.",
    GroupEvent.PENDING_EXPIRED: ".i...",
    GroupEvent.COMMIT: "UaRaC",
    GroupEvent.COMMIT_SIMPLE: "oUUUC",
    GroupEvent.TXN_COMMIT: "UoooC",
    GroupEvent.TXN_COMMIT_SIMPLE: "ooooC",
    GroupEvent.DELETE_OFFSETS: "ooooG",
    GroupEvent.DELETE_OFFSETS_OPAQUE: "oNNNG",
    GroupEvent.DELETE: "DNNNG",
    GroupEvent.EXPIRE: "D....",
}
# Which state may follow which, as Kafka has it. Dead is the end.
LEGAL_MOVES = {
    (EMPTY, PREPARING), (EMPTY, DEAD), (PREPARING, COMPLETING), (PREPARING, EMPTY),
    (COMPLETING, STABLE), (COMPLETING, PREPARING), (STABLE, PREPARING),
}  # fmt: skip


@pytest.mark.parametrize("event", GroupEvent)
@pytest.mark.parametrize("column", range(len(STATES)))
def test_every_event_in_every_state_has_its_outcome(event: GroupEvent, column: int) -> None:
    assert decide(STATES[column], event) == OUTCOMES[EXPECTED[event][column]]


def test_the_table_has_no_holes() -> None:
    assert TABLE.keys() == {(state, event) for state in GroupState for event in GroupEvent}


def test_groups_move_only_as_kafka_lets_them() -> None:
    moves = {(state, cell.to) for (state, _), cell in TABLE.items() if cell.to is not None}
    assert moves == LEGAL_MOVES


def test_a_refusal_has_an_error_and_changes_nothing() -> None:
    refusals = [cell for cell in TABLE.values() if cell.act is Act.REFUSE]
    assert refusals
    assert all(cell.error is not E.NONE and cell.to is None for cell in refusals)


def test_only_heartbeats_during_a_rebalance_are_accepted_with_an_error() -> None:
    odd = {key for key, cell in TABLE.items() if cell.act is not Act.REFUSE and cell.error is not E.NONE}
    assert odd == {(PREPARING, GroupEvent.HEARTBEAT)}
