"""The programs of the demo: `python -m semel.demo.drivers ENGINE '{"brokers": ...}'`.

Each runs a workload's example three times side by side, once for each guarantee, and does nothing that a user's program
would not do, but for the gate that holds the pipelines when a kill is planned.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.types import ConsumerRecord
from semel.demo.program import AT_MOST_ONCE, COMMITTED, GUARANTEES, HALF_WAY, RETURNED, Gate
from semel.demo.workloads import WORKLOADS, DemoTopics, DemoWorkload
from semel.patterns.process import Output, Processor, Stats

# --- to and from the process that started this one: events as lines of JSON, commands as lines of words ---
_telling = threading.Lock()


def send_event(event: str, **facts: Any) -> None:
    """One line on stdout."""
    with _telling:
        print(json.dumps({"event": event, "at_s": time.time(), **facts}), flush=True)


# --- on Spark ---
RESTARTS_MAX = 20
ERROR_CHARS = 1_000  # Spark searches the message of an error with a regular expression that long ones overflow
# A small program on a small machine: what makes Spark start quickly, and nothing that changes what it does.
SETTINGS = {
    "spark__ui__enabled": "false",
    "spark__ui__showConsoleProgress": "false",
    "spark__sql__shuffle__partitions": "2",
    "spark__sql__session__timeZone": "UTC",
    "spark__sql__codegen__wholeStage": "false",
    "spark__driver__extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark__sql__streaming__stateStore__providerClass": (
        "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
    ),
}
TRIGGER = "500 milliseconds"


def _first_cause(error: BaseException) -> str:
    """Spark's message quotes the plan, and does not say what the failure began with."""
    cause: BaseException | None = error
    while (below := getattr(cause, "_cause", None)) is not None:
        cause = below
    return "" if cause is error else f"{cause}; "


class SparkProgram:
    """Three queries, each started again when it fails, as a supervisor would do."""

    def __init__(self, job: dict[str, Any]) -> None:
        import semel
        from semel import faults

        self._job = job
        self.gate = Gate(GUARANTEES, send_event)
        faults.install(self.gate)
        self._spark = semel.spark_session("semel demo", master="local[2]", **SETTINGS)
        self._spark.sparkContext.setLogLevel("OFF")
        self._pipeline = WORKLOADS[job["workload"]].example().pipeline
        self._failures = 0
        self._finishing = threading.Event()

    def pipelines(self) -> list[Callable[[], None]]:
        return [partial(self._keep, guarantee) for guarantee in GUARANTEES]

    def finish(self) -> None:
        """Every query ends when it has read everything."""
        self._finishing.set()

    def _keep(self, guarantee: str) -> None:
        while True:
            try:
                self._await(self._start(guarantee))
                return
            except Exception as error:
                self._failures += 1
                send_event("query_failed", guarantee=guarantee, error=f"{_first_cause(error)}{error}"[:ERROR_CHARS])
                if self._failures > RESTARTS_MAX:
                    os._exit(1)
                time.sleep(0.3)

    def _start(self, guarantee: str) -> Any:
        import semel

        topics = DemoTopics.of(self._job["prefix"], guarantee)
        sink = semel.sink(
            self._job["brokers"],
            application_id=topics.application_id,
            topic=topics.output,
            dead_letter_topic=topics.rejected,
            bad_column="reason",
            guarantee=guarantee,
            on_batch=lambda report: send_event("batch", guarantee=guarantee, **report._asdict()),
        )
        source = {"kafka.bootstrap.servers": self._job["brokers"], "subscribe": topics.source}
        rows = self._spark.readStream.format("semel").options(startingOffsets="earliest", **source).load()
        stream = self._pipeline(rows).writeStream.foreachBatch(self._held(sink, guarantee))
        checkpoint = f"{self._job['folder']}/{guarantee}"
        return stream.trigger(processingTime=TRIGGER).option("checkpointLocation", checkpoint).start()

    def _held(self, sink: Any, guarantee: str) -> Any:
        """The sink, known to the gate."""

        def write(df: Any, batch_id: int) -> None:
            self.gate.work_for(guarantee)
            try:
                sink(df, batch_id)
            except Exception as error:
                send_event("batch_failed", guarantee=guarantee, error=str(error)[:ERROR_CHARS])
                raise RuntimeError(str(error)[:ERROR_CHARS]) from None
            self.gate.hit(RETURNED)
            self.gate.count(guarantee)
            self.gate.work_for(None)

        return write

    def _await(self, query: Any) -> None:
        """Until it fails, or has nothing left to do after `finish`."""
        while not self._finishing.is_set():
            if query.awaitTermination(0.2):
                raise RuntimeError("the query stopped by itself")
        query.processAllAvailable()
        query.stop()


# --- where there is no Java: the same three pipelines as processing loops ---
COMMIT_INTERVAL_MS = 600
HALF_WAY_S = 0.35  # into a unit of work: by then some of its output has been sent
SESSION_TIMEOUT_MS = 6_000


class Loop:
    """One pipeline. It stands at its half-way point when a part of its output is sent and nothing is committed; at
    most once, when offsets are committed and their output is not sent."""

    def __init__(self, workload: DemoWorkload, topics: DemoTopics, guarantee: str, brokers: str, gate: Gate) -> None:
        self._workload = workload
        self._topics = topics
        self._guarantee = guarantee
        self._gate = gate
        self._half_way, self._committed = HALF_WAY[guarantee], COMMITTED[guarantee]
        self._began_s: float | None = None
        self._settled = 0
        self.processor = Processor(
            topics.source,
            topics.output,
            self._step,
            application_id=topics.application_id,
            guarantee=guarantee,
            bootstrap_servers=brokers,
            instance="demo",
            commit_interval_ms=COMMIT_INTERVAL_MS,
            consumer={"group_instance_id": "demo", "session_timeout_ms": SESSION_TIMEOUT_MS},
            on_settled=self._after_commit,
        )

    def _step(self, record: ConsumerRecord) -> list[Output]:
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        if self._guarantee == AT_MOST_ONCE or now_s - self._began_s > HALF_WAY_S:
            self._gate.hit(self._half_way)
        value = record.value or b""
        made = self._workload.step(value)
        if made is None:
            return [Output(value, record.key, topic=self._topics.rejected)]
        return [Output(event.value, event.key) for event in made]

    def _after_commit(self, stats: Stats) -> None:
        self._began_s = None
        rows, self._settled = stats.records_in - self._settled, stats.records_in
        send_event("batch", guarantee=self._guarantee, batch_id=stats.commits, rows=rows, verdict="write")
        self._gate.hit(self._committed)
        self._gate.count(self._guarantee)

    def run(self) -> None:
        self._gate.work_for(self._guarantee)
        try:
            self.processor.run()
        except Exception as error:
            send_event("query_failed", guarantee=self._guarantee, error=str(error)[:1_000])
            os._exit(1)


class LoopProgram:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self.gate = Gate(GUARANTEES, send_event)
        workload = WORKLOADS[job["workload"]]
        self._topics = {g: DemoTopics.of(job["prefix"], g) for g in GUARANTEES}
        self._loops = [Loop(workload, self._topics[g], g, job["brokers"], self.gate) for g in GUARANTEES]

    def pipelines(self) -> list[Callable[[], None]]:
        return [loop.run for loop in self._loops]

    def finish(self) -> None:
        """Stops the loops when they have read everything."""
        with Admin(bootstrap_servers=self._job["brokers"]) as admin:
            for guarantee, loop in zip(GUARANTEES, self._loops, strict=True):
                while not is_drained(self._job["brokers"], admin, self._topics[guarantee]):
                    time.sleep(0.05)
                loop.processor.stop()


def is_drained(brokers: str, admin: Admin, topics: DemoTopics) -> bool:
    """Nothing is left to read. Lag alone would not say so: what was aborted at the end of a partition stays lag."""
    places = admin.group_lag(topics.application_id)
    behind = {(place.topic, place.partition): place for place in places if place.lag != 0}
    if not places or any(place.committed is None for place in behind.values()):
        return False
    with Consumer(bootstrap_servers=brokers) as reader:
        reader.assign(behind)
        for partition, place in behind.items():
            reader.seek(partition, place.committed or 0)
        while any(reader.position(partition) < (place.end or 0) for partition, place in behind.items()):
            if reader.poll_table(timeout_ms=100).num_rows:
                return False
    return True


# --- running a program ---
def run_program(program: SparkProgram | LoopProgram) -> None:
    """Runs the program to its end, and obeys meanwhile."""
    send_event("started")
    threading.Thread(target=follow_commands, args=(program.gate, program.finish), daemon=True).start()
    threads = [threading.Thread(target=pipeline) for pipeline in program.pipelines()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    send_event("finished")
    sys.stdout.flush()
    os._exit(0)  # Spark's own good-bye takes seconds, and nothing is left to lose


def follow_commands(gate: Gate, finish: Callable[[], None]) -> None:
    """Commands from stdin: `arm FAULT NTH`, `open`, `finish`. When stdin ends, so does the program."""
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "arm":
            gate.arm(rest[0], int(rest[1]))
        elif word == "open":
            gate.open()
        elif word == "finish":
            finish()
    os._exit(0)


PROGRAMS: dict[str, type[SparkProgram | LoopProgram]] = {"spark": SparkProgram, "process": LoopProgram}

if __name__ == "__main__":
    run_program(PROGRAMS[sys.argv[1]](json.loads(sys.argv[2])))
