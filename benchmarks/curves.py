"""What transactions cost, by the size of a record and the time between commits: throughput and latency, on semel's
broker and on Apache Kafka in turns, with both isolation levels.

    semel bench curves
    python -m benchmarks.curves docs/images      # the same, and the curves of the documentation

Throughput is one confluent-kafka producer that commits whenever the interval is over, as a share of what it reaches
without transactions in the same turn; then a reader of each isolation level takes what it wrote. Latency is the time
from when a record of a steady load was due until a reader has it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.curve_plots import Curve, plot
from benchmarks.harness import Collected, Report, compare, median, table
from benchmarks.loop_latency import Latency, Reader, of
from benchmarks.peers.raw_client import RawClient
from benchmarks.transactions import KAFKA, Brokers, both_brokers, in_turns

BENCH = "curves"
SIZES = {"100 B": (100, 300_000), "1 KB": (1_000, 100_000), "10 KB": (10_000, 15_000)}  # bytes, records
INTERVALS_MS = (10, 30, 100, 300, 1_000)
ISOLATIONS = ("read_committed", "read_uncommitted")
RATE = 1_000  # records/s of the steady load
WARMUP_S, SECONDS = 1.0, 3.0
LIMIT_S = 60.0


class Point(NamedTuple):
    """One broker, one size, one interval; each value is the median of its runs."""

    broker: str
    size: str
    interval_ms: int
    share: float
    latencies: dict[str, Latency]


def run(report: Report, quick: bool = False) -> None:
    measured(report, quick)


def measured(report: Report, quick: bool = False) -> list[Point]:
    runs = 1 if quick else 3
    sizes = list(SIZES)[1:2] if quick else list(SIZES)
    intervals_ms = INTERVALS_MS[2:3] if quick else INTERVALS_MS
    with both_brokers() as brokers:
        return [point for size in sizes for point in _points(report, brokers, size, intervals_ms, runs, quick)]


def _points(
    report: Report, brokers: Brokers, size: str, intervals_ms: Sequence[int], runs: int, quick: bool
) -> list[Point]:
    value_bytes, records = SIZES[size]
    rates = in_turns(brokers, runs, partial(_rates, value_bytes, records // (5 if quick else 1), intervals_ms))
    points = []
    for interval_ms in intervals_ms:
        case = f"{size}, commits every {interval_ms} ms"
        shares = {name: [each.produced[interval_ms] / each.plain for each in found] for name, found in rates.items()}
        compare(report, bench=BENCH, case=f"{case}: share of the rate without", unit="share", values=shares)
        for isolation in ISOLATIONS:
            read = {name: [each.read[interval_ms, isolation] for each in found] for name, found in rates.items()}
            compare(report, bench=BENCH, case=f"{case}: {isolation}", unit="records/s", values=read)
        late = in_turns(brokers, runs, partial(_latencies, value_bytes, interval_ms))
        for isolation in ISOLATIONS:
            for at, what in enumerate(("p50", "p99")):
                values = {name: [each[isolation][at] for each in found] for name, found in late.items()}
                title = f"{case}: produce to {isolation}, {what}"
                compare(report, bench=BENCH, case=title, unit="ms", values=values, better="lower")
        for name in brokers:
            middle = {each: _middle([found[each] for found in late[name]]) for each in ISOLATIONS}
            points.append(Point(name, size, interval_ms, median(shares[name]), middle))
        print(f"  curves: {case}: {points[-len(brokers) :]}", file=sys.stderr, flush=True)
    return points


def _middle(found: Sequence[Latency]) -> Latency:
    return Latency(median([each.p50_ms for each in found]), median([each.p99_ms for each in found]), found[0].records)


# --- throughput ---


class Rates(NamedTuple):
    """Records per second: without transactions, by interval, and by interval and isolation level."""

    plain: float
    produced: dict[int, float]
    read: dict[tuple[int, str], float]


def _rates(value_bytes: int, records: int, intervals_ms: Sequence[int], broker: Any) -> Rates:
    plain = _produce(broker.bootstrap, _topic(broker.bootstrap), value_bytes, records)
    produced, read = {}, {}
    for interval_ms in intervals_ms:
        topic = _topic(broker.bootstrap)
        produced[interval_ms] = _produce(broker.bootstrap, topic, value_bytes, records, interval_ms)
        for isolation in ISOLATIONS:
            read[interval_ms, isolation] = _read(broker.bootstrap, topic, records, isolation)
    return Rates(plain, produced, read)


def _topic(bootstrap: str) -> str:
    name = f"curve-{time.time_ns()}"
    with RawClient(bootstrap) as client:
        client.create_topic(name, segment_bytes=str(64 << 20), retention_bytes=str(512 << 20))
    return name


def _produce(bootstrap: str, topic: str, value_bytes: int, records: int, commit_ms: int = 0) -> float:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0, "linger.ms": 5}
    producer = Producer({**settings, **({"transactional.id": topic} if commit_ms else {})})
    if commit_ms:
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
    value = b"x" * value_bytes
    producer.produce(topic, value)
    if producer.flush(LIMIT_S):  # connected, with a producer id
        raise RuntimeError(f"{topic} was not written within {LIMIT_S} s")
    began_s = time.perf_counter()
    commit_s = began_s + commit_ms / 1000
    for number in range(1, records):
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.001)
        if commit_ms and number % 16 == 0 and time.perf_counter() >= commit_s:
            producer.commit_transaction(LIMIT_S)
            producer.begin_transaction()
            commit_s = time.perf_counter() + commit_ms / 1000
    if commit_ms:
        producer.commit_transaction(LIMIT_S)
    if producer.flush(LIMIT_S):
        raise RuntimeError(f"{topic} was not written within {LIMIT_S} s")
    return records / (time.perf_counter() - began_s)


def _read(bootstrap: str, topic: str, records: int, isolation: str) -> float:
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": bootstrap, "group.id": topic, "isolation.level": isolation, "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False, "queued.min.messages": 1_000_000})
    began_s, found = time.perf_counter(), 0
    consumer.assign([TopicPartition(topic, 0, 0)])
    while found < records:
        if time.perf_counter() - began_s > LIMIT_S:
            raise RuntimeError(f"{found} of {records} records came within {LIMIT_S} s")
        found += len(consumer.consume(10_000, 0.05))
    seconds = time.perf_counter() - began_s
    consumer.close()
    return records / seconds


# --- latency ---


def _latencies(value_bytes: int, commit_ms: int, broker: Any) -> dict[str, Latency]:
    """Of one load, by isolation level; a reader of each follows it."""
    topic = _topic(broker.bootstrap)
    words = [sys.executable, "-m", "benchmarks.loop_latency", broker.bootstrap, topic, str(RATE)]
    words += [str(WARMUP_S + SECONDS), str(value_bytes), str(commit_ms)]
    skip, total = int(RATE * WARMUP_S), int(RATE * (WARMUP_S + SECONDS))
    found: dict[str, Latency] = {}
    readers = {isolation: Reader(broker.bootstrap, topic, isolation) for isolation in ISOLATIONS}
    with subprocess.Popen(words) as load:

        def follow(isolation: str) -> None:
            found[isolation] = of(readers[isolation].latencies_ms(total, skip, lambda: load.poll() is None))

        threads = [threading.Thread(target=follow, args=(isolation,)) for isolation in ISOLATIONS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(found) < len(ISOLATIONS):
        raise RuntimeError(f"{topic}: a reader did not get everything")
    return found


# --- the curves of the documentation ---


def draw(points: Sequence[Point], folder: Path) -> None:
    """Two pictures: what is left of the throughput, and how late a committed record is read."""
    sizes = list(dict.fromkeys(point.size for point in points))

    def curves(size: str, broker: str, value: Any) -> list[tuple[float, float]]:
        return [(p.interval_ms, value(p)) for p in points if (p.size, p.broker) == (size, broker)]

    shares = {
        size: [
            Curve("semel", curves(size, "semel", lambda p: p.share * 100)),
            Curve("Apache Kafka", curves(size, KAFKA, lambda p: p.share * 100), is_peer=True),
        ]
        for size in sizes
    }
    late: dict[str, list[Curve]] = {}
    for size in sizes:
        late[size] = []
        for name, broker in (("semel", "semel"), ("Apache Kafka", KAFKA)):
            for at, what in enumerate(("p50", "p99")):
                values = curves(size, broker, lambda p, at=at: p.latencies["read_committed"][at])
                late[size].append(Curve(f"{name}, {what}", values, broker == KAFKA, what == "p99"))
    title = "Throughput with transactions, in percent of that without"
    (folder / "curves-throughput.svg").write_text(plot(title, shares, "%", is_log=False))
    title = "From produce to read_committed, in milliseconds, at 1,000 records/s"
    (folder / "curves-latency.svg").write_text(plot(title, late, "ms", is_log=True))


def main(words: Sequence[str]) -> None:
    collected = Collected(as_json=False)
    points = measured(collected)
    print(table(collected.rows), flush=True)
    if words:
        draw(points, Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
