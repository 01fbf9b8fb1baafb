"""The producer of a demo: transactions of a few records at a steady pace, some of them aborted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from itertools import islice

from semel.client.errors import KafkaError
from semel.client.producer import Producer
from semel.demo.workloads import Event, Workload

PER_TRANSACTION = 20
ABORTED = 0.08  # share of transactions that the producer takes back
BACKOFF_S = 0.2


class Feeder(threading.Thread):
    """Runs until `finish`. An id is never sent twice: what became of a failed transaction need not be known."""

    def __init__(self, brokers: str, topic: str, workload: Workload, seed: int, per_s: float) -> None:
        super().__init__(name="feeder", daemon=True)
        self._options = {
            "bootstrap_servers": brokers,
            "transactional_id": f"{topic}.producer",
            "transaction_timeout_ms": 10_000,
            "linger_ms": 0,
        }
        self._topic = topic
        self._workload = workload
        self._rng = random.Random(seed)
        self._per_s = per_s
        self._started_ms = int(time.time()) * 1000
        self._events: Iterator[Event] = workload.events(random.Random(seed + 1), self._started_ms, per_s)
        self._produced = 0
        self._ending = threading.Event()
        self.committed = self.aborted = self.failed = 0  # records
        self.error: BaseException | None = None

    def finish(self, timeout_s: float = 30.0) -> None:
        """Sends what closes the input and returns when it is committed."""
        self._ending.set()
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"the producer did not finish within {timeout_s} s")

    def run(self) -> None:
        try:
            while not self._with_one_producer():
                time.sleep(BACKOFF_S)
        except BaseException as error:
            self.error = error

    def _with_one_producer(self) -> bool:
        """Until it is told to stop (True), or the producer is of no more use."""
        with Producer(self._options) as producer:
            try:
                producer.init_transactions()
                while not self._ending.wait(self._due_in_s()):
                    self._transaction(producer, list(islice(self._events, PER_TRANSACTION)))
                self._close(producer)
            except KafkaError:
                return False
        return True

    def _due_in_s(self) -> float:
        due_ms = self._started_ms + (self._produced + PER_TRANSACTION) * 1000 / self._per_s
        return max(0.001, min(1.0, due_ms / 1000 - time.time()))

    def _close(self, producer: Producer) -> None:
        closing = self._workload.closing(self._started_ms, self._produced, self._per_s)
        if closing:
            self._transaction(producer, closing, may_abort=False)

    def _transaction(self, producer: Producer, events: list[Event], may_abort: bool = True) -> None:
        self._produced += len(events)
        aborts = may_abort and self._rng.random() < ABORTED
        try:
            producer.begin_transaction()
            for event in events:
                producer.send(self._topic, event.value, event.key)
            producer.abort_transaction() if aborts else producer.commit_transaction()
        except KafkaError:
            self.failed += len(events)
            raise
        if aborts:
            self.aborted += len(events)
        else:
            self.committed += len(events)
