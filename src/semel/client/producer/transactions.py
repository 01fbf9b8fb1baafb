"""Transactions of one producer: the calls that users make, the identity that the sender writes under, and what is done
about every failure.

The six failure rules:
    begin or init times out            the same call again, with the same transactional.id
    a broker fails while sending       the sender retries; the commit waits for it and can be called again
    the transaction's timeout passed  the coordinator aborted it. TV1: `FencedError`, a new producer does it again; TV2
                                       recognises it: `AbortableError`, abort and do it again
    the commit's response is lost        EndTxn is sent again until there is one; see `_settle_from_log` for the rest
    the network is cut                 the coordinator aborts at transaction.timeout.ms
    the coordinator moves              found again, nothing to do for the user
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FatalError,
    FencedError,
    IllegalStateError,
    KafkaError,
    TimedOutError,
)
from semel.client.log_reading import TransactionEnd, find_decision
from semel.client.producer.accumulator import Place
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.coordinator import VERSIONS, CoordinatorClient, EndAnswer, EndUnknownError
from semel.client.producer.sender import LANE, Sender
from semel.client.producer.transaction_states import ProducerTxnEvent, ProducerTxnState, after, allows
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata
from semel.protocol.errors import ErrorCode, Recovery

# Responses to an end that say: the coordinator has no such open transaction of this epoch.
NOT_OPEN = frozenset({ErrorCode.INVALID_TXN_STATE})


class TransactionalGate:
    """The sender's gate and the user's transaction calls. One lock guards the state; I/O happens outside of it."""

    def __init__(self, coordinator: CoordinatorClient, request_timeout_s: float) -> None:
        self.transactional_id: str | None = coordinator.transactional_id
        self.coordinator = coordinator
        self.sender: Sender  # set by the producer, which makes both
        self.state = ProducerTxnState.UNINITIALIZED
        self.error: KafkaError | None = None  # what led to ABORTABLE, FENCED or FATAL
        self.generation = 1
        self._request_timeout_s = request_timeout_s
        self._lock = threading.Lock()
        self._adding_offsets = threading.Lock()  # held by the thread that adds offsets to the transaction
        self._identity: Identity | None = None
        self._needs_epoch = False  # the next transaction must run under a new epoch
        self._added: set[Place] = set()  # TV1: partitions that the coordinator knows of
        self._written: dict[Place, int] = {}  # first offset of this transaction in each partition
        self._touched = False  # the coordinator may know of this transaction
        self._end_maybe_sent = False
        self._sealed = False  # the end is next: nothing more is sent

    # --- for the sender ---

    def identity(self) -> Identity | None:
        with self._lock:
            is_open = self.state in (ProducerTxnState.IN_TRANSACTION, ProducerTxnState.COMMITTING) and not self._sealed
            return self._identity if is_open else None

    def prepare(self) -> None:
        """The identity comes from init_transactions."""

    def produce_version(self) -> tuple[int, int]:
        return VERSIONS[self.generation].produce

    def admit(self, places: list[Place]) -> None:
        if places:
            self._touched = True
        new = [place for place in places if place not in self._added]
        if self.generation >= 2 or not new:
            return
        assert self._identity is not None
        self.coordinator.add_partitions(self._identity, new, self._request_timeout_s, LANE)
        self._added.update(new)

    def raise_epoch(self, stale: Identity) -> Identity | None:
        return None  # a gap means abort; the next transaction gets a new epoch

    def stored(self, batch: ProducerBatch) -> None:
        self._written.setdefault((batch.topic, batch.partition), batch.base_offset)

    def failed(self, error: KafkaError) -> None:
        """Sorts an error into the state: fenced, fatal, or to be aborted."""
        event = ProducerTxnEvent.FENCED if error.recovery is Recovery.FENCED else ProducerTxnEvent.FAILED
        if error.code in (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED):
            event = ProducerTxnEvent.BROKEN
        with self._lock:
            if allows(self.state, event):
                if self.error is None or event is not ProducerTxnEvent.FAILED:
                    self.error = error
                self.state = after(self.state, event)
        self.sender.wake()

    def giving_up(self) -> KafkaError | None:
        with self._lock:
            if self.state is ProducerTxnState.ABORTING and self.error is None:
                return AbortableError("the transaction was aborted before this record was acknowledged")
            if self.state in (
                ProducerTxnState.ABORTABLE,
                ProducerTxnState.ABORTING,
                ProducerTxnState.FENCED,
                ProducerTxnState.FATAL,
            ):
                return self.error
            if self.state is ProducerTxnState.READY or self._sealed:
                return IllegalStateError("sent while another thread ended the transaction; it is in none")
            return None

    # --- for the user ---

    def check_can_send(self) -> None:
        """Raises unless a transaction is open and has not failed."""
        if self.state is ProducerTxnState.IN_TRANSACTION:
            return
        self._raise_if_failed()
        raise IllegalStateError(f"cannot send: this producer is {self.state.value}; call begin_transaction() first")

    def init(self, timeout_s: float) -> None:
        """Owns the transactional id: earlier owners are fenced, what they left open is finished."""
        deadline = Deadline(timeout_s)
        try:
            self._move(ProducerTxnEvent.INIT)
            self.generation = self.coordinator.generation(deadline.remaining_s())
            identity = self.coordinator.init(deadline.remaining_s())
            with self._lock:
                self._identity = identity
                self.state = after(self.state, ProducerTxnEvent.INITIALIZED)
        except IllegalStateError:
            raise
        except BaseException as error:  # Ctrl-C too: the next call starts over
            fenced = isinstance(error, KafkaError) and error.recovery is Recovery.FENCED
            self._move_if_allowed(ProducerTxnEvent.FENCED if fenced else ProducerTxnEvent.INIT_FAILED)
            raise

    def begin(self, timeout_s: float) -> None:
        self._raise_if_failed()
        with self._lock:
            after(self.state, ProducerTxnEvent.BEGIN)  # raises if it may not
        if self._needs_epoch:
            self._new_epoch(timeout_s)
        with self._lock:
            self.error = None
            self._added.clear()
            self._written.clear()
            self._touched = self._end_maybe_sent = self._sealed = False
            self.state = after(self.state, ProducerTxnEvent.BEGIN)

    def _new_epoch(self, timeout_s: float) -> None:
        """A late request of the last transaction must not hit the next one: only a new epoch distinguishes them."""
        try:
            identity = self.coordinator.init(timeout_s, self._identity)
        except FencedError as error:
            self.failed(error)
            raise
        with self._lock:
            self._identity = identity
            self._needs_epoch = False

    def send_offsets(
        self, offsets: Mapping[tuple[str, int], OffsetAndMetadata], group: GroupMetadata, timeout_s: float
    ) -> None:
        deadline = Deadline(timeout_s)
        with self._offsets_turn(deadline):
            self.check_can_send()
            if offsets:
                self._send_offsets(offsets, group, deadline)

    @contextmanager
    def _offsets_turn(self, deadline: Deadline) -> Iterator[None]:
        """While a thread adds offsets, no other one ends the transaction: it would be committed without them."""
        if not self._adding_offsets.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise TimedOutError(
                f"another thread was still adding offsets to the transaction after {deadline.total_s:.3g} s; "
                "make the same call again"
            )
        try:
            yield
        finally:
            self._adding_offsets.release()

    def _send_offsets(
        self, offsets: Mapping[tuple[str, int], OffsetAndMetadata], group: GroupMetadata, deadline: Deadline
    ) -> None:
        assert self._identity is not None
        self._touched = True
        try:
            self.coordinator.commit_offsets(self._identity, group, offsets, self.generation, deadline.remaining_s())
        except TimedOutError:
            raise  # the same call again may work: offsets are set, not added
        except KafkaError as error:
            if error.code is ErrorCode.FENCED_INSTANCE_ID:  # the consumer is fenced, this producer can abort and go on
                self.failed(AbortableError(str(error), error.code))
            else:
                self.failed(error)
            raise

    def commit(self, deadline: Deadline) -> None:
        """Returns when the transaction is committed for certain."""
        with self._lock:
            self._raise_if_failed()
            self.state = after(self.state, ProducerTxnEvent.COMMIT)
        if not self._end_maybe_sent:
            self._deliver_all(deadline)
        if not self._touched:
            self._ended(ProducerTxnEvent.COMMITTED, self._identity)
            return
        assert self._identity is not None
        try:
            response = self._end(self._identity, True, deadline)
        except EndUnknownError as error:
            raise self._commit_unknown(error, deadline) from error
        except KafkaError as error:
            self._commit_refused(error, deadline)
            return
        self._needs_epoch = self._needs_epoch or (self.generation == 1 and response.was_repeated)
        self._ended(ProducerTxnEvent.COMMITTED, response.identity)

    def _end(self, identity: Identity, commit: bool, deadline: Deadline) -> EndAnswer:
        try:
            return self.coordinator.end(identity, commit, self.generation, deadline, self._end_maybe_sent)
        except Exception:
            raise  # it says what may have been sent
        except BaseException:  # Ctrl-C
            self._end_maybe_sent = True
            raise

    def _deliver_all(self, deadline: Deadline) -> None:
        try:
            self._flush_and_seal(deadline)
        except BaseException:  # Ctrl-C too: nothing was committed, so an abort is possible again
            self._sealed = False
            self._move_if_allowed(ProducerTxnEvent.COMMIT_NOT_SENT)
            raise

    def _flush_and_seal(self, deadline: Deadline) -> None:
        with self._offsets_turn(deadline):
            pass  # those that another thread was adding; now that the state is COMMITTING, no thread begins to
        accumulator = self.sender.accumulator
        delivered = accumulator.flush(deadline, lambda: self.state is not ProducerTxnState.COMMITTING)
        if delivered:
            self._sealed = True  # what other threads send from here on is refused; what is on its way is awaited
            delivered = accumulator.flush(deadline, lambda: self.state is not ProducerTxnState.COMMITTING)
        self._raise_if_failed()
        if not delivered:
            raise TimedOutError(
                f"the transaction's records were not all acknowledged within {deadline.total_s:.3g} s, so nothing was "
                "committed; call commit_transaction() again, or abort_transaction()"
            )

    def _commit_unknown(self, error: EndUnknownError, deadline: Deadline) -> KafkaError:
        if not error.maybe_sent:
            self._sealed = False
            self._move(ProducerTxnEvent.COMMIT_NOT_SENT)
            return TimedOutError(
                f"the commit could not be sent within {deadline.total_s:.3g} s ({error}); nothing was committed: call "
                "commit_transaction() again, or abort_transaction()"
            )
        self._end_maybe_sent = True
        return CommitUncertainError(
            f"the commit was sent, but no response came within {deadline.total_s:.3g} s ({error}); call "
            "commit_transaction() again to settle it: it commits once, or says for certain that it did not"
        )

    def _commit_refused(self, error: KafkaError, deadline: Deadline) -> None:
        """Raises, unless an earlier try of this commit turns out to have worked."""
        repeated = getattr(error, "was_repeated", False)
        if repeated and error.recovery is Recovery.FENCED:
            decision = self._settle_from_log(error, deadline)
            self.failed(error)
            if decision is TransactionEnd.COMMITTED:
                return  # done; the next begin_transaction() raises that another producer owns the id now
            raise FencedError(f"the transaction was aborted, not committed: {error}", error.code) from error
        if error.code in NOT_OPEN:  # not returned for a commit that was carried out, repeated or not
            self._needs_epoch = True
            error = AbortableError(
                f"the coordinator has aborted the transaction: it took longer than transaction.timeout.ms ({error})",
                error.code,
            )
        elif error.recovery is Recovery.FATAL:
            with self._lock:
                self.error = error
                self.state = after(self.state, ProducerTxnEvent.BROKEN)
            raise error
        self.failed(error)
        raise error

    def _settle_from_log(self, error: KafkaError, deadline: Deadline) -> TransactionEnd:
        """Fenced after a lost response: the commit happened before, or never. The marker in the log shows which."""
        assert self._identity is not None
        if self._written:
            place, offset = next(iter(self._written.items()))
            cluster = self.coordinator.cluster
            decision = find_decision(cluster, place, offset, self._identity.producer_id, deadline)
            if decision is not None:
                return decision
        self.failed(error)
        raise CommitUncertainError(
            f"the commit's response was lost, then a newer owner of {self.transactional_id!r} took over ({error}), and "
            "the log could not be read to see how it ended; look at the output before you write it again"
        ) from error

    def abort(self, deadline: Deadline) -> None:
        """Returns when nothing of the transaction can become visible any more."""
        if self.state in (ProducerTxnState.FENCED, ProducerTxnState.FATAL):
            self._raise_if_failed()
        self._move(ProducerTxnEvent.ABORT)
        self.sender.wake()
        with self._offsets_turn(deadline):
            pass  # a late request must not follow the end
        if not self.sender.accumulator.flush(deadline, lambda: self.state is ProducerTxnState.FENCED):
            raise TimedOutError(
                f"records are still on their way after {deadline.total_s:.3g} s; call abort_transaction() again"
            )
        if self.state is ProducerTxnState.FENCED:
            self._raise_if_failed()
        if not self._touched:
            self._ended(ProducerTxnEvent.ABORTED, self._identity)
            return
        assert self._identity is not None
        identity, self._needs_epoch = self._identity, True
        try:
            response = self._end(self._identity, False, deadline)
            identity, self._needs_epoch = response.identity, self.generation == 1
        except EndUnknownError as error:
            self._end_maybe_sent = self._end_maybe_sent or error.maybe_sent
            raise TimedOutError(f"{error}; call abort_transaction() again") from error
        except KafkaError as error:
            if error.code not in NOT_OPEN:
                self.failed(error if error.recovery is Recovery.FENCED else FatalError(str(error), error.code))
                raise
        self._ended(ProducerTxnEvent.ABORTED, identity)

    # --- state ---

    def _ended(self, event: ProducerTxnEvent, identity: Identity | None) -> None:
        with self._lock:
            self._identity = identity
            self._end_maybe_sent = False
            self.error = None
            self.state = after(self.state, event)

    def _move(self, event: ProducerTxnEvent) -> None:
        with self._lock:
            self.state = after(self.state, event)

    def _move_if_allowed(self, event: ProducerTxnEvent) -> None:
        with self._lock:
            if allows(self.state, event):
                self.state = after(self.state, event)

    def _raise_if_failed(self) -> None:
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
