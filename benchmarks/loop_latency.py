"""From produce to visible: a steady load into one topic, and what arrives in another under read_committed.

    python -m benchmarks.loop_latency BOOTSTRAP SOURCE RATE SECONDS [VALUE_BYTES [COMMIT_MS]]
                                                         # the load alone, in a process of its own

Every value begins with the time at which its record was due, so a load that falls behind shows as latency, and a reader
that has it knows when. Load and reader are confluent-kafka, for every contestant and every cost curve.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer

_STAMP = struct.Struct(">q")
TICK_S = 0.001
VALUE_BYTES = 100
WARMUP_S = 2.0
READ_LIMIT_S = 60.0  # after the end of the load


class Latency(NamedTuple):
    p50_ms: float
    p99_ms: float
    records: int


def feed(
    bootstrap: str, source: str, rate: int, seconds: float, value_bytes: int = VALUE_BYTES, commit_ms: int = 0
) -> None:
    """Records at a steady rate, in steps of a millisecond; with `commit_ms` in transactions of that length."""
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 0, "log_level": 0, "acks": "1"}
    if commit_ms:
        settings |= {"acks": "all", "transactional.id": source}
    producer = Producer(settings)
    if commit_ms:
        producer.init_transactions(READ_LIMIT_S)
        producer.begin_transaction()
    rest = b"x" * (value_bytes - _STAMP.size)
    began_s, began_ns, sent, total = time.perf_counter(), time.time_ns(), 0, int(rate * seconds)
    commit_s = began_s + commit_ms / 1000
    while sent < total:
        due = min(total, int((time.perf_counter() - began_s) * rate))
        for number in range(sent, due):
            stamp = began_ns + number * 1_000_000_000 // rate
            producer.produce(source, _STAMP.pack(stamp) + rest, b"%d" % (number % 1000))
        sent = max(sent, due)
        producer.poll(0)
        if commit_ms and time.perf_counter() >= commit_s:
            producer.commit_transaction(READ_LIMIT_S)
            producer.begin_transaction()
            commit_s = max(commit_s + commit_ms / 1000, time.perf_counter())
        time.sleep(TICK_S)
    if commit_ms:
        producer.commit_transaction(READ_LIMIT_S)
    if producer.flush(READ_LIMIT_S):
        raise RuntimeError("the load was not written")


class Reader:
    """Of committed records, with the times at which they came."""

    def __init__(self, bootstrap: str, topic: str, isolation: str = "read_committed") -> None:
        settings = {"bootstrap.servers": bootstrap, "group.id": f"reader-{time.time_ns()}", "log_level": 0}
        settings |= {"isolation.level": isolation, "auto.offset.reset": "earliest", "fetch.wait.max.ms": "10"}
        self._consumer: Any = Consumer({**settings, "enable.auto.commit": False})
        partitions = self._consumer.list_topics(topic, 30).topics[topic].partitions
        from confluent_kafka import TopicPartition

        self._consumer.assign([TopicPartition(topic, number, 0) for number in partitions])

    def latencies_ms(self, records: int, skip: int, is_running: Callable[[], bool]) -> list[float]:
        """Of the records after the first ones, sorted."""
        found: list[float] = []
        end_s = None
        while len(found) < records:
            messages = self._consumer.consume(5_000, 0.02)
            now_ns = time.time_ns()
            found += [(now_ns - _STAMP.unpack_from(message.value())[0]) / 1e6 for message in messages]
            if end_s is None and not is_running():
                end_s = time.perf_counter() + READ_LIMIT_S
            if end_s is not None and time.perf_counter() > end_s:
                raise RuntimeError(f"only {len(found)} of {records} records became visible")
        self._consumer.close()
        return sorted(found[skip:])


def measure(bootstrap: str, source: str, target: str, rate: int, seconds: float, already: int = 0) -> Latency:
    """Of a steady load. A copier runs between the topics, and has copied so many records already."""
    reader = Reader(bootstrap, target)
    words = [sys.executable, "-m", "benchmarks.loop_latency", bootstrap, source, str(rate), str(seconds + WARMUP_S)]
    with subprocess.Popen(words) as load:
        records = int(rate * (seconds + WARMUP_S)) + already
        return of(reader.latencies_ms(records, int(rate * WARMUP_S) + already, lambda: load.poll() is None))


def of(found: list[float]) -> Latency:
    """Of sorted latencies."""
    return Latency(found[len(found) // 2], found[len(found) * 99 // 100], len(found))


if __name__ == "__main__":
    feed(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), *map(int, sys.argv[5:]))
