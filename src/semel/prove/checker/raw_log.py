"""Who wrote what, and how it ended: the headers of record batches and the markers, by plain Fetch requests.

confluent-kafka shows records, not their producers. This reads just enough of the log for the checker to say which
transaction a record belongs to, and to know from the markers themselves, not from the broker's list of aborts, how that
ended.
"""

from __future__ import annotations

import socket
import struct
from bisect import bisect_right
from enum import Enum
from typing import NamedTuple

from confluent_kafka.admin import AdminClient

_FETCH, _VERSION = 1, 4  # the oldest version that every broker in use still serves
_HEADER = struct.Struct(">qiibIhiqqqhii")  # the 61 bytes in front of every batch
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_CHUNK_BYTES = 8 << 20
_TIMEOUT_S = 20.0


class LogReadError(Exception):
    """The broker's answer could not be used."""


class Fate(Enum):
    PLAIN = "not in a transaction"
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "not ended"


class Batch(NamedTuple):
    first_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    fate: Fate

    @property
    def transaction(self) -> str:
        return f"producer {self.producer_id} epoch {self.epoch}" if self.fate is not Fate.PLAIN else ""


class PartitionLog(NamedTuple):
    """The data batches of a partition, in order, and the ends of its transactions."""

    batches: list[Batch]
    markers: list[tuple[int, int, int, bool]]  # offset, producer id, epoch, commit

    def batch_at(self, offset: int) -> Batch | None:
        at = bisect_right(self.batches, offset, key=lambda batch: batch.first_offset) - 1
        return self.batches[at] if at >= 0 and self.batches[at].last_offset >= offset else None


def read_log(brokers: str, topic: str, timeout_s: float = _TIMEOUT_S) -> dict[int, PartitionLog]:
    """The logs of all partitions of a topic, each from its leader."""
    found = AdminClient({"bootstrap.servers": brokers, "log_level": 0}).list_topics(topic, timeout=timeout_s)
    logs = {}
    for partition, metadata in found.topics[topic].partitions.items():
        leader = found.brokers[metadata.leader]
        with socket.create_connection((leader.host, leader.port), timeout_s) as sock:
            logs[partition] = _read_partition(sock, topic, partition)
    return logs


def _read_partition(sock: socket.socket, topic: str, partition: int) -> PartitionLog:
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
    answer = _exactly(sock, struct.unpack(">i", _exactly(sock, 4))[0])
    at = 4 + 4 + 4 + 2 + len(name) + 4  # correlation id, throttle time, one topic, its name, one partition
    _, code, high_watermark, _, aborted = struct.unpack_from(">ihqqi", answer, at)
    if code:
        raise LogReadError(f"{topic}-{partition} cannot be read from offset {offset}: error code {code}")
    at += 26 + 16 * max(aborted, 0)
    return high_watermark, answer[at + 4 :]


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise LogReadError("the broker closed the connection in the middle of an answer")
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


def _decided(raw: list[tuple[int, int, int, int, int, bool | None]]) -> PartitionLog:
    """A marker decides everything that its producer wrote before it and that is not decided yet."""
    fates: dict[int, Fate] = {}
    waiting: dict[int, list[int]] = {}
    markers = []
    for number, (first, _, producer_id, epoch, attributes, commit) in enumerate(raw):
        if commit is not None:
            markers.append((first, producer_id, epoch, commit))
            fates |= dict.fromkeys(waiting.pop(producer_id, []), Fate.COMMITTED if commit else Fate.ABORTED)
        elif attributes & _TRANSACTIONAL:
            waiting.setdefault(producer_id, []).append(number)
    batches = []
    for number, (first, last, producer_id, epoch, attributes, commit) in enumerate(raw):
        if commit is None:
            fate = fates.get(number, Fate.OPEN) if attributes & _TRANSACTIONAL else Fate.PLAIN
            batches.append(Batch(first, last, producer_id, epoch, fate))
    return PartitionLog(batches, markers)
