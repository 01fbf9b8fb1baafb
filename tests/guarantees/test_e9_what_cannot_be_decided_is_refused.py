"""E9: what a sink makes of calls and checkpoints that are not as they should be is never a silent loss or duplicate.

Faults: an older checkpoint restored, one lost, one whose query gives other rows, a sink that is called twice.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.local.brokers import SemelBroker
from semel.spark.base_sink import SinkError
from tests.support.reading import read_values

APP = "ledger-rules"


class Files:
    """A query that copies text files to a topic."""

    def __init__(self, session: Any, broker: SemelBroker, folder: Path) -> None:
        self.session, self.bootstrap, self.folder = session, broker.bootstrap, folder
        self.checkpoint = folder / "checkpoint"
        (folder / "in").mkdir()
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topic("out", 2)
            admin.create_topic("more", 2)

    def add(self, name: str, *lines: str) -> None:
        (self.folder / "in" / name).write_text("".join(f"{line}\n" for line in lines))

    def run(self, function: Any = None, *, checkpoint: bool = True, select: str = "") -> str:
        """What the query says in the end; nothing if it succeeded."""
        sink = semel.sink(self.bootstrap, application_id=APP, topic="out", topics=["more"])
        rows = self.session.readStream.format("text").option("maxFilesPerTrigger", "1").load(str(self.folder / "in"))
        if select:
            rows = rows.groupBy("value").count().selectExpr(f"{select} AS value")
        writer = rows.writeStream.foreachBatch(function(sink) if function else sink).trigger(availableNow=True)
        writer = writer.outputMode("update") if select else writer
        running = (writer.option("checkpointLocation", str(self.checkpoint)) if checkpoint else writer).start()
        try:
            assert running.awaitTermination(300)
        except Exception as error:
            return str(error)
        finally:
            sink.close()
        return ""

    def values(self, topic: str = "out") -> Counter[str]:
        return Counter((value or b"").decode() for _, _, value in read_values(self.bootstrap, topic))


@pytest.fixture
def files(session: Any, semel_broker: SemelBroker, tmp_path: Path) -> Files:
    return Files(session, semel_broker, tmp_path)


@pytest.mark.timeout(400)
def test_older_checkpoint_of_a_file_source_loses_no_rows(files: Files, tmp_path: Path) -> None:
    files.add("a", "1", "2")
    assert not files.run()
    shutil.copytree(files.checkpoint, tmp_path / "old")
    files.add("b", "3", "4")
    assert not files.run()
    shutil.rmtree(files.checkpoint)
    shutil.copytree(tmp_path / "old", files.checkpoint)
    (tmp_path / "in" / "b").unlink()
    files.add("c", "5", "6")  # the older checkpoint plans its next batch over another file, with the same offset
    failure = files.run()
    assert "an older copy" in failure, failure or f"the query succeeded, but the output is {files.values()}"
    assert files.values() == Counter("1234")


@pytest.mark.timeout(400)
def test_second_call_in_one_batch_is_refused_and_one_call_with_both_frames_is_written(files: Files) -> None:
    from pyspark.sql import functions as f

    def frames(df: Any) -> list[Any]:
        return [df, df.select(f.upper("value").alias("value"), f.lit("more").alias("topic"))]

    def twice(sink: Any) -> Any:
        def write(df: Any, batch_id: int) -> None:
            for frame in frames(df):
                sink(frame, batch_id)

        return write

    files.add("a", "x", "y")
    failure = files.run(twice)
    assert "called twice for batch 0" in failure, failure or f"the second frame is lost: {files.values('more')}"
    assert "sink([df_a, df_b], batch_id)" in failure
    files.add("b", "z")
    assert not files.run(lambda sink: lambda df, n: sink(frames(df), n))
    assert files.values() == Counter("xyz")
    assert files.values("more") == Counter("Z")  # batch 0 was written by the first call


@pytest.mark.timeout(400)
def test_query_ends_with_its_error_although_the_stack_of_the_jvm_is_behind_it(files: Files) -> None:
    def failing(sink: Any) -> Any:
        def job(df: Any, *_: Any) -> None:
            try:
                df.sparkSession._jvm.java.lang.Integer.parseInt("x")
            except Exception as error:
                raise SinkError("taken over by another driver") from error

        sink.job = job
        return sink

    files.add("a", "1")
    assert "taken over by another driver" in files.run(failing), "Spark's thread overflowed its stack"


@pytest.mark.timeout(400)
def test_missing_checkpoint_location_is_named_at_the_first_batch_and_in_the_refusal(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.add("a", "1")
    with caplog.at_level(logging.WARNING, "semel.spark"):
        assert not files.run(checkpoint=False)
    assert "no option checkpointLocation" in caplog.text
    failure = files.run(checkpoint=False)
    assert "no option checkpointLocation, so its checkpoint is temporary" in failure, failure
    assert files.values() == Counter("1")


@pytest.mark.timeout(400)
def test_replay_of_a_stateful_query_is_compared_with_what_was_written(files: Files) -> None:
    counts = "concat(value, ':', count)"
    files.add("a", "x", "y", "x")
    assert not files.run(select=counts)
    (files.checkpoint / "commits" / "0").unlink()  # as after a crash between EndTxn and Spark's own log
    assert not files.run(select=counts)
    (files.checkpoint / "commits" / "0").unlink()
    failure = files.run(select="concat(value, ':', count, uuid())")
    assert "gave other rows than it had written (2 rows then, 2 now)" in failure, failure
    assert files.values() == Counter(["x:2", "y:1"])
