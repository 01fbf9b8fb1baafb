"""The table of the client's transaction, every pair of state and event."""

from __future__ import annotations

import pytest

from semel.client.errors import IllegalStateError
from semel.client.producer.transaction_states import ProducerTxnEvent, ProducerTxnState, after, allows

S, E = ProducerTxnState, ProducerTxnEvent

# Written a second time, by state: what each call or event leads to. Everything that is not listed is refused.
EXPECTED: dict[ProducerTxnState, dict[ProducerTxnEvent, ProducerTxnState]] = {
    S.UNINITIALIZED: {E.INIT: S.INITIALIZING},
    S.INITIALIZING: {E.INITIALIZED: S.READY, E.KEPT: S.PREPARED, E.INIT_FAILED: S.UNINITIALIZED},
    S.READY: {E.BEGIN: S.IN_TRANSACTION},
    S.IN_TRANSACTION: {
        E.PREPARE: S.PREPARING,
        E.COMMIT: S.COMMITTING,
        E.ABORT: S.ABORTING,
        E.FAILED: S.ABORTABLE,
    },
    S.PREPARING: {E.NOT_PREPARED: S.IN_TRANSACTION, E.IS_PREPARED: S.PREPARED, E.FAILED: S.ABORTABLE},
    S.PREPARED: {E.COMMIT: S.COMMITTING, E.ABORT: S.ABORTING},
    S.COMMITTING: {
        E.COMMIT: S.COMMITTING,
        E.COMMIT_NOT_SENT: S.IN_TRANSACTION,
        E.STILL_PREPARED: S.PREPARED,
        E.COMMITTED: S.READY,
        E.FAILED: S.ABORTABLE,
    },
    S.ABORTABLE: {E.ABORT: S.ABORTING, E.FAILED: S.ABORTABLE},
    S.ABORTING: {E.ABORT: S.ABORTING, E.ABORTED: S.READY, E.FAILED: S.ABORTING},
    S.FENCED: {E.FENCED: S.FENCED},
    S.FATAL: {E.BROKEN: S.FATAL},
}
for _state in set(ProducerTxnState) - {S.FENCED, S.FATAL}:
    EXPECTED[_state] |= {E.FENCED: S.FENCED, E.BROKEN: S.FATAL}


@pytest.mark.parametrize("event", ProducerTxnEvent, ids=lambda event: event.name)
@pytest.mark.parametrize("state", ProducerTxnState, ids=lambda state: state.name)
def test_every_pair_of_state_and_event(state: ProducerTxnState, event: ProducerTxnEvent) -> None:
    expected = EXPECTED[state].get(event)
    assert allows(state, event) == (expected is not None)
    if expected is not None:
        assert after(state, event) is expected
        return
    with pytest.raises(IllegalStateError, match="is not possible now") as refused:
        after(state, event)
    assert state.value in str(refused.value)
    assert "; " in str(refused.value), "the message says what to do"


def test_a_commit_in_doubt_cannot_become_an_abort() -> None:
    assert not allows(ProducerTxnState.COMMITTING, ProducerTxnEvent.ABORT)
