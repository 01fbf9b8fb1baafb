"""A Spark program as users write it, run by tests as a process of its own.

python -m tests.spark.driver '{"master": "...", "conf": {...}}'    then one command per line on stdin:

{"number": 1, "do": "start", "job": {...}}   starts a query that copies topics through the sink
{"number": 2, "do": "wait"}                  until it has ended
{"number": 3, "do": "stop"}                  query.stop()

Each is answered by a line `answer NUMBER {...}`. See `tests/support/spark_driver.py` for the other end.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import semel
from semel.spark.sink_options import Precautions
from semel.spark.write_job import reruns, stages_of
from tests.spark import steps


class Program:
    """At most one query at a time."""

    def __init__(self, setup: dict[str, Any]) -> None:
        builder = SparkSession.builder.master(setup["master"]).config("spark.ui.enabled", "false")
        for name, value in setup.get("conf", {}).items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel(setup.get("log", "FATAL"))
        self.sink: Any = None
        self.query: Any = None
        self.changed: list[str] = []  # settings that belong to the last job

    def start(self, job: dict[str, Any]) -> None:
        for name in self.changed:
            self.spark.conf.unset(name)
        self.changed = list(job.get("conf", {}))
        for name, value in job.get("conf", {}).items():
            self.spark.conf.set(name, value)
        self.query = None
        self.sink = self._sink(job)
        if "precautions" in job:
            self.sink.options = replace(self.sink.options, precautions=Precautions(**job["precautions"]))
        writer = self._writer(job).option("checkpointLocation", job["checkpoint"])
        if job.get("available_now", True):
            writer = writer.trigger(availableNow=True)
        self.query = writer.start()

    def _sink(self, job: dict[str, Any]) -> Any:
        if "postgres" not in job:
            return semel.sink(job["brokers"], **job["sink"])
        topics = job.get("topics")
        if topics is None:
            return semel.postgres_sink(**job["postgres"])
        both = semel.SinkTopics(job["brokers"], records=lambda df: df.select("key", "value"), **topics)
        return semel.postgres_sink(**job["postgres"], topics=both)

    def _writer(self, job: dict[str, Any]) -> Any:
        if "fast_lane" not in job:
            return self._rows(job).writeStream.foreachBatch(self.sink)
        source = {"kafka.bootstrap.servers": job["brokers"], **job["source"]}
        return semel.table_pipeline(
            self.spark, source=source, sink=self.sink, function=getattr(steps, job["fast_lane"])
        )

    def _rows(self, job: dict[str, Any]) -> Any:
        options = {"kafka.bootstrap.servers": job["brokers"], **job["source"]}
        if options["startingOffsets"] == "committed" and "postgres" in job:
            options["committedOffsets"] = self.sink.committed_offsets()
        rows = self.spark.readStream.format("semel").options(**options).load()
        if "step" in job:
            name, arguments = job["step"]
            function, columns = getattr(steps, name)(**arguments)
            rows = rows.mapInArrow(function, columns)
        return rows.selectExpr(*job.get("select", ["key", "value"]))

    def wait(self) -> dict[str, Any]:
        error = ""
        if self.query is not None:
            try:
                self.query.awaitTermination()
            except Exception as failure:
                error = str(failure)
        jobs = self._jobs()
        java = self.spark.sparkContext._jsc.sc()
        again = reruns(stages_of(java, jobs)) if jobs else []
        stages = [len(java.statusTracker().getJobInfo(job).get().stageIds()) for job in sorted(jobs)]
        return {"error": error, "reports": self._reports(), "stages_again": again, "stages": stages}

    def _reports(self) -> list[dict[str, Any]]:
        return [report._asdict() for report in self.sink.reports] if self.sink else []

    def _jobs(self) -> Any:
        """Of the query, as Spark numbers them."""
        if self.query is None:
            return []
        java = self.spark.sparkContext._jsc.sc()
        java.listenerBus().waitUntilEmpty(10_000)
        return java.statusTracker().getJobIdsForGroup(str(self.query.runId))

    def stop(self) -> dict[str, Any]:
        self.query.stop()
        return self.wait()

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "start":
            self.start(command["job"])
            return {"error": ""}
        return self.wait() if command["do"] == "wait" else self.stop()


def main(setup: dict[str, Any]) -> None:
    program = Program(setup)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = program.obey(command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "reports": []}
        print("answer", command["number"], json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
