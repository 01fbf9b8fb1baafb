"""How long exactly-once copiers stand still when a node of a Kafka cluster is killed: semel's loop and a Spark query
with semel's sink beside Kafka's own TransactionalMessageCopier, on one cluster of three nodes, under the same kill -9.

    python -m benchmarks.recovery            # or semel bench recovery

Each copier has a source and an output topic of one partition. Before a kill all outputs (or all transaction
coordinators) are brought to one node, and everything else to another one. Measured is the time from the kill to the
commit of the transaction that holds the first record which was fed in after it.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.harness import Collected, Report, compare, table
from semel.local.apache_kafka import tool_command
from semel.local.kafka_cluster import KafkaCluster
from semel.local.processes import Process

BENCH = "recovery"
LOOP, SPARK, JAVA = "semel.process", "semel.sink on Spark", "Kafka's TransactionalMessageCopier"
SAFE = 3  # the node that is never killed: it has the sources
VICTIMS = (1, 2)
EVERY_S = 0.05  # a record is fed to each source
TIMEOUT_MS = 60_000
OUTPUT, TRANSACTIONS, OFFSETS = "output", "__transaction_state", "__consumer_offsets"
LIMIT_S = 120.0
COMMITTED = re.compile(r'^committed (\d+)|"totalProcessed":"?(\d+)')  # records so far; the second is Java's


# --- the copiers, as programs of their own ---
def copy_with_the_loop(job: dict[str, Any]) -> None:
    from semel.patterns.process import Processor

    last = 0

    def copy(record: Any) -> Any:
        nonlocal last
        last = int(record.value)
        return record

    def settled(stats: Any) -> None:
        if stats.commits > commits[0]:
            commits[0] = stats.commits
            print(f"committed {last + 1}", flush=True)

    commits = [0]
    Processor(
        job["source"],
        job["output"],
        copy,
        application_id=job["application"],
        bootstrap_servers=job["brokers"],
        instance="one",
        transaction_timeout_ms=TIMEOUT_MS,
        on_settled=settled,
    ).run()


def copy_with_spark(job: dict[str, Any]) -> None:
    import semel

    total = 0

    def committed(report: Any) -> None:
        nonlocal total
        total += report.rows
        print(f"committed {total}", flush=True)

    spark = semel.spark_session(master="local[2]", spark__ui__enabled="false", spark__driver__memory="768m")
    sink = semel.sink(job["brokers"], application_id=job["application"], topic=job["output"], on_batch=committed)
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", job["brokers"])
    rows = rows.option("subscribe", job["source"]).option("startingOffsets", "earliest").load()
    writer = rows.selectExpr("key", "value").writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", job["checkpoint"]).trigger(processingTime="0 seconds").start()
    query.awaitTermination()


PROGRAMS = {LOOP: copy_with_the_loop, SPARK: copy_with_spark}


def command(name: str, job: dict[str, Any]) -> list[str]:
    if name != JAVA:
        return [sys.executable, "-m", "benchmarks.recovery", name, json.dumps(job)]
    options = {
        "--broker-list": job["brokers"],
        "--input-topic": job["source"],
        "--input-partition": "0",
        "--output-topic": job["output"],
        "--consumer-group": job["application"],
        "--transactional-id": job["application"],
        "--transaction-size": "1000",
        "--transaction-timeout": str(TIMEOUT_MS),
        "--max-messages": "-1",
    }
    words = [word for pair in options.items() for word in pair]
    return tool_command(
        "org.apache.kafka.tools.TransactionalMessageCopier", *words, "--group-mode", "--use-group-metadata"
    )


class Copier:
    """A running program, and how many records it has committed."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        self.name, self.job = name, job
        self.fed = 0
        self.process = Process(command(name, job))
        self._read = self._committed = 0

    @property
    def transactional_id(self) -> str:
        return f"{self.job['application']}-one" if self.name == LOOP else str(self.job["application"])

    def committed(self) -> int:
        lines = self.process.lines(self._read)
        self._read += len(lines)
        for found in filter(None, map(COMMITTED.search, lines)):
            self._committed = int(found[1] or found[2])
        return self._committed


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
    cluster: KafkaCluster
    copiers: list[Copier]
    feeder: Feeder

    def await_all(self, wanted: Callable[[Copier], int], began_s: float) -> dict[str, float]:
        """Until each has committed so many records; after how long each had."""
        took_s: dict[str, float] = {}
        while len(took_s) < len(self.copiers):
            for copier in self.copiers:
                if copier.name not in took_s and copier.committed() >= wanted(copier):
                    took_s[copier.name] = time.monotonic() - began_s
                if not copier.process.running:
                    raise RuntimeError(f"{copier.name} ended:\n{copier.process.output[-2000:]}")
            if time.monotonic() - began_s > LIMIT_S:
                missing = [copier for copier in self.copiers if copier.name not in took_s]
                said = "\n".join(f"{copier.name}: {copier.process.output[-1500:]}" for copier in missing)
                raise RuntimeError(f"no commit within {LIMIT_S:g} s:\n{said}")
            time.sleep(0.005)
        return took_s

    def settle(self) -> None:
        """Every replica is in sync, and every copier has what was fed in."""
        self.cluster.await_in_sync(LIMIT_S)
        fed = self.feeder.feed()
        self.await_all(lambda copier: fed[copier.name], time.monotonic())

    def place(self, what: str, victim: int) -> None:
        """What is to be hit is led by the victim, everything else by the node that is not killed."""
        cluster = self.cluster
        for topic, partition, kind in self._led():
            node = victim if kind == what else SAFE
            if cluster.partitions(topic)[partition].leader != node:
                cluster.prefer(topic, partition, node)
                cluster.elect(topic, partition, node)

    def _led(self) -> Iterator[tuple[str, int, str]]:
        for copier in self.copiers:
            yield copier.job["output"], 0, OUTPUT
            if copier.name == SPARK:
                yield f"{copier.job['application']}.ledger", 0, "ledger"
        ids = {self.cluster.partition_of(TRANSACTIONS, copier.transactional_id) for copier in self.copiers}
        groups = {self.cluster.partition_of(OFFSETS, copier.job["application"]) for copier in self.copiers}
        yield from ((TRANSACTIONS, partition, TRANSACTIONS) for partition in sorted(ids))
        yield from ((OFFSETS, partition, OFFSETS) for partition in sorted(groups))


@contextmanager
def site(names: list[str]) -> Iterator[Site]:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="semel-recovery-")))
        cluster = stack.enter_context(KafkaCluster(folder / "nodes"))
        jobs = {
            name: {
                "source": f"in-{number}",
                "output": f"out-{number}",
                "application": f"recovery-{number}",
                "brokers": cluster.bootstrap,
                "checkpoint": str(folder / f"checkpoint-{number}"),
            }
            for number, name in enumerate(names)
        }
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
        topics = [NewTopic(job["source"], 1, replica_assignment=[[SAFE]]) for job in jobs.values()]
        topics += [NewTopic(job["output"], 1, 3) for job in jobs.values()]
        for created in admin.create_topics(topics).values():
            created.result(60)
        copiers = []
        for name, job in jobs.items():
            copier = Copier(name, job)
            stack.callback(copier.process.kill)
            copiers.append(copier)
        feeder = Feeder(cluster.nodes[SAFE].bootstrap, copiers)
        stack.callback(feeder.close)
        running = Site(cluster, copiers, feeder)
        running.settle()
        yield running


def one_kill(running: Site, what: str, victim: int) -> dict[str, float]:
    running.place(what, victim)
    running.settle()
    node = running.cluster.nodes[victim]
    began_s = time.monotonic()
    node.kill()
    fed = running.feeder.feed()
    took_s = running.await_all(lambda copier: fed[copier.name], began_s)
    node.start()
    running.settle()
    return took_s


def check(running: Site) -> None:
    """Every number is in every output, once and in order."""
    from semel.prove.checker.reading import read

    running.feeder.close()
    running.await_all(lambda copier: copier.fed, time.monotonic())
    for copier in running.copiers:
        found = [int(record.value or b"-1") for record in read(running.cluster.bootstrap, [copier.job["output"]])]
        if found != list(range(copier.fed)):
            raise RuntimeError(f"{copier.name} copied {len(found)} of {copier.fed} records, or not in order")


def run(report: Report, quick: bool = False) -> None:
    kills = 2 if quick else 10
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
        run(collected, quick="--quick" in sys.argv)
        print(table(collected.rows))
