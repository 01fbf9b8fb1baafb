"""Who takes part in the Spark benchmark. Each runs in a process of its own and copies one topic to another.

Spark programs keep one warm session and are timed from the making of the query to its end. Kafka Streams and Quix
Streams are timed from their first record until the group's committed offsets have reached the end: joining the group
is not held against them. So semel is compared with them from the moment at which Spark begins with the first batch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import benchmarks.peers as peers
from benchmarks.spark_topics import PARTITIONS, Input, fresh_topic, removed
from semel.local.apache_kafka import KafkaMissing, java, kafka_libs
from semel.local.processes import Process

CORES = 2
START_S = 180
RUN_S = 300
COMMIT_MS = 100
MANY = 1_000_000_000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PROGRAMS = Path(peers.__file__).parent
STREAMS_WORKS = {
    "filter and re-key": "rekey",
    "windowed count": "count",
    "static join": "join",
    "several topics": "topics",
}
_numbers = itertools.count(1)


class PeerMissing(Exception):
    """A peer that is not on this machine; the message says how to get it."""


class Job(NamedTuple):
    """From one topic to another, or to several."""

    bootstrap: str
    source: Input
    batches: int = 1
    last_offsets: int | None = None  # read only so many, from the end
    work: str = "copy"  # or another one of `peers/spark_jobs.py`
    targets: tuple[str, ...] = ()  # where it writes to several
    sink: dict[str, Any] | None = None  # options of semel's sink, to try others than the default

    @property
    def per_batch(self) -> int:
        """Shares of partitions are rounded down: a few more, or there is another batch for the rest."""
        return (self.last_offsets or self.source.offset_count) // self.batches + 4 * PARTITIONS

    @property
    def starting(self) -> str:
        if self.last_offsets is None:
            return "earliest"
        each = self.last_offsets // PARTITIONS
        return json.dumps({self.source.topic: {str(p): last - each for (_, p), last in self.source.lasts.items()}})


class Result(NamedTuple):
    seconds: float
    details: dict[str, Any] | None = None

    @property
    def running_seconds(self) -> float:
        """Without the start, as those are timed that join a group first."""
        return float((self.details or {}).get("running_seconds", self.seconds))


class Contestant(Protocol):
    name: str

    def copy(self, job: Job, target: str) -> Result: ...

    def close(self) -> None: ...


def peers_folder() -> Path:
    for base in (Path.cwd(), *Path.cwd().parents):
        if (base / ".cache/bench-peers").is_dir():
            return base / ".cache/bench-peers"
    raise PeerMissing("there is no .cache/bench-peers; `scripts/bench-peers` fetches what semel is compared with")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process and all below it, by program: java, python. Empty where there is no /proc."""
    found: dict[str, float] = {}
    parents, stats = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            stats[int(path.parent.name)] = (name, sum(int(fields[n]) for n in (11, 12, 13, 14)) / CLOCK_TICKS)
            parents[int(path.parent.name)] = int(fields[1])
    for child, (name, seconds) in stats.items():
        above = child
        while above not in (pid, 0, 1):
            above = parents.get(above, 0)
        if above == pid:
            kind = "java" if name == "java" else "python"
            found[kind] = found.get(kind, 0.0) + seconds
    return found


def peers_there(
    bench: str, makers: Mapping[str, Callable[[], Contestant]], stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    """Those that are on this machine; the others are named."""
    there = {}
    for name, make in makers.items():
        try:
            there[name] = make()
        except (PeerMissing, KafkaMissing) as error:
            print(f"semel bench {bench}: *** {name} is SKIPPED: {error} ***", file=sys.stderr, flush=True)
            continue
        stack.callback(there[name].close)
    return there


def run_job(contestant: Contestant, job: Job, check: bool) -> Result:
    """One copy into a fresh topic, which is deleted afterwards."""
    target = fresh_topic(job.bootstrap, "bench-out")
    try:
        result = contestant.copy(job, target)
        if check:
            job.source.compare(job.bootstrap, target, contestant.name)
        return result
    finally:
        removed(job.bootstrap, target)


class SparkProgram:
    """`peers/spark_copy.py` in one of its kinds."""

    def __init__(
        self,
        kind: str,
        name: str,
        python: Path,
        jars: list[Path],
        env: dict[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="semel-bench-spark-"))
        settings = {"cores": CORES, "jars": [str(jar) for jar in jars], "conf": dict(conf or {})}
        command: list[str | Path] = [python, PROGRAMS / "spark_copy.py", kind, json.dumps(settings)]
        self._process = Process(command, env=env, cwd=self._folder, stdin=True)
        self._process.wait_for_line(r'^\{"ready"', START_S)

    def _words(self, job: Job, target: str) -> dict[str, Any]:
        number = next(_numbers)
        words = {
            "brokers": job.bootstrap,
            "source": job.source.topic,
            "target": target,
            "per_batch": job.per_batch,
            "starting": job.starting,
            "id": f"bench-{time.time_ns()}",
            "checkpoint": str(self._folder / f"checkpoint-{number}"),
            "work": job.work,
            "sink": job.sink or {},
        }
        if job.targets:
            words["targets"] = job.targets
        return words

    @contextlib.contextmanager
    def streaming(self, job: Job, target: str, trigger_ms: int) -> Iterator[dict[str, Any]]:
        """The query runs until the end of the block; what it reports then is in the dict."""
        answer: dict[str, Any] = {}
        words = {**self._words(job, target), "per_batch": MANY, "trigger_ms": trigger_ms}
        seen = self._process.line_count
        self._process.write(json.dumps(words) + "\n")
        self._process.wait_for_line(r'^\{"started"', RUN_S, after=seen)
        try:
            yield answer
        finally:
            self._process.write("stop\n")
            answer.update(self._answer(seen))

    def _answer(self, seen: int) -> dict[str, Any]:
        line = self._process.wait_for_line(r'^\{"(seconds|error)".*$', RUN_S, after=seen)[0]
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def copy(self, job: Job, target: str) -> Result:
        words = self._words(job, target)
        seen = self._process.line_count
        before = cpu_seconds(self._process.pid)
        self._process.write(json.dumps(words) + "\n")
        answer = self._answer(seen)
        ran = sum(1 for batch in answer["batches"] if "addBatch" in batch)
        if ran not in (job.batches, job.batches + 1):  # a query that keeps state may end with a batch without rows
            raise RuntimeError(f"{self.name} ran {ran} batches, {job.batches} were requested")
        after = cpu_seconds(self._process.pid)
        answer["cpu_seconds"] = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
        return Result(answer["seconds"], answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def semel_frame(env: dict[str, str] | None = None, conf: Mapping[str, str] | None = None) -> SparkProgram:
    return SparkProgram("semel", "semel", Path(sys.executable), [], env, conf)


def semel_json() -> SparkProgram:
    """With the source's option jsonSchema."""
    return SparkProgram("json", "semel, jsonSchema", Path(sys.executable), [])


def semel_fast(env: dict[str, str] | None = None) -> SparkProgram:
    return SparkProgram("fast", "semel, fast lane", Path(sys.executable), [], env)


def spark_own(name: str = "Spark's own (at-least-once)", conf: Mapping[str, str] | None = None) -> SparkProgram:
    folder = peers_folder()
    jars, python = sorted((folder / "spark-jars").glob("*.jar")), folder / "spark/bin/python"
    if not jars or not (folder / "spark/complete").exists():
        raise PeerMissing("Spark's own Kafka connector is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
    return SparkProgram("spark", name, python.absolute(), [jar.absolute() for jar in jars], conf=conf)


def spark_same() -> SparkProgram:
    """Spark's own connector in a session with the settings that `semel.spark_session()` makes."""
    from semel.spark.session import LOCAL_SETTINGS, SETTINGS

    return spark_own("Spark's own with semel's settings", {**SETTINGS, **LOCAL_SETTINGS})


class KafkaStreams:
    """`peers/StreamsPeer.java`, exactly_once_v2, as many threads as cores."""

    name = "Kafka Streams (exactly_once_v2)"
    program = "StreamsPeer.java"

    def __init__(self) -> None:
        jars = peers_folder() / "streams-jars"
        if not jars.is_dir():
            raise PeerMissing("Kafka Streams is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
        self._folder = Path(tempfile.mkdtemp(prefix="semel-bench-streams-"))
        command = [
            java(),
            "-Xmx1g",
            f"-Djava.io.tmpdir={self._folder}",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        ]
        command += ["-cp", f"{jars.absolute()}/*:{kafka_libs().absolute()}/*", str(PROGRAMS / self.program)]
        self._process = Process([*command, str(CORES), "exactly_once_v2", str(COMMIT_MS)], stdin=True)
        self._process.wait_for_line("^ready", START_S)

    def copy(self, job: Job, target: str) -> Result:
        group = f"bench-{time.time_ns()}"
        seen = self._process.line_count
        self._process.write(" ".join((job.bootstrap, group, *self.words(job, target))) + "\n")
        self._process.wait_for_line("^first", START_S, after=seen)
        seconds = until_committed(job, group)
        self._process.write("stop\n")
        self._process.wait_for_line("^stopped", START_S, after=seen)
        return Result(seconds)

    def words(self, job: Job, target: str) -> tuple[str, ...]:
        return (job.source.topic, target)

    def close(self) -> None:
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class KafkaStreamsJobs(KafkaStreams):
    """`peers/StreamsJobs.java`: what is no copy."""

    program = "StreamsJobs.java"

    def words(self, job: Job, target: str) -> tuple[str, ...]:
        return (STREAMS_WORKS[job.work], job.source.topic, ",".join(job.targets) or target)


class QuixStreams:
    """`peers/quix_peer.py`: one process, which is what it offers."""

    name = "Quix Streams (exactly-once)"
    program = "quix_peer.py"

    def __init__(self) -> None:
        folder = peers_folder() / "quix"
        if not (folder / "complete").exists():
            raise PeerMissing("Quix Streams is not in .cache/bench-peers; `scripts/bench-peers` fetches it")
        self._python = (folder / "bin/python").absolute()
        self._folder = Path(tempfile.mkdtemp(prefix="semel-bench-quix-"))

    def copy(self, job: Job, target: str) -> Result:
        group = f"bench-{time.time_ns()}"
        words: dict[str, Any] = {
            "brokers": job.bootstrap,
            "id": group,
            "source": job.source.topic,
            "commit_s": 1.0,
        }
        words |= self.words(job, target)
        with Process([self._python, PROGRAMS / self.program, json.dumps(words)], cwd=self._folder) as process:
            process.wait_for_line("^first", START_S)
            return Result(until_committed(job, group))

    def words(self, job: Job, target: str) -> dict[str, Any]:
        return {"target": target}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class QuixJobs(QuixStreams):
    """`peers/quix_jobs.py`: what is no copy."""

    program = "quix_jobs.py"

    def words(self, job: Job, target: str) -> dict[str, Any]:
        return {"work": job.work, "targets": job.targets or (target,), "folder": str(self._folder / "state")}


def until_committed(job: Job, group: str) -> float:
    """How long it takes until the committed offsets of the group are at the end of the source."""
    from semel.client.admin import Admin

    started_s = time.perf_counter()
    with Admin(bootstrap_servers=job.bootstrap) as admin:
        while time.perf_counter() - started_s < RUN_S:
            offsets = admin.group_offsets(group)
            reached = {tuple(place): found.offset for place, found in offsets.items()}
            if all(reached.get(place, 0) >= last for place, last in job.source.lasts.items()):
                return time.perf_counter() - started_s
            time.sleep(0.01)
    raise RuntimeError(f"the committed offsets of {group} did not reach the end of {job.source.topic} within {RUN_S} s")
