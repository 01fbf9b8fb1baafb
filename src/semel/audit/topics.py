"""The topics of an application, through confluent-kafka."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from semel.audit.entries import Place, Positions

CHUNK = 5_000
COORDINATOR_MOVES = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


class CannotLookError(Exception):
    """The cluster, or what is to be looked at, cannot be reached: nothing can be said. The message says what to do."""


class AuditedCluster:
    """A connection for looking only. `options` are librdkafka's, such as security.protocol."""

    def __init__(self, brokers: str, options: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
        self.brokers = brokers
        self.timeout_s = timeout_s
        self._settings: dict[str, Any] = {
            "bootstrap.servers": brokers,
            "log_level": 0,
            "reconnect.backoff.max.ms": 500,
            **(options or {}),
        }
        try:
            self._admin = AdminClient(self._settings)
        except KafkaException as error:
            raise CannotLookError(f"the options are wrong: {error.args[0].str()}") from error
        self._reader = self._open("semel-audit")

    def close(self) -> None:
        self._reader.close()

    def topics(self) -> dict[str, list[int]]:
        """Every topic with its partitions."""
        with self._trouble("its topics cannot be listed"):
            found = self._admin.list_topics(timeout=self.timeout_s).topics
        return {name: sorted(topic.partitions) for name, topic in found.items()}

    def is_compacted(self, topic: str) -> bool:
        """Whether records may go when newer ones have their key. Where the rights to ask are missing: no."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answer = self._admin.describe_configs([resource], request_timeout=self.timeout_s)[resource].result()
        except KafkaException:
            return False
        return "compact" in (answer["cleanup.policy"].value or "")

    def group_positions(self, group: str, places: Iterable[Place]) -> Positions:
        """Where a group stands; partitions without a position are left out."""
        wanted = [TopicPartition(*place) for place in places]
        if not wanted:
            return {}
        with closing(self._open(group)) as consumer, self._trouble(f"group {group} cannot be asked"):
            found = self._committed(consumer, wanted)
        return {
            (place.topic, place.partition): place.offset for place in found if place.offset >= 0 and not place.error
        }

    def _committed(self, consumer: Any, wanted: list[Any]) -> list[Any]:
        """Asks again while the group's coordinator is moving or starting."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                found: list[Any] = consumer.committed(wanted, timeout=max(0.1, deadline_s - time.monotonic()))
                return found
            except KafkaException as error:
                if error.args[0].code() not in COORDINATOR_MOVES or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    def ends(self, places: Iterable[Place]) -> dict[Place, tuple[int, int]]:
        """(first offset that is still there, end of what is decided) of partitions."""
        found = {}
        with self._trouble("the ends of partitions cannot be asked"):
            for place in places:
                low, high = self._reader.get_watermark_offsets(TopicPartition(*place), timeout=self.timeout_s)
                found[place] = (low, high)
        return found

    def records(self, place: Place, first: int, last: int) -> Iterator[Any]:
        """Committed records from one offset to another, both included."""
        self._reader.assign([TopicPartition(*place, first)])
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            for message in self._some():
                if self._passed(message, place, last):
                    return
                if message.error() is None:
                    deadline_s = time.monotonic() + self.timeout_s
                    yield message
            if time.monotonic() > deadline_s:
                raise CannotLookError(
                    f"{place[0]}-{place[1]} cannot be read up to offset {last}: nothing came for {self.timeout_s:.0f} "
                    "s. An open transaction may hold readers back (`semel txn list --state Ongoing`); or give more "
                    "time with --timeout"
                )

    def _some(self) -> list[Any]:
        """What is there, after waiting a moment for the first."""
        message = self._reader.poll(0.2)
        more: list[Any] = self._reader.consume(CHUNK, 0)
        return more if message is None else [message, *more]

    def _passed(self, message: Any, place: Place, last: int) -> bool:
        """Whether this is behind the last one that is wanted. Markers have offsets too, so an end can come instead."""
        error = message.error()
        if error is None:
            return bool(message.offset() > last)
        if error.code() == KafkaError._PARTITION_EOF:
            return bool(message.offset() > last)
        if not error.retriable() and error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            raise CannotLookError(f"{place[0]}-{place[1]} cannot be read: {error.str()}")
        return False

    def _open(self, group: str) -> Consumer:
        return Consumer(
            {
                "group.id": group,  # never joined: partitions are assigned by hand
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                **self._settings,
            }
        )

    @contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise CannotLookError(
                f"{self.brokers}: {what} ({error.args[0].str()}). Is the address right (--brokers), is a broker "
                "running there, are rights or security options missing (-X)?"
            ) from error


Range = tuple[int, int]  # first and last offset, both included


def count(cluster: AuditedCluster, place: Place, ranges: Sequence[Range]) -> tuple[list[int], int]:
    """(how many records each range holds, how many in between belong to none)."""
    firsts = [first for first, _ in ranges]
    found, foreign = [0] * len(ranges), 0
    for message in cluster.records(place, min(firsts), max(last for _, last in ranges)):
        at = bisect_right(firsts, message.offset()) - 1
        if at >= 0 and message.offset() <= ranges[at][1]:
            found[at] += 1
        else:
            foreign += 1
    return found, foreign
