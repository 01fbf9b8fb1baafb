"""Options with which the JVMs of Spark and Kafka start in a third of the processor time: tests start a hundred of them.

A JVM that lives for seconds needs neither its second compiler nor several threads to collect garbage; and the classes
are mapped from an archive (class data sharing) instead of being parsed from two hundred jars each time.
`python -m tests.support.jvm` writes the archives; `make test` does it once. Without them tests run too, only slower.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from semel.local.apache_kafka import QUICK_JVM, ApacheKafka, KafkaMissing, ToolFailed, class_archive
from semel.local.processes import Process, ProcessFailed

FOLDER = Path(__file__).resolve().parents[2] / ".cache/jvm"
TIMEOUT_S = 1200  # 20 s where nothing else runs

# What the drivers of tests load: a session, SQL, a stream with state, foreachBatch.
PROGRAM = """
import sys, tempfile
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.extraJavaOptions", sys.argv[1])
spark = builder.getOrCreate()
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
counted = rows.withWatermark("timestamp", "1 second").groupBy("value").count()
with tempfile.TemporaryDirectory() as folder:
    query = (
        counted.writeStream.foreachBatch(lambda frame, _: frame.mapInArrow(lambda all: all, frame.schema).collect())
        .outputMode("update").option("checkpointLocation", folder).trigger(once=True).start()
    )
    query.awaitTermination()
machine = spark.sparkContext._gateway.proc
spark.stop()
machine.stdin.close()  # it ends, and writes the archive
sys.exit(machine.wait())
"""


def spark_options() -> str:
    """For drivers, executors, the master and the workers alike."""
    archive = _archive()
    return " ".join([*QUICK_JVM, f"-XX:SharedArchiveFile={archive}"] if archive.exists() else QUICK_JVM)


def _archive() -> Path:
    """Named after all that it depends on, so that another Java or Spark gets one of its own."""
    home = os.environ.get("JAVA_HOME")
    java = Path(shutil.which("java", path=f"{home}/bin" if home else None) or "java").resolve()
    written_ns = java.stat().st_mtime_ns if java.exists() else 0
    spark = importlib.util.find_spec("pyspark")
    place = f"{spark.origin} {importlib.metadata.version('pyspark')}" if spark else ""
    key = f"{java} {written_ns} {place} {PROGRAM}"
    return FOLDER / f"spark-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"


def _write(archive: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(f".{os.getpid()}.new")
    options = " ".join([*QUICK_JVM, f"-XX:ArchiveClassesAtExit={draft}"])
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with Process([sys.executable, "-c", PROGRAM, options], env=environment) as program:
        program.wait(TIMEOUT_S)
    if draft.exists():
        draft.rename(archive)
    else:
        raise ProcessFailed(program.output)


def _write_kafka() -> None:
    """Starts a node, uses it, and writes what it loaded."""
    archive = class_archive()
    draft = archive.with_suffix(f".{os.getpid()}.new")
    with ApacheKafka(jvm=[*QUICK_JVM, f"-XX:ArchiveClassesAtExit={draft}"]) as kafka:
        topic = ("--topic", "first")
        kafka.tool("TopicCommand", "--create", *topic)
        kafka.tool("ConsoleProducer", *topic, stdin="first\n")
        kafka.tool("ConsoleConsumer", *topic, "--from-beginning", "--max-messages", "1")
        kafka.stop()
    draft.rename(archive)


def main() -> None:
    if not _archive().exists():
        # Meanwhile the tests are compiled, once instead of in every process that collects them.
        collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        with subprocess.Popen(collecting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            _try("Spark", lambda: _write(_archive()))
    with suppress(KafkaMissing):  # scripts/kafka has said so
        if not class_archive().exists():
            _try("Apache Kafka", _write_kafka)


def _try(name: str, write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, ProcessFailed, ToolFailed) as error:
        print(f"semel: no class archive, so tests on {name} start slower:\n{error}", file=sys.stderr)


if __name__ == "__main__":
    main()
