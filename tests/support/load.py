"""A steady idempotent load by confluent-kafka, and a check: nothing acknowledged is lost, doubled or out of order."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

from confluent_kafka import KafkaError, Producer

from tests.support.reading import read_values
from tests.support.waiting import PATIENCE_S

AT_ONCE, PAUSE_S = 60, 0.02  # as fast as it can would take a core from the broker
WAITING_MAX = 2_000  # records that are not acknowledged


class Load:
    """Produces numbered values into all partitions until it is stopped; remembers what was acknowledged, and where."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, **settings: Any) -> None:
        self.topic, self.partitions = topic, partitions
        self.acknowledged: dict[bytes, tuple[int, int]] = {}  # value -> (partition, offset)
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._more = threading.Condition()
        options = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 1,
            "delivery.timeout.ms": 120_000,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "log_level": 0,
        }
        self._producer = Producer({**options, **settings})
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def wait_for(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Until so many more records were acknowledged."""
        with self._more:
            goal = len(self.acknowledged) + count
            done = self._more.wait_for(lambda: len(self.acknowledged) >= goal or self.failures, timeout_s)
        assert done, f"only {len(self.acknowledged)} of {goal} records were acknowledged within {timeout_s} s"

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Stops producing and waits for the last acknowledgement."""
        self._stop.set()
        self._thread.join(timeout_s)
        left = self._producer.flush(timeout_s)
        assert left == 0, f"{left} records were still not acknowledged after {timeout_s} s"

    def _run(self) -> None:
        for first in itertools.count(0, AT_ONCE):
            if self._stop.is_set():
                return
            for number in range(first, first + AT_ONCE):
                value = b"%08d" % number
                self._producer.produce(
                    self.topic, value, partition=number % self.partitions, on_delivery=self._delivered
                )
            self._stop.wait(PAUSE_S)
            self._producer.poll(0)
            while len(self._producer) > WAITING_MAX and not self._stop.is_set():
                self._producer.poll(PAUSE_S)

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        with self._more:
            if error is None:
                self.acknowledged[message.value()] = (message.partition(), message.offset())
            else:
                self.failures.append(str(error))
            self._more.notify_all()


def violations(load: Load, bootstrap: str) -> list[str]:
    """What is wrong with the topic after a load; empty if all is well."""
    by_partition: dict[int, list[bytes]] = defaultdict(list)
    for partition, _, value in read_values(bootstrap, load.topic):
        by_partition[partition].append(value or b"")
    counts = Counter(value for values in by_partition.values() for value in values)
    found = [f"{value!r} was acknowledged and is lost" for value in load.acknowledged if value not in counts]
    found += [f"{value!r} is there {count} times" for value, count in counts.items() if count > 1]
    for partition, values in by_partition.items():
        found += [
            f"partition {partition}: {late!r} comes after {early!r}" for early, late in pairwise(values) if late < early
        ]
    return found
