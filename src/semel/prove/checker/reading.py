"""What the checker reads, through confluent-kafka: committed records, offsets of groups, the log as it is, and a reader
beside a running campaign.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

READ_TIMEOUT_S = 60.0
_TIMEOUT_S = 20.0  # of one request
KNOWN_TIMEOUT_S = 20.0  # until a node knows a topic that was created
Place = tuple[str, int]


class CheckerError(Exception):
    """The checker could not look: no verdict is possible."""


class Seen(NamedTuple):
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


def known_topics(brokers: str) -> Any:
    """Name -> metadata, of all topics; CheckerError if no broker responds."""
    try:
        return AdminClient(settings(brokers)).list_topics(timeout=_TIMEOUT_S).topics
    except KafkaException as error:
        raise CheckerError(f"{brokers} does not respond: {error.args[0].str()}") from error


def partitions_of(brokers: str, topics: Iterable[str]) -> list[Place]:
    """All partitions of the topics; CheckerError if one is not there."""
    wanted = list(topics)
    found = known_topics(brokers)
    missing = [topic for topic in wanted if topic not in found]
    if missing:
        raise CheckerError(f"{brokers} has no topic {', '.join(missing)}")
    return [(topic, partition) for topic in wanted for partition in sorted(found[topic].partitions)]


def topics_like(brokers: str, prefix: str) -> list[str]:
    return sorted(name for name in known_topics(brokers) if name.startswith(prefix))


def create_topics(brokers: str, topics: Mapping[str, int], **config: str) -> None:
    """Name -> partitions. Returns when every one can be used: a node may hear of a topic after it was created."""
    admin = AdminClient(settings(brokers))
    new = [NewTopic(name, partitions, -1, config=config) for name, partitions in topics.items()]
    try:
        for future in admin.create_topics(new).values():
            future.result(30)
    except KafkaException as error:
        raise CheckerError(f"a topic could not be created: {error.args[0].str()}") from error
    for broker in brokers.split(","):  # each hears of it by itself
        _wait_until_known(broker, set(topics))


def _wait_until_known(brokers: str, topics: set[str]) -> None:
    deadline_s = time.monotonic() + KNOWN_TIMEOUT_S
    while missing := topics - set(known_topics(brokers)):
        if time.monotonic() > deadline_s:
            names = ", ".join(sorted(missing))
            raise CheckerError(f"{brokers} has created {names}, and does not know it {KNOWN_TIMEOUT_S:.0f} s later")
        time.sleep(0.05)


def delete_topics(brokers: str, topics: Iterable[str]) -> None:
    admin = AdminClient(settings(brokers))  # held until the responses are there
    try:
        for future in admin.delete_topics(list(topics)).values():
            future.result(30)
    except KafkaException as error:
        raise CheckerError(f"a topic could not be deleted: {error.args[0].str()}") from error


def read(brokers: str, topics: Iterable[str], *, committed: bool = True) -> list[Seen]:
    """All records of the topics, each partition in order, up to its end now (the last stable offset, if committed)."""
    places = partitions_of(brokers, topics)
    if not places:
        return []
    consumer = open_consumer(brokers, committed)
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in places])
        records = _read_to_the_end(consumer, len(places), time.monotonic() + READ_TIMEOUT_S)
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
    """The last stable offset of each partition, or the high watermark. CheckerError if there is no response.

    A caller that needs it often passes its own `admin`: a client costs several threads.
    """
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, partition): latest for topic, partition in places}
    level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
    client = AdminClient(settings(brokers)) if admin is None else admin  # held until the responses are there
    futures = client.list_offsets(wanted, isolation_level=level, request_timeout=timeout_s)
    try:
        found = {place: future.result(timeout_s + 5).offset for place, future in futures.items()}
    except (KafkaException, TimeoutError) as error:
        raise CheckerError(f"the ends of partitions cannot be read: {error}") from error
    if any(offset < 0 for offset in found.values()):  # a client that knows an older leader epoch gets nothing
        raise CheckerError(f"the ends of partitions are not known to this client: {found}")
    return {(place.topic, place.partition): offset for place, offset in found.items()}


def group_offsets(brokers: str, group: str, places: Iterable[Place], timeout_s: float = 30.0) -> dict[Place, int]:
    """The committed offsets of a group, where it has any. Waits for offsets of open transactions."""
    consumer = Consumer(settings(brokers, **{"group.id": group, "isolation.level": "read_committed"}))
    try:
        found = consumer.committed([TopicPartition(*place) for place in places], timeout=timeout_s)
    except KafkaException as error:
        raise CheckerError(f"the offsets of group {group} cannot be read: {error.args[0].str()}") from error
    finally:
        consumer.close()
    wrong = next((place for place in found if place.error is not None), None)
    if wrong is not None:
        raise CheckerError(f"the offset of group {group} in {wrong.topic}-{wrong.partition}: {wrong.error}")
    return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}


# --- the log as it is: the headers of record batches and the markers, by plain Fetch requests ---
# confluent-kafka shows records, not their producers. This reads just enough of the log for the checker to say which
# transaction a record belongs to, and to know from the markers themselves, not from the broker's list of aborts, how
# that ended.


_FETCH, _VERSION = 1, 4  # the oldest version that every broker in use still serves
_HEADER = struct.Struct(">qiibIhiqqqhii")  # the 61 bytes in front of every batch
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_CHUNK_BYTES = 8 << 20


class LogReadError(Exception):
    """The broker's response could not be used."""


class Fate(Enum):
    PLAIN = "not in a transaction"
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "not ended"


class LogBatch(NamedTuple):
    first_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    fate: Fate

    @property
    def transaction(self) -> str:
        return f"producer {self.producer_id} epoch {self.epoch}" if self.fate is not Fate.PLAIN else ""


def read_log(brokers: str, topic: str) -> dict[int, list[LogBatch]]:
    """The data batches of all partitions of a topic, in order, each partition from its leader."""
    found = AdminClient({"bootstrap.servers": brokers, "log_level": 0}).list_topics(topic, timeout=_TIMEOUT_S)
    logs = {}
    for partition, metadata in found.topics[topic].partitions.items():
        leader = found.brokers[metadata.leader]
        with socket.create_connection((leader.host, leader.port), _TIMEOUT_S) as sock:
            logs[partition] = _read_partition(sock, topic, partition)
    return logs


def _read_partition(sock: socket.socket, topic: str, partition: int) -> list[LogBatch]:
    raw: list[tuple[int, int, int, int, int, bool | None]] = []
    offset = 0
    while True:
        high_watermark, records = _fetch(sock, topic, partition, offset)
        new = _headers(records)
        raw += [batch for batch in new if batch[1] >= offset]
        if new:
            offset = new[-1][1] + 1
        if offset >= high_watermark:
            return _decided(raw)
        if not new:
            raise LogReadError(f"{topic}-{partition}: nothing at offset {offset}, but the log ends at {high_watermark}")


def _fetch(sock: socket.socket, topic: str, partition: int, offset: int) -> tuple[int, bytes]:
    name = topic.encode()
    head = struct.pack(">hhih", _FETCH, _VERSION, 0, -1)
    body = struct.pack(">iiiib", -1, 100, 1, _CHUNK_BYTES, 0)
    place = struct.pack(f">ih{len(name)}siiqi", 1, len(name), name, 1, partition, offset, _CHUNK_BYTES)
    request = head + body + place
    sock.sendall(struct.pack(">i", len(request)) + request)
    response = _exactly(sock, struct.unpack(">i", _exactly(sock, 4))[0])
    at = 4 + 4 + 4 + 2 + len(name) + 4  # correlation id, throttle time, one topic, its name, one partition
    _, code, high_watermark, _, aborted = struct.unpack_from(">ihqqi", response, at)
    if code:
        raise LogReadError(f"{topic}-{partition} cannot be read from offset {offset}: error code {code}")
    at += 26 + 16 * max(aborted, 0)
    return high_watermark, response[at + 4 :]


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise LogReadError("the broker closed the connection in the middle of a response")
        data += chunk
    return bytes(data)


def _headers(records: bytes) -> list[tuple[int, int, int, int, int, bool | None]]:
    """(first, last, producer id, epoch, attributes, commit) of every whole batch; commit is None but for markers."""
    found = []
    at = 0
    while at + _HEADER.size <= len(records):
        base, length, _, magic, _, attributes, last_delta, _, _, producer_id, epoch, _, _ = _HEADER.unpack_from(
            records, at
        )
        if magic != 2:
            raise LogReadError(f"a batch of format {magic} at offset {base}; only format 2 has transactions")
        if at + 12 + length > len(records):
            break  # the end of the chunk cuts the last batch
        commit = _is_commit(records, at + _HEADER.size) if attributes & _CONTROL else None
        found.append((base, base + last_delta, producer_id, epoch, attributes, commit))
        at += 12 + length
    return found


def _is_commit(records: bytes, at: int) -> bool:
    """The type in a control record's key: 0 abort, 1 commit."""
    at = _skip_varint(records, at) + 1  # length, attributes
    for _ in range(3):  # timestamp delta, offset delta, key length
        at = _skip_varint(records, at)
    return bool(struct.unpack_from(">hh", records, at)[1] == 1)


def _skip_varint(data: bytes, at: int) -> int:
    while data[at] & 0x80:
        at += 1
    return at + 1


def _decided(raw: list[tuple[int, int, int, int, int, bool | None]]) -> list[LogBatch]:
    """The next marker of its producer decides a batch, so the log is read backwards."""
    fates: dict[int, Fate] = {}  # by the producer's marker that was met last
    batches = []
    for first, last, producer_id, epoch, attributes, commit in reversed(raw):
        if commit is not None:
            fates[producer_id] = Fate.COMMITTED if commit else Fate.ABORTED
        else:
            fate = fates.get(producer_id, Fate.OPEN) if attributes & _TRANSACTIONAL else Fate.PLAIN
            batches.append(LogBatch(first, last, producer_id, epoch, fate))
    return batches[::-1]


# --- a reader that runs all the time, as a consumer of the output would ---
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
