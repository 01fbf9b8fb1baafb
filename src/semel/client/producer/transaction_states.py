"""The client's view of a transaction as one table: what may happen in which state, and where it leads. No I/O.

                     begin          commit         committed
    UNINITIALIZED       READY ---> IN_TRANSACTION ---> COMMITTING ---> READY
          |  initialized  ^             | failure          | failure
          v               |             v                  |
    INITIALIZING ---------+        ABORTABLE <-------------+
                                        | abort
                                        v        aborted
                                    ABORTING ------------> READY

Two-phase commit (KIP-939): IN_TRANSACTION -prepare-> PREPARING -all is delivered-> PREPARED, from where it is committed
or aborted; nothing can be added to it. INITIALIZING leads to PREPARED, too, if an earlier owner left a transaction and
it is kept.

From every state a newer owner leads to FENCED and an error that nothing helps against to FATAL; both are final. A
commit or abort without a response stays where it is, and the same call again goes on with it: a commit in doubt can be
repeated but not turned into an abort.
"""

from __future__ import annotations

from enum import Enum

from semel.client.errors import IllegalStateError


class ProducerTxnState(Enum):
    UNINITIALIZED = "uninitialized"
    INITIALIZING = "initializing"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTABLE = "failed, to be aborted"
    ABORTING = "aborting"
    FENCED = "fenced"
    FATAL = "broken"


class ProducerTxnEvent(Enum):
    INIT = "init_transactions()"
    INITIALIZED = "the coordinator gave an id and epoch"
    KEPT = "the coordinator has a transaction of an earlier owner, and keeps it"
    INIT_FAILED = "the coordinator could not be reached"
    BEGIN = "begin_transaction()"
    PREPARE = "prepare_transaction()"
    NOT_PREPARED = "records were not delivered in time, so the transaction is not prepared"
    IS_PREPARED = "everything is delivered"
    COMMIT = "commit_transaction()"
    COMMIT_NOT_SENT = "records were not delivered in time, so the commit was not sent"
    STILL_PREPARED = "the commit of a prepared transaction was not sent"
    COMMITTED = "the coordinator committed"
    ABORT = "abort_transaction()"
    ABORTED = "the coordinator aborted"
    FAILED = "a write or request failed, and an abort helps"
    FENCED = "a newer owner took over"
    BROKEN = "a write or request failed for good"


TRANSITIONS: dict[tuple[ProducerTxnState, ProducerTxnEvent], ProducerTxnState] = {
    (ProducerTxnState.UNINITIALIZED, ProducerTxnEvent.INIT): ProducerTxnState.INITIALIZING,
    (ProducerTxnState.INITIALIZING, ProducerTxnEvent.INITIALIZED): ProducerTxnState.READY,
    (ProducerTxnState.INITIALIZING, ProducerTxnEvent.INIT_FAILED): ProducerTxnState.UNINITIALIZED,
    (ProducerTxnState.INITIALIZING, ProducerTxnEvent.KEPT): ProducerTxnState.PREPARED,
    (ProducerTxnState.READY, ProducerTxnEvent.BEGIN): ProducerTxnState.IN_TRANSACTION,
    (ProducerTxnState.IN_TRANSACTION, ProducerTxnEvent.COMMIT): ProducerTxnState.COMMITTING,
    (ProducerTxnState.IN_TRANSACTION, ProducerTxnEvent.ABORT): ProducerTxnState.ABORTING,
    (ProducerTxnState.IN_TRANSACTION, ProducerTxnEvent.FAILED): ProducerTxnState.ABORTABLE,
    (ProducerTxnState.IN_TRANSACTION, ProducerTxnEvent.PREPARE): ProducerTxnState.PREPARING,
    (ProducerTxnState.PREPARING, ProducerTxnEvent.NOT_PREPARED): ProducerTxnState.IN_TRANSACTION,
    (ProducerTxnState.PREPARING, ProducerTxnEvent.IS_PREPARED): ProducerTxnState.PREPARED,
    (ProducerTxnState.PREPARING, ProducerTxnEvent.FAILED): ProducerTxnState.ABORTABLE,
    (ProducerTxnState.PREPARED, ProducerTxnEvent.COMMIT): ProducerTxnState.COMMITTING,
    (ProducerTxnState.PREPARED, ProducerTxnEvent.ABORT): ProducerTxnState.ABORTING,
    (ProducerTxnState.COMMITTING, ProducerTxnEvent.STILL_PREPARED): ProducerTxnState.PREPARED,
    (ProducerTxnState.COMMITTING, ProducerTxnEvent.COMMIT): ProducerTxnState.COMMITTING,
    (ProducerTxnState.COMMITTING, ProducerTxnEvent.COMMIT_NOT_SENT): ProducerTxnState.IN_TRANSACTION,
    (ProducerTxnState.COMMITTING, ProducerTxnEvent.COMMITTED): ProducerTxnState.READY,
    (ProducerTxnState.COMMITTING, ProducerTxnEvent.FAILED): ProducerTxnState.ABORTABLE,
    (ProducerTxnState.ABORTABLE, ProducerTxnEvent.ABORT): ProducerTxnState.ABORTING,
    (ProducerTxnState.ABORTABLE, ProducerTxnEvent.FAILED): ProducerTxnState.ABORTABLE,
    (ProducerTxnState.ABORTING, ProducerTxnEvent.ABORT): ProducerTxnState.ABORTING,
    (ProducerTxnState.ABORTING, ProducerTxnEvent.ABORTED): ProducerTxnState.READY,
    (ProducerTxnState.ABORTING, ProducerTxnEvent.FAILED): ProducerTxnState.ABORTING,
    **{
        (state, ProducerTxnEvent.FENCED): ProducerTxnState.FENCED
        for state in ProducerTxnState
        if state is not ProducerTxnState.FATAL
    },
    **{
        (state, ProducerTxnEvent.BROKEN): ProducerTxnState.FATAL
        for state in ProducerTxnState
        if state is not ProducerTxnState.FENCED
    },
}

_ADVICE: dict[ProducerTxnState, str] = {
    ProducerTxnState.UNINITIALIZED: "call init_transactions() first",
    ProducerTxnState.INITIALIZING: "init_transactions() is under way in another thread",
    ProducerTxnState.READY: "call begin_transaction() first",
    ProducerTxnState.IN_TRANSACTION: "a transaction is open: commit or abort it first",
    ProducerTxnState.PREPARING: "prepare_transaction() is under way in another thread",
    ProducerTxnState.PREPARED: "the transaction is prepared: commit or abort it, or call complete_transaction()",
    ProducerTxnState.COMMITTING: "a commit was sent and may have happened: call commit_transaction() again",
    ProducerTxnState.ABORTABLE: "the transaction has failed: call abort_transaction()",
    ProducerTxnState.ABORTING: "an abort is on its way: call abort_transaction() again to finish it",
    ProducerTxnState.FENCED: "a newer producer owns this transactional.id: close this one",
    ProducerTxnState.FATAL: "this producer cannot go on: close it and make a new one",
}


def after(state: ProducerTxnState, event: ProducerTxnEvent) -> ProducerTxnState:
    """The state that an event leads to; raises IllegalStateError for what may not happen."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalStateError(
            f"{event.value} is not possible now: this producer is {state.value}; {_ADVICE[state]}"
        ) from None


def allows(state: ProducerTxnState, event: ProducerTxnEvent) -> bool:
    return (state, event) in TRANSITIONS
