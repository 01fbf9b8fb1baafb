"""kill -9 of the broker under idempotent and transactional load: nothing lost, nothing twice, nothing torn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel.client.errors import AbortableError
from semel.client.producer import Producer
from semel.local.apache_kafka import ApacheKafka, quick_jvm
from semel.local.brokers import SemelBroker
from tests.support.broker import KAFKA_IN_FULL
from tests.support.reading import create_topic, read_topic

Broker = SemelBroker | ApacheKafka


@pytest.fixture(params=["semel", KAFKA_IN_FULL])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker for this test alone."""
    broker: Broker = (
        SemelBroker(tmp_path / "b") if request.param == "semel" else ApacheKafka(tmp_path / "b", jvm=quick_jvm())
    )
    with broker:
        yield broker


class Load:
    """Runs a piece of work again and again in a thread until it is stopped."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self.rounds = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._work(self.rounds)
                with self._progress:
                    self.rounds += 1
                    self._progress.notify_all()
        except BaseException as error:
            self.error = error
            with self._progress:
                self._progress.notify_all()

    def wait_for(self, more: int, timeout_s: float = 90) -> None:
        """Until so many more rounds are done."""
        with self._progress:
            goal = self.rounds + more
            assert self._progress.wait_for(lambda: self.error or self.rounds >= goal, timeout_s), self.rounds
        if self.error is not None:
            raise self.error

    def finish(self, timeout_s: float = 90) -> None:
        self._stop.set()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def test_a_killed_broker_loses_and_doubles_nothing(mortal: Broker) -> None:
    plain = create_topic(mortal.bootstrap, "plain", partitions=3)
    atomic = create_topic(mortal.bootstrap, "atomic", partitions=3)
    options = {"bootstrap_servers": mortal.bootstrap, "linger_ms": 1, "batch_size": 2000}
    committed: list[int] = []
    kills = 0

    def write(number: int) -> None:
        deliveries = [idempotent.send(plain, b"%d-%d" % (number, i), partition=i % 3) for i in range(60)]
        for delivery in deliveries:
            delivery.result(timeout_ms=90_000)

    def write_transaction(number: int) -> None:
        try:
            with transactional.transaction() as txn:
                for i in range(30):
                    txn.send(atomic, b"%d-%d" % (number, i), partition=i % 3)
        except AbortableError:
            return  # said to be aborted: it must not be seen
        committed.append(number)

    with Producer(options) as idempotent, Producer(options, transactional_id="mortal") as transactional:
        transactional.init_transactions(timeout_ms=60_000)
        loads = [Load(write), Load(write_transaction)]
        for _ in range(2):
            for load in loads:
                load.wait_for(5)
            mortal.kill()
            kills += 1
            mortal.restart()
        for load in loads:
            load.wait_for(3)
            load.finish()
        with transactional.transaction() as txn:
            txn.send(atomic, b"last", partition=0)
    assert kills == 2
    seen = [row.value for row in read_topic(mortal.bootstrap, plain)]
    assert sorted(seen) == sorted(b"%d-%d" % (n, i) for n in range(loads[0].rounds) for i in range(60))
    seen = [row.value for row in read_topic(mortal.bootstrap, atomic)]
    assert sorted(seen) == sorted([b"last", *(b"%d-%d" % (n, i) for n in committed for i in range(30))])
    for partition in range(3):
        rows = [row.value for row in read_topic(mortal.bootstrap, plain) if row.partition == partition]
        assert rows == [b"%d-%d" % (n, i) for n in range(loads[0].rounds) for i in range(60) if i % 3 == partition]
