"""The client's view of a transaction as one table: what may happen in which state, and where it leads. No I/O.

                     begin          commit         committed
    UNINITIALIZED       READY ---> IN_TRANSACTION ---> COMMITTING ---> READY
          |  initialized  ^             | failure          | failure
          v               |             v                  |
    INITIALIZING ---------+        ABORTABLE <-------------+
                                        | abort
                                        v        aborted
                                    ABORTING ------------> READY

From every state a newer owner leads to FENCED and an error that nothing helps against to FATAL; both are final. A
commit or abort without an answer stays where it is, and the same call again goes on with it: a commit in doubt can be
repeated but not turned into an abort.
"""

from __future__ import annotations

from enum import Enum

from semel.client.errors import IllegalStateError


class State(Enum):
    UNINITIALIZED = "uninitialized"
    INITIALIZING = "initializing"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"
    COMMITTING = "committing"
    ABORTABLE = "failed, to be aborted"
    ABORTING = "aborting"
    FENCED = "fenced"
    FATAL = "broken"


class Event(Enum):
    INIT = "init_transactions()"
    INITIALIZED = "the coordinator gave an id and epoch"
    INIT_FAILED = "the coordinator could not be asked"
    BEGIN = "begin_transaction()"
    COMMIT = "commit_transaction()"
    COMMIT_NOT_SENT = "records were not delivered in time, so the commit was not sent"
    COMMITTED = "the coordinator committed"
    ABORT = "abort_transaction()"
    ABORTED = "the coordinator aborted"
    FAILED = "a write or request failed in a way that an abort mends"
    FENCED = "a newer owner took over"
    BROKEN = "a write or request failed for good"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.UNINITIALIZED, Event.INIT): State.INITIALIZING,
    (State.INITIALIZING, Event.INITIALIZED): State.READY,
    (State.INITIALIZING, Event.INIT_FAILED): State.UNINITIALIZED,
    (State.READY, Event.BEGIN): State.IN_TRANSACTION,
    (State.IN_TRANSACTION, Event.COMMIT): State.COMMITTING,
    (State.IN_TRANSACTION, Event.ABORT): State.ABORTING,
    (State.IN_TRANSACTION, Event.FAILED): State.ABORTABLE,
    (State.COMMITTING, Event.COMMIT): State.COMMITTING,
    (State.COMMITTING, Event.COMMIT_NOT_SENT): State.IN_TRANSACTION,
    (State.COMMITTING, Event.COMMITTED): State.READY,
    (State.COMMITTING, Event.FAILED): State.ABORTABLE,
    (State.ABORTABLE, Event.ABORT): State.ABORTING,
    (State.ABORTABLE, Event.FAILED): State.ABORTABLE,
    (State.ABORTING, Event.ABORT): State.ABORTING,
    (State.ABORTING, Event.ABORTED): State.READY,
    (State.ABORTING, Event.FAILED): State.ABORTING,
    **{(state, Event.FENCED): State.FENCED for state in State if state is not State.FATAL},
    **{(state, Event.BROKEN): State.FATAL for state in State if state is not State.FENCED},
}

_ADVICE: dict[State, str] = {
    State.UNINITIALIZED: "call init_transactions() first",
    State.INITIALIZING: "init_transactions() is under way in another thread",
    State.READY: "call begin_transaction() first",
    State.IN_TRANSACTION: "a transaction is open: commit or abort it first",
    State.COMMITTING: "a commit is on its way and may have happened: call commit_transaction() again to settle it",
    State.ABORTABLE: "the transaction has failed: call abort_transaction()",
    State.ABORTING: "an abort is on its way: call abort_transaction() again to finish it",
    State.FENCED: "a newer producer owns this transactional.id: close this one",
    State.FATAL: "this producer cannot go on: close it and make a new one",
}


def after(state: State, event: Event) -> State:
    """The state that an event leads to; raises IllegalStateError for what may not happen."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalStateError(
            f"{event.value} is not possible now: this producer is {state.value}; {_ADVICE[state]}"
        ) from None


def allows(state: State, event: Event) -> bool:
    return (state, event) in TRANSITIONS
