"""A reader that runs all the time, as a consumer of the output would, and notes what it saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from semel.prove.checker.reading import CheckerError, Place, Seen, ends, open_consumer, partitions_of, seen_of, settings

SAMPLE_INTERVAL_S = 0.25


@dataclass
class Observation:
    """What the watcher saw, in the order in which it saw it."""

    records: list[Seen] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # monotonic, one for each record
    ends: list[tuple[float, bool, dict[Place, int]]] = field(default_factory=list)  # when, stable or not, where
    out_of_range: list[tuple[Place, str]] = field(default_factory=list)  # it had read further than the log went


class Watcher:
    """Reads topics from their start until it is stopped; also samples how far their ends are.

    `committed=False` makes it a reader that does not care for transactions, to show what the checker says of one.
    """

    def __init__(self, brokers: str, topics: Iterable[str], *, committed: bool = True) -> None:
        self._brokers = brokers
        self._places = partitions_of(brokers, topics)
        self._committed = committed
        self._done = threading.Event()
        self.observation = Observation()
        self._threads = [
            threading.Thread(target=work, name=f"watcher-{name}", daemon=True)
            for name, work in (("records", self._read), ("ends", self._sample))
        ]

    def start(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> Observation:
        """What was seen. May be called twice."""
        self._done.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(30)
        return self.observation

    def __enter__(self) -> Watcher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for(self, count: int, timeout_s: float = 30.0) -> bool:
        """Until so many records were seen."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.observation.records) < count and time.monotonic() < deadline_s:
            self._done.wait(0.02)
        return len(self.observation.records) >= count

    def _read(self) -> None:
        consumer = open_consumer(self._brokers, self._committed, **{"enable.partition.eof": False})
        try:
            consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in self._places])
            while not self._done.is_set():
                self._take(consumer)
        finally:
            consumer.close()

    def _take(self, consumer: Consumer) -> None:
        messages: list[Any] = consumer.consume(500, 0.1)
        for message in messages:
            error = message.error()
            if error is None:
                self.observation.times_s.append(time.monotonic())
                self.observation.records.append(seen_of(message))  # last: who reads along counts these
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                self.observation.out_of_range.append(((message.topic(), message.partition()), error.str()))

    def _sample(self) -> None:
        admin = AdminClient(settings(self._brokers))
        while not self._done.wait(SAMPLE_INTERVAL_S):
            for stable in (False, True):
                try:
                    found = ends(self._brokers, self._places, stable=stable, timeout_s=5, admin=admin)
                except CheckerError:  # the broker is down; that is somebody's fault, not a violation
                    admin = AdminClient(settings(self._brokers))  # the old one would not find it again
                    continue
                self.observation.ends.append((time.monotonic(), stable, found))
