"""The transactions of one producer as a state machine: what may be written, what a failure means, what the end of a
transaction comes to. No I/O, no lock, no clock; the table of states is in `transaction_states.py`.

The six failure rules:
    begin or init times out            the same call again, with the same transactional.id
    a broker fails while sending       the batch is retried; the commit waits for it and can be called again
    the transaction's timeout passed   the coordinator aborted it. TV1: `FencedError`, a new producer does it again; TV2
                                       recognises it: `AbortableError`, abort and do it again
    the commit's response is lost      EndTxn is sent again until there is one; `commit_refused` has the rest
    the network is cut                 the coordinator aborts at transaction.timeout.ms
    the coordinator moves              found again, nothing to do for the user
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FatalError,
    FencedError,
    IllegalStateError,
    KafkaError,
    TimedOutError,
)
from semel.client.producer.batches import Identity, Place, ProducerBatch
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.transaction_states import ProducerTxnEvent, ProducerTxnState, after, allows
from semel.protocol.errors import ErrorCode, Recovery

# Responses to an end that say: the coordinator has no such open transaction of this epoch.
NOT_OPEN = frozenset({ErrorCode.INVALID_TXN_STATE})
BROKEN_CODES = frozenset({ErrorCode.CLUSTER_AUTHORIZATION_FAILED, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED})
OPEN_STATES = frozenset({ProducerTxnState.IN_TRANSACTION, ProducerTxnState.PREPARING, ProducerTxnState.COMMITTING})
LOST_STATES = frozenset(
    {ProducerTxnState.ABORTABLE, ProducerTxnState.ABORTING, ProducerTxnState.FENCED, ProducerTxnState.FATAL}
)


class Versions(NamedTuple):
    """(lowest, highest) version of each request in a generation of the protocol."""

    produce: tuple[int, int]
    end_txn: tuple[int, int]
    txn_offset_commit: tuple[int, int]


VERSIONS = {1: Versions((3, 11), (0, 4), (0, 4)), 2: Versions((12, 12), (5, 5), (5, 5))}


class PreparedTransaction(NamedTuple):
    """A prepared transaction, small enough to be stored where it is decided: in a database, with what belongs to it.

    As text it is `producer id:epoch`, Kafka's PreparedTxnState.
    """

    producer_id: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.producer_id}:{self.epoch}"

    @classmethod
    def from_text(cls, text: str) -> PreparedTransaction:
        producer_id, _, epoch = text.partition(":")
        try:
            return cls(int(producer_id), int(epoch))
        except ValueError:
            raise ValueError(f"invalid prepared transaction {text!r}: expected 'producer id:epoch'") from None


_PREPARED_STATES = frozenset({ProducerTxnState.PREPARED, ProducerTxnState.COMMITTING, ProducerTxnState.ABORTING})


class TransactionCore(WriteIdentity):
    """A transactional id and the transaction that it has open, if any: the identity that batches are written under, and
    the calls of the user, each as the events that it is made of. A gap in the sequences means abort; the next
    transaction gets a new epoch."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.state = ProducerTxnState.UNINITIALIZED
        self.error: KafkaError | None = None  # what led to ABORTABLE, FENCED or FATAL
        self.generation = 1
        self.requests = 0  # AddPartitionsToTxn that are on their way: no end may overtake them
        self.offset_requests: set[object] = set()  # the same, of offsets
        self.end_maybe_sent = False
        self._identity = None
        self._needs_epoch = False  # the next transaction must run under a new epoch
        self._added: set[Place] = set()  # TV1: partitions that the coordinator knows of
        self._written: dict[Place, int] = {}  # first offset of this transaction in each partition
        self._touched = False  # the coordinator may know of this transaction
        self._groups_in_doubt: set[str] = set()  # whose offsets may not have reached it
        self.prepared: PreparedTransaction | None = None  # what two-phase commit stores elsewhere

    # --- what is written ---
    @property
    def current(self) -> Identity | None:
        return self._identity if self.state in OPEN_STATES else None

    @property
    def produce_versions(self) -> tuple[int, int]:
        return VERSIONS[self.generation].produce

    def received(self, identity: Identity) -> None:
        raise IllegalStateError("the identity of a transaction comes from init_transactions()")

    def check_accepts(self) -> None:
        """Raises unless a transaction is open and has not failed."""
        if self.state is ProducerTxnState.IN_TRANSACTION:
            return
        self.raise_if_failed()
        if self.state in (ProducerTxnState.PREPARING, ProducerTxnState.PREPARED):
            raise IllegalStateError(
                "cannot send: the transaction is prepared, and nothing can be added to it any more; end it with "
                "complete_transaction(), commit_transaction() or abort_transaction()"
            )
        raise IllegalStateError(f"cannot send: this producer is {self.state.value}; call begin_transaction() first")

    def may_write(self, place: Place) -> bool:
        return self.generation >= 2 or place in self._added

    def partitions_to_add(self, places: Iterable[Place]) -> list[Place]:
        if self.current is None:
            return []
        wanted = list(places)
        self._touched = self._touched or bool(wanted)
        new = [] if self.generation >= 2 else [place for place in wanted if place not in self._added]
        self.requests += bool(new)
        return new

    def added(self, places: Iterable[Place]) -> None:
        self.requests -= 1
        self._added.update(places)

    def stored(self, batch: ProducerBatch) -> None:
        self._written.setdefault((batch.topic, batch.partition), batch.base_offset)

    def failed(self, error: KafkaError) -> None:
        """Sorts an error into the state: fenced, fatal, or to be aborted."""
        event = ProducerTxnEvent.FENCED if error.recovery is Recovery.FENCED else ProducerTxnEvent.FAILED
        if error.code in BROKEN_CODES:
            event = ProducerTxnEvent.BROKEN
        if allows(self.state, event):
            if self.error is None or event is not ProducerTxnEvent.FAILED:
                self.error = error
            self.state = after(self.state, event)

    def lost(self) -> KafkaError | None:
        if self.state is ProducerTxnState.ABORTING and self.error is None:
            return AbortableError("the transaction was aborted before this record was acknowledged")
        return self.error if self.state in LOST_STATES else None

    # --- init_transactions ---
    def init(self) -> None:
        self._move(ProducerTxnEvent.INIT)

    def initialized(self, identity: Identity, generation: int) -> None:
        self._move(ProducerTxnEvent.INITIALIZED)
        self._identity, self.generation = identity, generation

    def kept(self, identity: Identity, ongoing: Identity, generation: int) -> PreparedTransaction:
        """An earlier owner's transaction was kept: it can be ended under the new identity, and nothing else."""
        self._move(ProducerTxnEvent.KEPT)
        self._identity, self.generation = identity, generation
        self._touched = True
        self.prepared = PreparedTransaction(*ongoing)
        return self.prepared

    def init_failed(self, error: BaseException) -> None:
        """Also interrupted (Ctrl-C): the next call starts over."""
        fenced = isinstance(error, KafkaError) and error.recovery is Recovery.FENCED
        self._move_if_allowed(ProducerTxnEvent.FENCED if fenced else ProducerTxnEvent.INIT_FAILED)

    # --- begin_transaction ---
    def begin(self) -> Identity | None:
        """Whether a transaction may begin; the identity that must be renewed first, if any (`renewed`)."""
        self.raise_if_failed()
        after(self.state, ProducerTxnEvent.BEGIN)  # raises if it may not
        return self._identity if self._needs_epoch else None

    def renewed(self, identity: Identity) -> None:
        """A late request of the last transaction must not hit the next one: a new epoch distinguishes them."""
        self._identity = identity
        self._needs_epoch = False

    def began(self) -> None:
        self._move(ProducerTxnEvent.BEGIN)
        self.transaction_number += 1
        self.error = None
        self._added.clear()
        self._written.clear()
        self._touched = self.end_maybe_sent = False
        self._groups_in_doubt.clear()
        self.prepared = None

    # --- send_offsets_to_transaction ---
    def add_offsets(self, request: object = None) -> Identity:
        """A group's offsets are about to be sent, in this request; `offsets_ended` takes the outcome."""
        self.check_accepts()
        assert self._identity is not None
        self._touched = True
        self.offset_requests |= {request}
        return self._identity

    def offsets_ended(self, group_id: str, error: BaseException | None, request: object = None) -> None:
        """After a timeout, or Ctrl-C, the same call may work: offsets are set, not added. Until it does, the
        transaction must not commit without them."""
        self.offset_requests -= {request}
        if error is None:
            self._groups_in_doubt.discard(group_id)
        elif isinstance(error, TimedOutError) or not isinstance(error, KafkaError):
            self._groups_in_doubt.add(group_id)
            if self.state in (ProducerTxnState.COMMITTING, ProducerTxnState.PREPARING):  # another thread waits for them
                self.failed(self._offsets_in_doubt())
        elif error.code is ErrorCode.FENCED_INSTANCE_ID:  # the consumer is fenced, this producer can abort and go on
            self.failed(AbortableError(str(error), error.code))
        else:
            self.failed(error)

    def _offsets_in_doubt(self) -> AbortableError:
        return AbortableError(
            f"send_offsets_to_transaction() for group {min(self._groups_in_doubt)!r} timed out or was interrupted, and "
            "its offsets may not be part of this transaction; call it again before the commit, or abort"
        )

    # --- prepare_transaction ---
    def prepare(self) -> None:
        """From here on nothing is accepted; `is_prepared` when everything is delivered."""
        self.raise_if_failed()
        if self._groups_in_doubt:
            raise self._offsets_in_doubt()
        self._move(ProducerTxnEvent.PREPARE)

    def not_prepared(self) -> None:
        """Not everything was delivered in time, or the call was interrupted: the transaction goes on."""
        self._move_if_allowed(ProducerTxnEvent.NOT_PREPARED)

    def is_prepared(self) -> PreparedTransaction:
        assert self._identity is not None
        self._move(ProducerTxnEvent.IS_PREPARED)
        self.prepared = PreparedTransaction(*self._identity)
        return self.prepared

    def is_to_commit(self, decided: PreparedTransaction | None) -> bool:
        """Whether a prepared transaction is the one that was decided elsewhere: then it commits, else it aborts."""
        if self.prepared is None or self.state not in _PREPARED_STATES:
            raise IllegalStateError(
                f"complete_transaction() is not possible now: this producer is {self.state.value}; it ends what "
                "prepare_transaction() or init_transactions(keep_prepared=True) returned"
            )
        return decided == self.prepared

    # --- commit_transaction ---
    def commit(self) -> None:
        """From here on nothing is accepted. The end may be sent when everything is delivered."""
        self.raise_if_failed()
        if self._groups_in_doubt:
            raise self._offsets_in_doubt()
        self._move(ProducerTxnEvent.COMMIT)

    def commit_not_sent(self) -> None:
        """Not everything was delivered in time, or the call was interrupted: the transaction goes on."""
        if not self.end_maybe_sent:
            self._move_if_allowed(self._not_sent)

    @property
    def _not_sent(self) -> ProducerTxnEvent:
        return ProducerTxnEvent.STILL_PREPARED if self.prepared is not None else ProducerTxnEvent.COMMIT_NOT_SENT

    def end_request(self) -> Identity | None:
        """Whose transaction EndTxn must end; None if the coordinator knows of none."""
        return self._identity if self._touched else None

    def committed(self, identity: Identity | None = None, was_repeated: bool = False) -> None:
        """In TV1 a copy of a repeated end could hit the next transaction, so that needs a new epoch."""
        self._needs_epoch = self._needs_epoch or (self.generation == 1 and was_repeated)
        self._ended(ProducerTxnEvent.COMMITTED, identity)

    def commit_unknown(self, maybe_sent: bool, cause: str, timeout_s: float) -> KafkaError:
        """EndTxn has no response: the error to raise."""
        if not maybe_sent:
            self._move(self._not_sent)
            return TimedOutError(
                f"the commit could not be sent within {timeout_s:.3g} s ({cause}); nothing was committed: call "
                "commit_transaction() again, or abort_transaction()"
            )
        self.end_maybe_sent = True
        return CommitUncertainError(
            f"the commit was sent, but no response came within {timeout_s:.3g} s ({cause}); call "
            "commit_transaction() again to settle it: it commits once, or says for certain that it did not"
        )

    def commit_refused(self, error: KafkaError, was_repeated: bool) -> KafkaError | None:
        """The coordinator refused the end: the error to raise. None: an earlier try may have worked, which the log
        shows; `commit_found` takes what it says."""
        if was_repeated and error.recovery is Recovery.FENCED:
            return None
        if error.code in NOT_OPEN:  # not returned for a commit that was carried out, repeated or not
            self._needs_epoch = True
            error = AbortableError(
                "the coordinator has aborted the transaction: it took longer than transaction.timeout.ms, or somebody "
                f"ended it by force ({error})",
                error.code,
            )
        elif error.recovery is Recovery.FATAL:
            self.error = error
            self._move(ProducerTxnEvent.BROKEN)
            return error
        self.failed(error)
        return error

    def written(self) -> dict[Place, int]:
        return dict(self._written)

    def first_write(self) -> tuple[Place, int] | None:
        """A place in the log from which on the marker of this transaction is to be found."""
        return next(iter(self._written.items()), None)

    def commit_found(self, is_committed: bool | None, error: KafkaError) -> KafkaError | None:
        """Fenced after a lost response: the commit happened before, or never. The error to raise, if any; the next
        begin_transaction() raises that another producer owns the id now. `is_committed` is None if nobody knows."""
        self.failed(error)
        if is_committed:
            return None
        if is_committed is None:
            return CommitUncertainError(
                f"the commit's response was lost, then a newer owner of {self.transactional_id!r} took over ({error}), "
                "and the log could not be read to see how it ended; look at the output before you write it again"
            )
        return FencedError(f"the transaction was aborted, not committed: {error}", error.code)

    # --- abort_transaction ---
    def abort(self) -> None:
        """From here on nothing is accepted or sent, but for the end, once all that is on its way has arrived."""
        if self.state in (ProducerTxnState.FENCED, ProducerTxnState.FATAL):
            self.raise_if_failed()
        self._move(ProducerTxnEvent.ABORT)

    def aborting(self) -> None:
        """EndTxn is about to be sent: whatever comes of it, the next transaction needs a new epoch, unless the
        response says otherwise."""
        self._needs_epoch = True

    def aborted(self, identity: Identity | None = None) -> None:
        """With the identity of the response, which in TV2 has the next epoch; without one if nothing was to be ended,
        or the coordinator had no such transaction."""
        if identity is not None:
            self._needs_epoch = self.generation == 1
        self._ended(ProducerTxnEvent.ABORTED, identity)

    def abort_unknown(self, maybe_sent: bool) -> None:
        self.end_maybe_sent = self.end_maybe_sent or maybe_sent

    def abort_refused(self, error: KafkaError) -> bool:
        """Whether the error must be raised: not if the coordinator has nothing to abort."""
        if error.code in NOT_OPEN:
            return False
        self.failed(error if error.recovery is Recovery.FENCED else FatalError(str(error), error.code))
        return True

    # --- state ---
    def _ended(self, event: ProducerTxnEvent, identity: Identity | None) -> None:
        self._move(event)
        if identity is not None:
            self._identity = identity
        self.end_maybe_sent = False
        self.error = None
        self.prepared = None

    def _move(self, event: ProducerTxnEvent) -> None:
        self.state = after(self.state, event)

    def _move_if_allowed(self, event: ProducerTxnEvent) -> None:
        if allows(self.state, event):
            self.state = after(self.state, event)

    def raise_if_failed(self) -> None:
        if self.state is ProducerTxnState.FENCED:
            raise FencedError(f"this producer was fenced: {self.error}; close it", _code(self.error)) from self.error
        if self.state is ProducerTxnState.FATAL:
            raise FatalError(f"this producer cannot go on: {self.error}", _code(self.error)) from self.error
        if self.state is ProducerTxnState.ABORTABLE:
            raise AbortableError(
                f"the transaction has failed: {self.error}; call abort_transaction(), then run it again",
                _code(self.error),
            ) from self.error


def _code(error: KafkaError | None) -> ErrorCode | None:
    return error.code if error is not None else None
