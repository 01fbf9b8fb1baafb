"""A program that writes transactions, one after the other, and knows how each of them ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.client.errors import CommitUncertainError, FencedError, KafkaError, error_of
from semel.client.producer.batches import Identity
from semel.client.producer.transaction import TransactionCore
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.wire import Pending
from semel.protocol.api import Api
from semel.protocol.errors import Recovery
from semel.protocol.messages.transactions import END_TXN, INIT_PRODUCER_ID, EndTxnRequest, InitProducerIdRequest
from tests.simulation.producer_process import ProducerProcess
from tests.simulation.world import PARTITIONS, World

TRANSACTION_TIMEOUT_MS = 20_000
RETRY_S = 0.02
TV2 = {"produce": 12, "end": 5}


class TransactionalProcess(ProducerProcess):
    """Writes `count` transactions of TV2. `committed` and `aborted` have the values of those whose end is certain."""

    init_version = 5

    def __init__(self, world: World, transactional_id: str, name: str, count: int, **options: Any) -> None:
        self.transaction = TransactionCore(transactional_id)
        super().__init__(world, identity=self.transaction, transactional_id=transactional_id, **options)
        self.produce_version = TV2["produce"]
        self.committed: list[bytes] = []
        self.aborted: list[bytes] = []
        self.unknown: list[bytes] = []
        self.fenced = False
        self._id = transactional_id
        self._name = name
        self._left = count
        self._values: list[bytes] = []
        self._step: Callable[[], None] = self._init
        self._waits_for_response = False
        self._resumes_s = 0.0

    @property
    def is_over(self) -> bool:
        return self.fenced or not self._left

    def next_event_s(self) -> float:
        due_s = super().next_event_s()
        return due_s if self._waits_for_response or self.is_over else min(due_s, self._resumes_s)

    def run(self) -> None:
        super().run()
        if not self.is_over and not self._waits_for_response and self._world.now_s >= self._resumes_s:
            self._resumes_s = self._world.now_s + RETRY_S
            try:
                self._step()
            except FencedError:
                self._be_fenced()
            super().run()

    def _be_fenced(self) -> None:
        """The coordinator aborts what was open, or has."""
        self._world.note(f"{self._name} is fenced")
        self.aborted += self._values
        self._values, self.fenced = [], True

    def _call(self, api: Api[Any, Any], request: Any, version: int, then: Callable[[Any], None]) -> None:
        """`then` gets the response, or the error if there is none."""
        if not self._client.connect():
            return

        def settle(pending: Pending) -> None:
            self._waits_for_response = False
            try:
                response = pending.result()
                if response.error_code:
                    raise error_of(response.error_code, api.name)
            except KafkaError as error:
                response = error
            try:
                then(response)
            except FencedError:
                self._be_fenced()

        self._waits_for_response = True
        self._client.send(api, request, version, 2.0, settle)

    # --- steps ---

    def _init(self) -> None:
        if self.transaction.state is ProducerTxnState.UNINITIALIZED:
            self.transaction.init()
        self._call(INIT_PRODUCER_ID, self._init_request(), self.init_version, self._initialized)

    def _init_request(self, stale: Identity | tuple[()] = ()) -> InitProducerIdRequest:
        return InitProducerIdRequest(self._id, TRANSACTION_TIMEOUT_MS, *stale)

    def _initialized(self, response: Any) -> None:
        if not isinstance(response, KafkaError):
            self.transaction.initialized(Identity(response.producer_id, response.producer_epoch), 2)
            self._step = self._begin
        elif response.recovery is not Recovery.RETRY:
            raise AssertionError(f"init_transactions failed: {response}")

    def _begin(self) -> None:
        stale = self.transaction.begin()
        if stale is None:
            self.transaction.began()
            self._step = self._write
            return
        self._call(INIT_PRODUCER_ID, self._init_request(stale), self.init_version, self._renewed)

    def _renewed(self, response: Any) -> None:
        if isinstance(response, FencedError):
            self.transaction.failed(response)
            raise response
        if not isinstance(response, KafkaError):
            self.transaction.renewed(Identity(response.producer_id, response.producer_epoch))

    def _write(self) -> None:
        rng, wanted = self._world.rng, self._world.rng.randrange(1, 8)
        try:
            for _ in range(wanted):
                value = b"%s-%d-%d" % (self._name.encode(), self._left, len(self._values))
                if not self.send(rng.randrange(PARTITIONS), value):
                    return
                self._values.append(value)
            if rng.random() < 0.5:
                return  # more later
            if rng.random() < 0.8:
                self._all_written()
            else:
                self._abort()
        except FencedError:
            raise
        except KafkaError:
            self._abort()

    def _all_written(self) -> None:
        self.core.commit(self.transaction)
        self._step = self._deliver

    def _deliver(self) -> None:
        if self.transaction.state is not ProducerTxnState.COMMITTING:
            self._abort()
        elif self.core.is_drained(self.transaction):
            self._step = self._commit

    def _commit(self) -> None:
        identity = self.core.end_request(self.transaction)
        if identity is None:
            self.transaction.committed()
            self._ended(self.committed)
            return
        self._call(END_TXN, EndTxnRequest(self._id, *identity, True), TV2["end"], self._commit_ended)

    def _commit_ended(self, response: Any) -> None:
        transaction = self.transaction
        if not isinstance(response, KafkaError):
            transaction.committed(Identity(response.producer_id, response.producer_epoch), transaction.end_maybe_sent)
            self._ended(self.committed)
        elif getattr(response, "maybe_sent", False):
            assert isinstance(transaction.commit_unknown(True, str(response), 2.0), CommitUncertainError)
        elif response.recovery is not Recovery.RETRY:
            if transaction.commit_refused(response, transaction.end_maybe_sent) is None:
                self.unknown, self._values = self._values, []  # the log would show it
                raise FencedError(str(response), response.code)
            if transaction.state is ProducerTxnState.FENCED:
                raise FencedError(str(response), response.code)
            self._abort()

    def _abort(self) -> None:
        self.core.abort(self.transaction)
        self._step = self._finish_abort

    def _finish_abort(self) -> None:
        if self.transaction.state is ProducerTxnState.FENCED:
            self.transaction.raise_if_failed()
        if not self.core.is_drained(self.transaction):
            return
        identity = self.core.end_request(self.transaction)
        if identity is None:
            self.transaction.aborted()
            self._ended(self.aborted)
            return
        self.transaction.aborting()
        self._call(END_TXN, EndTxnRequest(self._id, *identity, False), TV2["end"], self._abort_ended)

    def _abort_ended(self, response: Any) -> None:
        if not isinstance(response, KafkaError):
            self.transaction.aborted(Identity(response.producer_id, response.producer_epoch))
        elif response.recovery is Recovery.RETRY:
            self.transaction.abort_unknown(getattr(response, "maybe_sent", False))
            return
        elif self.transaction.abort_refused(response):
            raise FencedError(str(response), response.code)
        else:
            self.transaction.aborted()
        self._ended(self.aborted)

    def _ended(self, where: list[bytes]) -> None:
        self._world.note(f"{self._name} {'committed' if where is self.committed else 'aborted'} {len(self._values)}")
        where += self._values
        self._values = []
        self._left -= 1
        self._step = self._begin
