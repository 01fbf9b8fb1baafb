"""The transaction calls of a producer: sends their requests, waits for what must come before them, and tells the state
machine in `transaction.py` how they ended. Threads may share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from semel.client.errors import FencedError, IllegalStateError, KafkaError, TimedOutError
from semel.client.log_reading import find_decision
from semel.client.producer.batches import Identity
from semel.client.producer.coordinator import CoordinatorClient, EndAnswer, EndUnknownError
from semel.client.producer.sender import Sender
from semel.client.producer.transaction import TransactionCore
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata


class TransactionCalls:
    """What users call. The sender's lock guards the state; requests are sent without it."""

    def __init__(self, transaction: TransactionCore, coordinator: CoordinatorClient, sender: Sender) -> None:
        self.transaction = transaction
        self.coordinator = coordinator
        self._sender = sender
        self._core = sender.core
        self._changed = sender.changed  # with the lock that guards the state

    @property
    def state(self) -> ProducerTxnState:
        return self.transaction.state

    def init(self, timeout_s: float) -> None:
        """Owns the transactional id: earlier owners are fenced, what they left open is finished."""
        deadline = Deadline(timeout_s)
        try:
            with self._changed:
                self.transaction.init()
            generation = self.coordinator.generation(deadline.remaining_s())
            identity = self.coordinator.init(deadline.remaining_s())
            with self._changed:
                self.transaction.initialized(identity, generation)
        except IllegalStateError:
            raise
        except BaseException as error:  # Ctrl-C too: the next call starts over
            with self._changed:
                self.transaction.init_failed(error)
            raise

    def begin(self, timeout_s: float) -> None:
        with self._changed:
            stale = self.transaction.begin()
        if stale is not None:
            self._renew(stale, timeout_s)
        with self._changed:
            self.transaction.began()

    def _renew(self, stale: Identity, timeout_s: float) -> None:
        try:
            identity = self.coordinator.init(timeout_s, stale)
        except FencedError as error:
            with self._changed:
                self.transaction.failed(error)
            raise
        with self._changed:
            self.transaction.renewed(identity)

    def send_offsets(
        self, offsets: Mapping[tuple[str, int], OffsetAndMetadata], group: GroupMetadata, timeout_s: float
    ) -> None:
        if not offsets:
            self.transaction.check_accepts()
            return
        with self._changed:
            identity = self.transaction.add_offsets()
        failure: KafkaError | None = None
        try:
            self.coordinator.commit_offsets(identity, group, offsets, self.transaction.generation, timeout_s)
        except KafkaError as error:
            failure = error
            raise
        finally:
            with self._changed:
                self.transaction.offsets_ended(failure)
                self._changed.notify_all()

    # --- commit ---
    def commit(self, deadline: Deadline) -> None:
        """Returns when the transaction is committed for certain."""
        identity = self._deliver_all(deadline)
        if identity is None:  # the coordinator knows nothing of it
            with self._changed:
                self.transaction.committed()
            return
        try:
            response = self._end(identity, True, deadline)
        except EndUnknownError as error:
            with self._changed:
                failure = self.transaction.commit_unknown(error.maybe_sent, str(error), deadline.total_s)
            raise failure from error
        except KafkaError as error:
            self._commit_refused(error, deadline)
            return
        with self._changed:
            self.transaction.committed(response.identity, response.was_repeated)

    def _deliver_all(self, deadline: Deadline) -> Identity | None:
        """Waits until the broker has every record and offset; whose transaction is to be ended then."""
        with self._changed:
            self._core.commit(self.transaction)
            if self.transaction.end_maybe_sent:  # everything was delivered before
                return self.transaction.end_request()
            try:
                self._sender.wake()
                delivered = self._wait(lambda: self.state is not ProducerTxnState.COMMITTING, deadline)
                self.transaction.raise_if_failed()
                if not delivered:
                    raise TimedOutError(
                        f"the transaction's records were not all acknowledged within {deadline.total_s:.3g} s, so "
                        "nothing was committed; call commit_transaction() again, or abort_transaction()"
                    )
                return self._core.end_request(self.transaction)
            except BaseException:  # Ctrl-C too: nothing was committed, so an abort is possible again
                self.transaction.commit_not_sent()
                raise

    def _wait(self, is_over: Callable[[], bool], deadline: Deadline) -> bool:
        """Until nothing of the transaction is on its way any more, or `is_over`; whether that came in time."""
        core = self._core
        return self._changed.wait_for(lambda: core.is_drained(self.transaction) or is_over(), deadline.remaining_s())

    def _end(self, identity: Identity, commit: bool, deadline: Deadline) -> EndAnswer:
        transaction = self.transaction
        try:
            return self.coordinator.end(identity, commit, transaction.generation, deadline, transaction.end_maybe_sent)
        except Exception:
            raise  # it says what may have been sent
        except BaseException:  # Ctrl-C
            with self._changed:
                transaction.end_maybe_sent = True
            raise

    def _commit_refused(self, error: KafkaError, deadline: Deadline) -> None:
        """Raises, unless an earlier try of this commit turns out to have worked."""
        with self._changed:
            failure = self.transaction.commit_refused(error, getattr(error, "was_repeated", False))
            written, identity = self.transaction.first_write(), self.transaction.end_request()
        if failure is not None:
            raise failure
        is_committed = None
        if written is not None and identity is not None:
            is_committed = find_decision(self.coordinator.cluster, *written, identity.producer_id, deadline)
        with self._changed:
            failure = self.transaction.commit_found(is_committed, error)
        if failure is not None:
            raise failure from error

    # --- abort ---
    def abort(self, deadline: Deadline) -> None:
        """Returns when nothing of the transaction can become visible any more."""
        identity = self._stop_sending(deadline)
        if identity is None:
            with self._changed:
                self.transaction.aborted()
            return
        answered: Identity | None = None
        try:
            answered = self._end(identity, False, deadline).identity
        except EndUnknownError as error:
            with self._changed:
                self.transaction.abort_unknown(error.maybe_sent)
            raise TimedOutError(f"{error}; call abort_transaction() again") from error
        except KafkaError as error:
            with self._changed:
                if self.transaction.abort_refused(error):
                    raise
        with self._changed:
            self.transaction.aborted(answered)

    def _stop_sending(self, deadline: Deadline) -> Identity | None:
        """Waits for what is on its way; whose transaction is to be ended then."""
        with self._changed:
            self._core.abort(self.transaction)
            self._changed.notify_all()
            self._sender.wake()
            if not self._wait(lambda: self.state is ProducerTxnState.FENCED, deadline):
                raise TimedOutError(
                    f"records are still on their way after {deadline.total_s:.3g} s; call abort_transaction() again"
                )
            if self.state is ProducerTxnState.FENCED:
                self.transaction.raise_if_failed()
            identity = self._core.end_request(self.transaction)
            if identity is not None:
                self.transaction.aborting()
            return identity
