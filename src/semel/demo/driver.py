"""The Spark program of the demo: `python -m semel.demo.driver '{"brokers": ...}'`.

It runs a workload's example three times side by side, once for each guarantee, and does nothing that a user's program
would not do, but for the gate that holds the sinks when a kill is planned.
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

from semel.demo.program import GUARANTEES, RETURNED, Gate, play, tell
from semel.demo.workloads import WORKLOADS, DemoTopics

RESTARTS_BORNE = 20
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


class SparkProgram:
    """Three queries, each started again when it fails, as a supervisor would do."""

    def __init__(self, job: dict[str, Any]) -> None:
        import semel
        from semel import faults

        self._job = job
        self.gate = Gate(GUARANTEES, tell)
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
                tell("query_failed", guarantee=guarantee, error=str(error)[:ERROR_CHARS])
                if self._failures > RESTARTS_BORNE:
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
            on_batch=lambda report: tell("batch", guarantee=guarantee, **report._asdict()),
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
                tell("batch_failed", guarantee=guarantee, error=str(error)[:ERROR_CHARS])
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


if __name__ == "__main__":
    play(SparkProgram(json.loads(sys.argv[1])))
