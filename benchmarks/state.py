"""A keyed count with state, exactly once, beside Kafka Streams and Quix Streams, on Apache Kafka.

    semel, rows      one process, a function of each record; writes every count
    semel, tables    one process, a function of columns; writes the last count of a key in each table
    Kafka Streams    exactly_once_v2, RocksDB, two threads; with its cache (writes the last count of a key in each
                     commit) and without (writes every count)
    Quix Streams     exactly-once, RocksDB, one process, commits every second; on a fifth of the records

All but Quix Streams commit every 100 ms. Time runs from a contestant's first record until its group's committed offsets
are at the end. Then how long a loop takes to restore a million keys from the changelog, and the memory that it takes.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Report, compare, interleave
from benchmarks.spark_contestants import COMMIT_MS, CORES, PROGRAMS, START_S, PeerMissing, peers_folder
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.local.apache_kafka import ApacheKafka, KafkaMissing, java, kafka_libs
from semel.local.processes import Process

BENCH = "state"
UNIT = "records/s"
PARTITIONS = 4
KEYS = 20_000
RECORDS = 1_000_000
RESTORED_KEYS = 1_000_000
QUIX_SHARE = 5
CACHE_BYTES = 10 << 20  # Kafka's default
RUN_S = 300
ROWS, TABLES = "semel", "semel, tables"
STREAMS, STREAMS_EVERY = "Kafka Streams (cache)", "Kafka Streams (every count)"
QUIX = "Quix Streams"
_numbers = itertools.count(1)


class Source(NamedTuple):
    topic: str
    records: int


def run(report: Report, quick: bool = False) -> None:
    records, runs = (100_000, 2) if quick else (RECORDS, 5)
    with ApacheKafka() as kafka, _contestants(kafka.bootstrap) as contestants:
        whole = filled(kafka.bootstrap, records, KEYS)
        part = filled(kafka.bootstrap, records // QUIX_SHARE, KEYS)

        def once(name: str) -> float:
            source = part if name == QUIX else whole
            return source.records / contestants[name](source)

        values = interleave({name: lambda name=name: once(name) for name in contestants}, runs=runs)  # type: ignore[misc]
        case = f"keyed count, {KEYS} keys"
        every = {name: found for name, found in values.items() if name in (ROWS, STREAMS_EVERY, QUIX)}
        compare(report, bench=BENCH, case=f"{case}, every count written", unit=UNIT, values=every)
        last = {name: found for name, found in values.items() if name in (TABLES, STREAMS)}
        compare(report, bench=BENCH, case=f"{case}, the last of a commit", unit=UNIT, values=last, subject=TABLES)
        if not quick:
            _restore(report, kafka.bootstrap)


def filled(bootstrap: str, records: int, keys: int) -> Source:
    """A topic of records of about 100 bytes whose keys come in a random order."""
    import numpy as np
    import pyarrow as pa

    topic = fresh(bootstrap, "in")
    rng = np.random.default_rng(7)
    order = rng.permutation(keys)  # where each key comes once
    names = pa.array([b"user-%08d" % number for number in range(keys)])
    with Producer(bootstrap_servers=bootstrap) as producer:
        for start in range(0, records, 100_000):
            count = min(100_000, records - start)
            chosen = order[start : start + count] if keys >= records else rng.integers(0, keys, count)
            producer.send_table(topic, pa.table({"key": names.take(chosen), "value": [b"v" * 100] * count}))
    return Source(topic, records)


def fresh(bootstrap: str, stem: str) -> str:
    name = f"state-{stem}-{next(_numbers)}-{time.time_ns()}"
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(name, PARTITIONS)
    return name


def until_committed(bootstrap: str, group: str, records: int) -> float:
    """How long it takes until the group has committed so many records. Sources here have no markers."""
    started_s = time.perf_counter()
    with Admin(bootstrap_servers=bootstrap) as admin:
        while time.perf_counter() - started_s < RUN_S:
            if sum(at.offset for place, at in admin.group_offsets(group).items()) >= records:
                return time.perf_counter() - started_s
            time.sleep(0.01)
    raise RuntimeError(f"{group} did not reach the end within {RUN_S} s")


@contextmanager
def _contestants(bootstrap: str) -> Iterator[dict[str, Callable[[Source], float]]]:
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="semel-bench-state-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        found: dict[str, Callable[[Source], float]] = {
            ROWS: lambda source: _semel(bootstrap, source, "rows"),
            TABLES: lambda source: _semel(bootstrap, source, "tables"),
        }
        try:
            for name, cache_bytes in ((STREAMS, CACHE_BYTES), (STREAMS_EVERY, 0)):
                found[name] = stack.enter_context(_streams(bootstrap, folder, cache_bytes))
        except (PeerMissing, KafkaMissing) as error:
            print(f"semel bench state: *** Kafka Streams is SKIPPED: {error} ***", file=sys.stderr, flush=True)
        python = peers_folder() / "quix/bin/python"
        if python.exists():
            found[QUIX] = lambda source: _quix(bootstrap, source, python.absolute(), folder)
        else:
            print("semel bench state: *** Quix Streams is SKIPPED ***", file=sys.stderr, flush=True)
        yield found


def _semel(bootstrap: str, source: Source, face: str, **more: Any) -> float:
    group = f"bench-{time.time_ns()}"
    job = {"brokers": bootstrap, "id": group, "source": source.topic, "target": fresh(bootstrap, "out"), "face": face}
    with Process([sys.executable, "-m", "benchmarks.state_loop", json.dumps(job | more)]) as process:
        process.wait_for_line("^first", START_S)
        return until_committed(bootstrap, group, source.records)


@contextmanager
def _streams(bootstrap: str, folder: Path, cache_bytes: int) -> Iterator[Callable[[Source], float]]:
    jars = peers_folder() / "streams-jars"
    if not jars.is_dir():
        raise PeerMissing("Kafka Streams is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
    path = f"{jars.absolute()}/*:{kafka_libs().absolute()}/*"
    words = [java(), "-Xmx1g", f"-Djava.io.tmpdir={folder}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    words += ["-cp", path, str(PROGRAMS / "StreamsPeer.java"), str(CORES), "exactly_once_v2", str(COMMIT_MS)]
    with Process([*words, str(cache_bytes)], stdin=True) as process:
        process.wait_for_line("^ready", START_S)

        def count(source: Source) -> float:
            group = f"bench-{time.time_ns()}"
            seen = process.line_count
            process.write(f"{bootstrap} {group} {source.topic} {fresh(bootstrap, 'out')}\n")
            process.wait_for_line("^first", START_S, after=seen)
            seconds = until_committed(bootstrap, group, source.records)
            process.write("stop\n")
            process.wait_for_line("^stopped", START_S, after=seen)
            return seconds

        yield count


def _quix(bootstrap: str, source: Source, python: Path, folder: Path) -> float:
    group = f"bench-{time.time_ns()}"
    job = {"brokers": bootstrap, "id": group, "source": source.topic, "target": fresh(bootstrap, "out")}
    job |= {"commit_s": 1.0, "folder": str(folder / group)}  # type: ignore[dict-item]
    with Process([python, PROGRAMS / "quix_peer.py", json.dumps(job)], cwd=folder) as process:
        process.wait_for_line("^first", START_S)
        return until_committed(bootstrap, group, source.records)


def _restore(report: Report, bootstrap: str, runs: int = 3) -> None:
    """Seconds until the state of a million keys is there, on an empty disk, and the resident memory after it."""
    source = filled(bootstrap, RESTORED_KEYS, RESTORED_KEYS)
    group, target = f"bench-{time.time_ns()}", fresh(bootstrap, "out")
    job = {"brokers": bootstrap, "id": group, "source": source.topic, "target": target, "face": "tables"}
    with Process([sys.executable, "-m", "benchmarks.state_loop", json.dumps(job)]) as process:
        process.wait_for_line("^first", START_S)
        until_committed(bootstrap, group, source.records)
        process.terminate()
    found = []
    for _ in range(runs):
        with Process([sys.executable, "-m", "benchmarks.state_loop", json.dumps(job | {"restore": True})]) as process:
            line = process.wait_for_line(r"^restored (\d+) keys in ([\d.]+) s, (\d+) MB", RUN_S)
            assert int(line[1]) >= RESTORED_KEYS, line[0]
            found.append((float(line[2]), float(line[3])))
    for case, unit, limit, at in (
        (f"restore of {RESTORED_KEYS} keys", "s", 10.0, 0),
        ("memory after it", "MB", 400.0, 1),
    ):
        values = {"semel": [each[at] for each in found], "limit": [limit] * runs}
        compare(report, bench=BENCH, case=case, unit=unit, values=values, better="lower")
