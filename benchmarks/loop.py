"""`semel.process` beside Kafka Streams (exactly_once_v2), Quix Streams and an exactly-once copier written by
hand with confluent-kafka: all copy a topic with its keys, exactly once, on one node of Apache Kafka.

    semel bench loop
    python -m benchmarks.loop throughput "1 KB" 3       # one size, so many runs
    python -m benchmarks.loop latency 1000 10,100 3     # records/s, commit intervals in ms, runs

Throughput runs from a contestant's first record until its group's committed offsets are at the end; joining the group
is not counted, and every record must be visible in the output. Latency is the time from produce to visible under
read_committed, at a steady rate, when a contestant has run for two seconds.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Collected, Report, compare, interleave, table
from benchmarks.loop_latency import Latency, measure
from benchmarks.spark_contestants import PROGRAMS, START_S, PeerMissing, peers_folder
from benchmarks.state import fresh, until_committed
from semel.client.consumer import Consumer
from semel.client.producer import Producer
from semel.local.apache_kafka import ApacheKafka, KafkaMissing, java, kafka_libs
from semel.local.processes import Process

BENCH = "loop"
TABLES, ROWS = "semel", "semel, rows"
STREAMS, QUIX, BY_HAND = "Kafka Streams", "Quix Streams", "confluent-kafka by hand"
KINDS = {TABLES: "tables", ROWS: "rows", BY_HAND: "by hand"}
SIZES = {"100 B": (100, 1_000_000), "1 KB": (1_000, 200_000)}  # bytes of a value, records
RATES = (1_000, 20_000)  # records/s
INTERVALS_MS = (10, 100, 1_000)
COMMIT_MS = 100
THREADS = 2  # of Kafka Streams, which uses both cores so
QUIX_SHARE = 10  # it copies a tenth of the records
SECONDS = 6.0  # of a steady load
CHUNK = 50_000


class Copy(NamedTuple):
    """What a contestant is to do, under a group of its own."""

    bootstrap: str
    source: str
    target: str
    commit_ms: int

    @classmethod
    def into_fresh(cls, bootstrap: str, source: str, commit_ms: int) -> Copy:
        return cls(bootstrap, source, fresh(bootstrap, "out"), commit_ms)

    @property
    def group(self) -> str:
        return f"copy-{self.target}"


class Contestants:
    """Those on this machine. Kafka Streams keeps one JVM, which is warm after the first round; the others are started
    for every copy."""

    def __init__(self, stack: ExitStack) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="semel-bench-loop-"))
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self.names = there()
        self._streams: Process | None = None
        if STREAMS in self.names:
            self._streams = stack.enter_context(Process(_streams_command(self._folder), stdin=True))
            self._streams.wait_for_line("^ready", START_S)

    @contextmanager
    def running(self, name: str, copy: Copy) -> Iterator[None]:
        """A contestant that copies; it has its first record when the block begins."""
        if name != STREAMS:
            with Process(_python_command(name, copy), cwd=self._folder if name == QUIX else None) as process:
                process.wait_for_line("^first", START_S)
                yield
            return
        assert self._streams is not None
        seen = self._streams.line_count
        self._streams.write(f"{copy.bootstrap} {copy.group} {copy.source} {copy.target} {copy.commit_ms}\n")
        self._streams.wait_for_line("^first", START_S, after=seen)
        yield
        self._streams.write("stop\n")
        self._streams.wait_for_line("^stopped", START_S, after=seen)


def _streams_command(folder: Path) -> list[str]:
    path = f"{(peers_folder() / 'streams-jars').absolute()}/*:{kafka_libs().absolute()}/*"
    words = [java(), "-Xmx1g", f"-Djava.io.tmpdir={folder}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    return [*words, "-cp", path, str(PROGRAMS / "StreamsPeer.java"), str(THREADS), "exactly_once_v2", str(COMMIT_MS)]


def _python_command(name: str, copy: Copy) -> list[str]:
    job = {"brokers": copy.bootstrap, "id": copy.group, "source": copy.source, "target": copy.target}
    if name == QUIX:
        python = (peers_folder() / "quix/bin/python").absolute()
        return [str(python), str(PROGRAMS / "quix_peer.py"), json.dumps(job | {"commit_s": copy.commit_ms / 1000})]
    words = job | {"kind": KINDS[name], "commit_ms": copy.commit_ms}
    return [sys.executable, "-m", "benchmarks.loop_copiers", json.dumps(words)]


def there() -> list[str]:
    """The contestants on this machine; others are named."""
    found = [TABLES, ROWS, BY_HAND]
    for name, part in ((STREAMS, "streams-jars"), (QUIX, "quix/complete")):
        try:
            if not (peers_folder() / part).exists():
                raise PeerMissing("it is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
            found.append(name)
        except (PeerMissing, KafkaMissing) as error:
            print(f"semel bench loop: *** {name} is SKIPPED: {error} ***", file=sys.stderr, flush=True)
    return found


# --- throughput ---


def throughput(
    report: Report, bootstrap: str, label: str, runs: int, them: Contestants, names: Sequence[str], share: int = 1
) -> None:
    value_bytes, records = SIZES[label]
    records //= share
    sources = {1: filled(bootstrap, records, value_bytes)}
    if QUIX in names:
        sources[QUIX_SHARE] = filled(bootstrap, records // QUIX_SHARE, value_bytes)

    def once(name: str) -> float:
        part = QUIX_SHARE if name == QUIX else 1
        copy = Copy.into_fresh(bootstrap, sources[part], COMMIT_MS)
        with them.running(name, copy):
            seconds = until_committed(bootstrap, copy.group, records // part)
        if (found := visible(copy)) != records // part:
            raise RuntimeError(f"{name} copied {found} of {records // part} records")
        return _said(f"{label}: {name}", records // part / seconds)

    values = interleave({name: lambda name=name: once(name) for name in names}, runs=runs)  # type: ignore[misc]
    case = f"copy {label}, transactions of {COMMIT_MS} ms"
    for subject in (TABLES, ROWS):
        others = {name: found for name, found in values.items() if name == subject or name not in (TABLES, ROWS)}
        what = "tables" if subject == TABLES else "rows"
        compare(report, bench=BENCH, case=f"{case}, {what}", unit="records/s", values=others, subject=subject)


def _said(what: str, rate: float) -> float:
    print(f"  loop: {what}: {rate:,.0f} records/s", file=sys.stderr, flush=True)
    return rate


def filled(bootstrap: str, records: int, value_bytes: int) -> str:
    """A topic of keyed records whose lengths vary by half around a mean."""
    import pyarrow as pa

    topic, chooser = fresh(bootstrap, "in"), random.Random(value_bytes)
    payload = chooser.randbytes(2 * value_bytes)
    with Producer(bootstrap_servers=bootstrap) as producer:
        for start in range(0, records, CHUNK):
            count = min(CHUNK, records - start)
            values = [payload[: chooser.randint(value_bytes // 2, value_bytes * 3 // 2)] for _ in range(count)]
            keys = [b"user-%08d" % chooser.randrange(20_000) for _ in range(count)]
            producer.send_table(topic, pa.table({"key": keys, "value": values}))
    return topic


def visible(copy: Copy) -> int:
    """How many records a reader of committed data finds in the output, up to its end."""
    found = 0
    with Consumer(bootstrap_servers=copy.bootstrap, isolation_level="read_committed") as consumer:
        partitions = consumer.partitions_for(copy.target)
        parts = [(copy.target, number) for number in sorted(partitions)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends = consumer.end_offsets(parts)
        while any(consumer.position(part) < end for part, end in ends.items()):
            found += len(consumer.poll_table(1_000))
    return found


# --- latency ---


def latency(
    report: Report,
    bootstrap: str,
    rate: int,
    commit_ms: int,
    runs: int,
    them: Contestants,
    seconds: float = SECONDS,
) -> None:
    names = [name for name in them.names if name != QUIX]  # it polls too rarely to be compared here
    found: dict[str, list[Latency]] = {name: [] for name in names}
    for number in range(-1, runs):  # the first one warms Apache Kafka: who is first there waits for seconds
        for name in names if number % 2 == 0 else names[::-1]:
            one = _latency(them, bootstrap, name, rate, commit_ms, seconds)
            print(f"  loop: {rate}/s, {commit_ms} ms: {name}: {one}", file=sys.stderr, flush=True)
            if number >= 0:
                found[name].append(one)
    for subject in (TABLES, ROWS):
        others = [name for name in names if name == subject or name not in (TABLES, ROWS)]
        what = "tables" if subject == TABLES else "rows"
        for at, share in enumerate(("p50", "p99")):
            values = {name: [each[at] for each in found[name]] for name in others}
            case = f"produce to visible, {rate:,} records/s, commits every {commit_ms} ms, {what}, {share}"
            compare(report, bench=BENCH, case=case, unit="ms", values=values, better="lower", subject=subject)


def _latency(them: Contestants, bootstrap: str, name: str, rate: int, commit_ms: int, seconds: float) -> Latency:
    source = fresh(bootstrap, "in")
    copy = Copy.into_fresh(bootstrap, source, commit_ms)
    with Producer(bootstrap_servers=bootstrap) as producer:  # all have joined their group when the load begins
        producer.send(source, time.time_ns().to_bytes(8, "big")).result()
    with them.running(name, copy):
        until_committed(bootstrap, copy.group, 1)
        return measure(bootstrap, source, copy.target, rate, seconds, already=1)


def run(report: Report, quick: bool = False) -> None:
    with ApacheKafka() as kafka, ExitStack() as stack:
        them = Contestants(stack)
        for label in SIZES:
            throughput(report, kafka.bootstrap, label, 2 if quick else 5, them, them.names, share=10 if quick else 1)
        for rate in RATES[:1] if quick else RATES:
            for commit_ms in INTERVALS_MS[1:2] if quick else INTERVALS_MS:
                latency(report, kafka.bootstrap, rate, commit_ms, 1 if quick else 3, them, 2.0 if quick else SECONDS)


def main(words: Sequence[str]) -> None:
    """One case."""
    collected = Collected(as_json=False)
    with ApacheKafka() as kafka, ExitStack() as stack:
        them = Contestants(stack)
        if words[0] == "throughput":
            names = [name for name in them.names if len(words) < 4 or name in words[3].split(";")]
            throughput(collected, kafka.bootstrap, words[1], int(words[2]), them, names)
        else:
            for commit_ms in map(int, words[2].split(",")):
                latency(collected, kafka.bootstrap, int(words[1]), commit_ms, int(words[3]), them)
    print(table(collected.rows), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
