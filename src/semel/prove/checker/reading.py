"""Topics, groups and their positions, through confluent-kafka."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

READ_TIMEOUT_S = 60.0
KNOWN_TIMEOUT_S = 20.0  # until a node knows a topic that was created
Place = tuple[str, int]


class CheckerError(Exception):
    """The checker could not look: no verdict is possible."""


class Seen(NamedTuple):
    """A record as a reader got it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


def settings(brokers: str, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": brokers, "log_level": 0, "reconnect.backoff.max.ms": 500, **more}


def open_consumer(brokers: str, committed: bool, **more: Any) -> Consumer:
    return Consumer(
        settings(
            brokers,
            **{
                "group.id": "semel-checker",  # never joined: partitions are assigned by hand
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": 50,
                **more,
            },
        )
    )


def seen_of(message: Any) -> Seen:
    headers = tuple((name, value) for name, value in message.headers() or ())
    return Seen(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers,
    )


def known_topics(brokers: str, timeout_s: float = 20.0) -> Any:
    """Name -> metadata, of all topics; CheckerError if nobody answers."""
    try:
        return AdminClient(settings(brokers)).list_topics(timeout=timeout_s).topics
    except KafkaException as error:
        raise CheckerError(f"{brokers} does not answer: {error.args[0].str()}") from error


def partitions_of(brokers: str, topics: Iterable[str], timeout_s: float = 20.0) -> list[Place]:
    """All partitions of the topics; CheckerError if one is not there."""
    wanted = list(topics)
    found = known_topics(brokers, timeout_s)
    missing = [topic for topic in wanted if topic not in found]
    if missing:
        raise CheckerError(f"{brokers} has no topic {', '.join(missing)}")
    return [(topic, partition) for topic in wanted for partition in sorted(found[topic].partitions)]


def topics_like(brokers: str, prefix: str, timeout_s: float = 20.0) -> list[str]:
    """The topics whose names begin so."""
    return sorted(name for name in known_topics(brokers, timeout_s) if name.startswith(prefix))


def create_topics(brokers: str, topics: Mapping[str, int], **config: str) -> None:
    """Name -> partitions. Returns when every one can be used: a node may hear of a topic after it was created."""
    admin = AdminClient(settings(brokers))
    new = [NewTopic(name, partitions, -1, config=config) for name, partitions in topics.items()]
    try:
        for future in admin.create_topics(new).values():
            future.result(30)
    except KafkaException as error:
        raise CheckerError(f"a topic could not be created: {error.args[0].str()}") from error
    _wait_until_known(brokers, set(topics))


def _wait_until_known(brokers: str, topics: set[str]) -> None:
    deadline_s = time.monotonic() + KNOWN_TIMEOUT_S
    while missing := topics - set(known_topics(brokers)):
        if time.monotonic() > deadline_s:
            names = ", ".join(sorted(missing))
            raise CheckerError(f"{brokers} has created {names}, and does not know it {KNOWN_TIMEOUT_S:.0f} s later")
        time.sleep(0.05)


def delete_topics(brokers: str, topics: Iterable[str]) -> None:
    admin = AdminClient(settings(brokers))  # held until the answers are there
    try:
        for future in admin.delete_topics(list(topics)).values():
            future.result(30)
    except KafkaException as error:
        raise CheckerError(f"a topic could not be deleted: {error.args[0].str()}") from error


def read(
    brokers: str, topics: Iterable[str], *, committed: bool = True, timeout_s: float = READ_TIMEOUT_S
) -> list[Seen]:
    """All records of the topics, each partition in order, up to its end now (the last stable offset, if committed)."""
    places = partitions_of(brokers, topics)
    if not places:
        return []
    consumer = open_consumer(brokers, committed)
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in places])
        records = _read_to_the_end(consumer, len(places), time.monotonic() + timeout_s)
    finally:
        consumer.close()
    return sorted(records, key=lambda seen: seen[:3])


def _read_to_the_end(consumer: Consumer, partitions: int, deadline_s: float) -> list[Seen]:
    seen: list[Seen] = []
    ended: set[Place] = set()
    while len(ended) < partitions:
        if time.monotonic() > deadline_s:
            raise CheckerError(f"only {len(ended)} of {partitions} partitions could be read to their end in time")
        messages: list[Any] = consumer.consume(1_000, 0.1)
        for message in messages:
            error = message.error()
            if error is None:
                seen.append(seen_of(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add((message.topic(), message.partition()))
            elif error.fatal() or not _passes(error):
                raise CheckerError(f"{message.topic()}-{message.partition()} cannot be read: {error.str()}")
    return seen


def _passes(error: KafkaError) -> bool:
    """Errors of a broker that is coming back."""
    return bool(error.retriable()) or error.code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


def ends(
    brokers: str, places: Iterable[Place], *, stable: bool, timeout_s: float = 10.0, admin: AdminClient | None = None
) -> dict[Place, int]:
    """The last stable offset of each partition, or the high watermark. CheckerError if there is no answer.

    Who asks often passes its own `admin`: a client costs several threads.
    """
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, partition): latest for topic, partition in places}
    level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
    client = AdminClient(settings(brokers)) if admin is None else admin  # held until the answers are there
    futures = client.list_offsets(wanted, isolation_level=level, request_timeout=timeout_s)
    try:
        found = {place: future.result(timeout_s + 5).offset for place, future in futures.items()}
    except (KafkaException, TimeoutError) as error:
        raise CheckerError(f"the ends of partitions cannot be read: {error}") from error
    if any(offset < 0 for offset in found.values()):  # a client that knows an older leader epoch is told nothing
        raise CheckerError(f"the ends of partitions are not known to this client: {found}")
    return {(place.topic, place.partition): offset for place, offset in found.items()}


def group_positions(brokers: str, group: str, places: Iterable[Place], timeout_s: float = 30.0) -> dict[Place, int]:
    """Where a group stands; partitions without a position are left out. Waits for positions of open transactions."""
    consumer = Consumer(settings(brokers, **{"group.id": group, "isolation.level": "read_committed"}))
    try:
        found = consumer.committed([TopicPartition(*place) for place in places], timeout=timeout_s)
    except KafkaException as error:
        raise CheckerError(f"the positions of group {group} cannot be read: {error.args[0].str()}") from error
    finally:
        consumer.close()
    wrong = next((place for place in found if place.error is not None), None)
    if wrong is not None:
        raise CheckerError(f"the position of group {group} in {wrong.topic}-{wrong.partition}: {wrong.error}")
    return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}
