"""The end of a transaction of Kafka that a database has decided to commit: by whoever is alive, as often as needed.

Whether it is committed is read from the log, from the first marker of its producer behind what it wrote: so EndTxn may
be sent again, by another process, and never hits a later transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from semel.client.errors import FatalError, KafkaError
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.client.settings import ProducerSettings
from semel.client.timing import Backoff, Deadline
from semel.protocol.errors import ErrorCode, Recovery
from semel.sinks.postgres.decisions import Decision

END_TIMEOUT_S = 60.0  # for the end of a decided transaction, before its caller tries again or gives up
# How a broker refuses two-phase commit, beside not knowing the request at all.
NO_TWO_PHASE = (ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ErrorCode.UNSUPPORTED_VERSION)


class DecisionLostError(FatalError):
    """A transaction that the database decided to commit was aborted, and there is no copy of its output."""


def lost(transactional_id: str, decision: Decision, table: str) -> DecisionLostError:
    topics = ", ".join(sorted({topic for topic, _ in decision.written}))
    return DecisionLostError(
        f"the database has decided to commit the transaction {decision.producer_id}:{decision.epoch} of "
        f"{transactional_id!r}, but it was aborted, by force: the rows are in the database, the records of {topics} "
        "are not in the topics. Write them again from the rows if they are needed, then set state = 'finished' in "
        f"{table}"
    )


def end_decided(
    settings: ProducerSettings,
    decision: Decision,
    *,
    may_be_open: bool = True,
    may_commit: Callable[[TransactionOwner], bool] = lambda owner: True,
) -> bool:
    """Whether it is committed in the end: by an earlier EndTxn, or by this one. False: the coordinator aborted it, or
    it is open and `may_commit` says that it must not be committed."""
    deadline, pauses = Deadline(END_TIMEOUT_S), Backoff(20, 1_000)
    handle = TransactionHandle(settings, decision.producer_id, decision.epoch, decision.transaction_version)
    with TransactionOwner(settings) as owner:
        while True:
            owner.resume(handle)
            found = owner.how_it_ended(decision.written, deadline.remaining_s())
            if found is not None:
                return found
            refusal: KafkaError | None = None
            if may_be_open:
                if not may_commit(owner):
                    return False
                try:
                    owner.end(commit=True, timeout_s=deadline.remaining_s())
                    return True
                except KafkaError as error:
                    if error.recovery is Recovery.FATAL and error.code is not ErrorCode.INVALID_TXN_STATE:
                        raise
                    refusal = error
            if deadline.expired:
                raise FatalError(
                    f"the transaction {decision.producer_id}:{decision.epoch} of {settings.transactional_id!r} is "
                    f"decided, but neither can it be ended ({refusal}) nor do the logs say how it ended; see "
                    "docs/postgres.md: transactions that nobody finishes"
                )
            time.sleep(pauses.next_s())
