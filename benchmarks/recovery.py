"""How long exactly-once copiers stand still when a node of a Kafka cluster is killed: semel's loop and a Spark query
with semel's sink beside Kafka Streams, on one cluster of three nodes, under the same kill -9.

    semel bench recovery            # scripts/bench-peers fetches Kafka Streams
    python -m benchmarks.recovery 4         # so many kills of each kind

Each copier has a source and an output topic of one partition. Before a kill all outputs (or all transaction
coordinators) are brought to one node, and everything else to another one. Measured is the time from the kill to the
next commit marker in the output. The marker has the broker's time, so nothing depends on who reads it, or when.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.harness import Collected, Report, compare, table
from benchmarks.spark_contestants import PeerMissing, peers_folder
from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.client.log_reading import fetch_once
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.local.apache_kafka import QUICK_JVM, KafkaCluster, java
from semel.local.processes import Process
from semel.protocol.batch import iter_headers
from semel.protocol.rows import MarkerType, decode_batch, decode_marker

BENCH = "recovery"
LOOP, SPARK, JAVA = "semel.process", "semel.sink on Spark", "Kafka Streams 4.3.1"
SAFE = 3  # the node that is never killed: it has the sources
VICTIMS = (1, 2)
EVERY_S = 0.05  # a record is fed to each source
COMMIT_MS = 100
TIMEOUT_MS = 60_000
IN_FLIGHT_S = 0.2  # what was being committed at the kill may still end; nothing else can so soon
OUTPUT, TRANSACTIONS, OFFSETS = "output", "__transaction_state", "__consumer_offsets"
LIMIT_S = 300.0
KILLS = 10


# --- the copiers, as programs of their own ---
def copy_with_the_loop(job: dict[str, Any]) -> None:
    import semel

    semel.process(
        job["source"],
        job["output"],
        lambda record: record,
        application_id=job["application"],
        bootstrap_servers=job["brokers"],
        instance="one",
        commit_interval_ms=COMMIT_MS,
        transaction_timeout_ms=TIMEOUT_MS,
    )


def copy_with_spark(job: dict[str, Any]) -> None:
    import semel

    spark = semel.spark_session(master="local[2]", spark__ui__enabled="false", spark__driver__memory="768m")
    spark.sparkContext.setLogLevel("ERROR")
    sink = semel.sink(job["brokers"], application_id=job["application"], topic=job["output"])
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", job["brokers"])
    rows = rows.option("subscribe", job["source"]).option("startingOffsets", "earliest").load()
    writer = rows.selectExpr("key", "value").writeStream.foreachBatch(sink)
    trigger = {"processingTime": f"{COMMIT_MS} milliseconds"}
    writer.option("checkpointLocation", job["checkpoint"]).trigger(**trigger).start().awaitTermination()


PROGRAMS = {LOOP: copy_with_the_loop, SPARK: copy_with_spark}


def start(name: str, job: dict[str, Any]) -> Process:
    if name != JAVA:
        return Process([sys.executable, "-m", "benchmarks.recovery", name, json.dumps(job)])
    jars = peers_folder() / "streams-jars"
    if not jars.is_dir():
        raise PeerMissing("Kafka Streams is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
    program = Path(__file__).parent / "peers" / "StreamsPeer.java"
    logs = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    words = [
        java(),
        "-Xmx512m",
        *QUICK_JVM,
        logs,
        "-cp",
        f"{jars}/*",
        str(program),
        "1",
        "exactly_once_v2",
        str(COMMIT_MS),
    ]
    process = Process(words, stdin=True)
    process.wait_for_line("^ready$", timeout_s=LIMIT_S)
    process.write(f"{job['brokers']} {job['application']} {job['source']} {job['output']}\n")
    return process


class Copier:
    """A running program, and what is in the log of its output: committed records, and when they were committed."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        self.name, self.job = name, job
        self.fed = self.committed = 0
        self.commits_s: list[float] = []  # by the clock of the machine
        self.process = start(name, job)
        self._offset = 0
        self._open: Counter[int] = Counter()  # records of producers whose transaction has not ended

    def transactional_ids(self, cluster: Cluster) -> list[str]:
        """Those of Kafka Streams have a random part."""
        from semel.client.admin.calls import Admin

        with Admin(cluster.settings) as admin:
            listed = [each.transactional_id for each in admin.list_transactions()]
        return [name for name in listed if name.startswith(self.job["application"])]

    def look(self, cluster: Cluster) -> None:
        """Reads what is new in the log. An output without a leader has nothing new."""
        with suppress(KafkaError):
            data = fetch_once(cluster, (self.job["output"], 0), self._offset, Deadline(2.0))
            for at, header in iter_headers(data):
                self._offset = header.next_offset
                if not header.is_control:
                    self._open[header.producer_id] += header.record_count
                    continue
                marker = decode_marker(decode_batch(data, at).records[0])
                count = self._open.pop(header.producer_id, 0)
                if marker is not None and marker.type is MarkerType.COMMIT:
                    self.committed += count
                    self.commits_s.append(header.base_timestamp / 1000)


class Feeder:
    """Writes numbers to every source, all the time."""

    def __init__(self, brokers: str, copiers: list[Copier]) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": brokers, "log_level": 0, "acks": "1", "linger.ms": "0"})
        self._copiers = copiers
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.feed()

    def feed(self) -> dict[str, int]:
        """One record more to each; how many there are then."""
        with self._lock:
            for copier in self._copiers:
                self._producer.produce(copier.job["source"], str(copier.fed).encode(), key=str(copier.fed).encode())
                copier.fed += 1
            self._producer.poll(0)
            return {copier.name: copier.fed for copier in self._copiers}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._producer.flush(10)


class Site(NamedTuple):
    nodes: KafkaCluster
    cluster: Cluster
    copiers: list[Copier]
    feeder: Feeder

    def await_all(self, is_done: Callable[[Copier], bool]) -> None:
        began_s = time.monotonic()
        while missing := [copier for copier in self.copiers if not is_done(copier)]:
            for copier in missing:
                if not copier.process.running or time.monotonic() - began_s > LIMIT_S:
                    raise RuntimeError(f"{copier.name} does not go on:\n{copier.process.output[-3000:]}")
                copier.look(self.cluster)

    def settle(self) -> None:
        """Every replica is in sync, and every copier has what was fed in."""
        self.nodes.await_in_sync(LIMIT_S)
        fed = self.feeder.feed()
        self.await_all(lambda copier: copier.committed >= fed[copier.name])

    def place(self, what: str, victim: int) -> None:
        """What is to be hit is led by the victim, everything else by the node that is not killed."""
        for topic, partition, kind in self._led():
            node = victim if kind == what else SAFE
            if self.nodes.partitions(topic)[partition].leader != node:
                self.nodes.prefer(topic, partition, node)
                self.nodes.elect(topic, partition, node)

    def _led(self) -> Iterator[tuple[str, int, str]]:
        for copier in self.copiers:
            yield copier.job["output"], 0, OUTPUT
            if copier.name == SPARK:
                yield f"{copier.job['application']}.ledger", 0, "ledger"
        names = [name for copier in self.copiers for name in copier.transactional_ids(self.cluster)]
        ids = {self.nodes.partition_of(TRANSACTIONS, name) for name in names}
        groups = {self.nodes.partition_of(OFFSETS, copier.job["application"]) for copier in self.copiers}
        yield from ((TRANSACTIONS, partition, TRANSACTIONS) for partition in sorted(ids))
        yield from ((OFFSETS, partition, OFFSETS) for partition in sorted(groups))


@contextmanager
def site(names: list[str]) -> Iterator[Site]:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="semel-recovery-")))
        nodes = stack.enter_context(KafkaCluster(folder / "nodes"))
        jobs = {
            name: {
                "source": f"in-{number}",
                "output": f"out-{number}",
                "application": f"recovery-{number}",
                "brokers": nodes.bootstrap,
                "checkpoint": str(folder / f"checkpoint-{number}"),
            }
            for number, name in enumerate(names)
        }
        admin = AdminClient({"bootstrap.servers": nodes.bootstrap, "log_level": 0})
        topics = [NewTopic(job["source"], 1, replica_assignment=[[SAFE]]) for job in jobs.values()]
        topics += [NewTopic(job["output"], 1, 3) for job in jobs.values()]
        for created in admin.create_topics(topics).values():
            created.result(60)
        copiers = []
        for name, job in jobs.items():
            copier = Copier(name, job)
            stack.callback(copier.process.kill)
            copiers.append(copier)
        feeder = Feeder(nodes.nodes[SAFE].bootstrap, copiers)
        stack.callback(feeder.close)
        settings = ClientSettings.of(bootstrap_servers=nodes.bootstrap, request_timeout_ms=1_000)
        running = Site(nodes, stack.enter_context(Cluster(settings)), copiers, feeder)
        running.settle()
        yield running


def one_kill(running: Site, what: str, victim: int) -> dict[str, float]:
    """Seconds from the kill to the first commit after it."""
    running.place(what, victim)
    running.settle()
    node = running.nodes.nodes[victim]
    killed_s = time.time()
    node.kill()
    running.await_all(lambda copier: copier.commits_s[-1] > killed_s + IN_FLIGHT_S)
    node.start()
    running.settle()
    after = {copier.name: next(s for s in copier.commits_s if s > killed_s + IN_FLIGHT_S) for copier in running.copiers}
    return {name: commit_s - killed_s for name, commit_s in after.items()}


def check(running: Site) -> None:
    """Every number is in every output, once and in order; read by a client that is not ours."""
    from semel.prove.checker.reading import read

    running.feeder.close()
    running.await_all(lambda copier: copier.committed >= copier.fed)
    for copier in running.copiers:
        found = [int(record.value or b"-1") for record in read(running.nodes.bootstrap, [copier.job["output"]])]
        if found != list(range(copier.fed)):
            raise RuntimeError(f"{copier.name} copied {len(found)} of {copier.fed} records, or not in order")


def run(report: Report, quick: bool = False, kills: int = KILLS) -> None:
    """`kills` of each kind."""
    kills = 2 if quick else kills
    names = [LOOP, JAVA] if quick else [LOOP, SPARK, JAVA]
    cases = {"leader killed": OUTPUT, "coordinator killed": TRANSACTIONS}
    values: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in cases}
    with site(names) as running:
        for number in range(kills):
            for case, what in cases.items():
                for name, took_s in one_kill(running, what, VICTIMS[number % 2]).items():
                    values[case][name].append(took_s)
                said = ", ".join(f"{name} {took[-1]:.2f} s" for name, took in values[case].items())
                print(f"{case} {number + 1}/{kills}: {said}", file=sys.stderr, flush=True)
        check(running)
    for case, found in values.items():
        for subject in names[:-1]:
            pair = {subject: found[subject], JAVA: found[JAVA]}
            compare(
                report, bench=BENCH, case=f"{case}, {subject}", unit="s", values=pair, better="lower", subject=subject
            )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        collected = Collected(as_json=False)
        run(collected, kills=int(sys.argv[1]) if len(sys.argv) > 1 else KILLS)
        print(table(collected.rows))
