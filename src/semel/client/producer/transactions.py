"""The transaction calls of a producer: they send requests, wait for what must come before them, and report to the state
machine in `transaction.py` how they ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.client.errors import FencedError, IllegalStateError, KafkaError, TimedOutError
from semel.client.log_view import find_decision
from semel.client.producer.batches import Identity
from semel.client.producer.coordinator import CoordinatorCalls, EndResult, EndUnknownError
from semel.client.producer.sending import BatchSender
from semel.client.producer.transaction import PreparedTransaction, TransactionCore
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.timing import Deadline
from semel.client.types import CheckedOffsets, GroupMetadata


class TransactionCalls:
    """What users call, over the connections of any driver. The sender's lock guards the state; requests are sent
    without it. A call that is interrupted (Ctrl-C, a cancelled task) leaves a state from which the producer goes on."""

    def __init__(self, transaction: TransactionCore, coordinator: CoordinatorCalls, sender: BatchSender[Any]) -> None:
        self.transaction = transaction
        self.coordinator = coordinator
        self._sender = sender
        self._core = sender.core
        self._changed = sender.changed  # with the lock that guards the state

    @property
    def state(self) -> ProducerTxnState:
        return self.transaction.state

    async def init(self, timeout_s: float, keep_prepared: bool = False) -> PreparedTransaction | None:
        """Owns the transactional id: earlier owners are fenced. What they left open is finished, or with
        `keep_prepared` kept and returned."""
        deadline = Deadline(timeout_s)
        try:
            with self._changed:
                self.transaction.init()
            generation = await self.coordinator.generation(deadline.remaining_s())
            ongoing: Identity | None = None
            if keep_prepared:
                identity, ongoing = await self.coordinator.init_keeping(deadline.remaining_s())
            else:
                identity = await self.coordinator.init(deadline.remaining_s())
            with self._changed:
                if ongoing is not None:
                    return self.transaction.kept(identity, ongoing, generation)
                self.transaction.initialized(identity, generation)
                return None
        except IllegalStateError:
            raise
        except BaseException as error:  # Ctrl-C too: the next call starts over
            with self._changed:
                self.transaction.init_failed(error)
            raise

    async def begin(self, timeout_s: float) -> None:
        with self._changed:
            stale = self.transaction.begin()
        if stale is not None:
            await self._renew(stale, timeout_s)
        with self._changed:
            self.transaction.began()

    async def _renew(self, stale: Identity, timeout_s: float) -> None:
        try:
            identity = await self.coordinator.init(timeout_s, stale)
        except FencedError as error:
            with self._changed:
                self.transaction.failed(error)
            raise
        with self._changed:
            self.transaction.renewed(identity)

    async def send_offsets(self, offsets: CheckedOffsets, group: GroupMetadata, timeout_s: float) -> None:
        if not offsets:
            self.transaction.check_accepts()
            return
        request, failure = object(), None
        try:
            with self._changed:
                identity = self.transaction.add_offsets(request)
            await self.coordinator.commit_offsets(identity, group, offsets, self.transaction.generation, timeout_s)
        except BaseException as error:  # Ctrl-C, too
            failure = error
            raise
        finally:
            if request in self.transaction.offset_requests:
                try:
                    self._offsets_ended(group, failure, request)
                except BaseException:  # Ctrl-C came within: the end of the transaction would wait for good
                    self._offsets_ended(group, failure, request)
                    raise

    def _offsets_ended(self, group: GroupMetadata, failure: BaseException | None, request: object) -> None:
        with self._changed:
            self.transaction.offsets_ended(group.group_id, failure, request)
            self._changed.notify_all()

    # --- prepare ---
    async def prepare(self, deadline: Deadline) -> PreparedTransaction:
        """Returns when the broker has everything of the transaction, which then only waits for its end."""
        with self._changed:
            self._core.prepare(self.transaction)
            try:
                self._sender.wake()
                delivered = await self._wait(lambda: self.state is not ProducerTxnState.PREPARING, deadline)
                self.transaction.raise_if_failed()
                if not delivered:
                    raise TimedOutError(
                        f"the transaction's records were not all acknowledged within {deadline.total_s:.3g} s, so it "
                        "is not prepared; call prepare_transaction() again, or abort_transaction()"
                    )
                return self.transaction.is_prepared()
            except BaseException:  # Ctrl-C too: records may be added again
                self.transaction.not_prepared()
                raise

    async def complete(self, decided: PreparedTransaction | None, deadline: Deadline) -> bool:
        """Commits the prepared transaction if it is the decided one, else aborts it; whether it was committed."""
        with self._changed:
            is_to_commit = self.transaction.is_to_commit(decided)
        await (self.commit(deadline) if is_to_commit else self.abort(deadline))
        return is_to_commit

    # --- commit ---
    async def commit(self, deadline: Deadline) -> None:
        """Returns when the transaction is committed for certain."""
        identity = await self._deliver_all(deadline)
        if identity is None:  # the coordinator knows nothing of it
            with self._changed:
                self.transaction.committed()
            return
        try:
            response = await self._end(identity, True, deadline)
        except EndUnknownError as error:
            with self._changed:
                failure = self.transaction.commit_unknown(error.maybe_sent, str(error), deadline.total_s)
            raise failure from error
        except KafkaError as error:
            await self._commit_refused(error, deadline)
            return
        with self._changed:
            self.transaction.committed(response.identity, response.was_repeated)

    async def _deliver_all(self, deadline: Deadline) -> Identity | None:
        """Waits until the broker has every record and offset; whose transaction is to be ended then."""
        with self._changed:
            self._core.commit(self.transaction)
            if self.transaction.end_maybe_sent:  # everything was delivered before
                return self.transaction.end_request()
            try:
                self._sender.wake()
                delivered = await self._wait(lambda: self.state is not ProducerTxnState.COMMITTING, deadline)
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

    async def _wait(self, is_over: Callable[[], bool], deadline: Deadline) -> bool:
        """Until nothing of the transaction is on its way any more, or `is_over`; whether that came in time."""
        core = self._core
        return await self._sender.wait_until(
            lambda: core.is_drained(self.transaction) or is_over(), deadline.remaining_s()
        )

    async def _end(self, identity: Identity, commit: bool, deadline: Deadline) -> EndResult:
        transaction = self.transaction
        try:
            return await self.coordinator.end(
                identity, commit, transaction.generation, deadline, transaction.end_maybe_sent
            )
        except Exception:
            raise  # it says what may have been sent
        except BaseException:  # Ctrl-C
            with self._changed:
                transaction.end_maybe_sent = True
            raise

    async def _commit_refused(self, error: KafkaError, deadline: Deadline) -> None:
        """Raises, unless an earlier try of this commit turns out to have worked."""
        with self._changed:
            failure = self.transaction.commit_refused(error, getattr(error, "was_repeated", False))
            written, identity = self.transaction.first_write(), self.transaction.end_request()
        if failure is not None:
            raise failure
        is_committed = None
        if written is not None and identity is not None:
            is_committed = await find_decision(self.coordinator.cluster, *written, identity.producer_id, deadline)
        with self._changed:
            failure = self.transaction.commit_found(is_committed, error)
        if failure is not None:
            raise failure from error

    # --- abort ---
    async def abort(self, deadline: Deadline) -> None:
        """Returns when nothing of the transaction can become visible any more."""
        identity = await self._stop_sending(deadline)
        if identity is None:
            with self._changed:
                self.transaction.aborted()
            return
        ended: Identity | None = None
        try:
            ended = (await self._end(identity, False, deadline)).identity
        except EndUnknownError as error:
            with self._changed:
                self.transaction.abort_unknown(error.maybe_sent)
            raise TimedOutError(f"{error}; call abort_transaction() again") from error
        except KafkaError as error:
            with self._changed:
                if self.transaction.abort_refused(error):
                    raise
        with self._changed:
            self.transaction.aborted(ended)

    async def _stop_sending(self, deadline: Deadline) -> Identity | None:
        """Waits for what is on its way; whose transaction is to be ended then."""
        with self._changed:
            self._core.abort(self.transaction)
            self._changed.notify_all()
            self._sender.wake()
            if not await self._wait(lambda: self.state is ProducerTxnState.FENCED, deadline):
                raise TimedOutError(
                    f"records are still on their way after {deadline.total_s:.3g} s; call abort_transaction() again"
                )
            if self.state is ProducerTxnState.FENCED:
                self.transaction.raise_if_failed()
            identity = self._core.end_request(self.transaction)
            if identity is not None:
                self.transaction.aborting()
            return identity
