"""What a user sees of each batch: a report in the sink, a call, a line in the log, and the listener's events."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming import StreamingQueryListener

import semel
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import Query
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S

ROWS = 90
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


@pytest.mark.timeout(300)
@SEMEL
def test_rows_retries_and_times_of_every_batch_are_visible(
    session: Any, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    called: list[Any] = []
    lags: list[int] = []
    listened: dict[int, Any] = {}
    complete = threading.Event()

    def on_batch(report: Any) -> None:
        called.append(report)
        lags.append(sum(sink.metrics().records_lag.values()))  # of the batch before: this one is not done yet
        raise RuntimeError("a mistake in the user's own code")

    sink = semel.sink(
        query.bootstrap, application_id=query.application_id, topic=query.output, max_attempts=3, on_batch=on_batch
    )

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None: ...

        def onQueryProgress(self, event: Any) -> None:
            listened[event.progress.batchId] = sink.report(event.progress.batchId)

        def onQueryTerminated(self, event: Any) -> None:
            complete.set()

    flag = tmp_path / "failed once"

    def stumble(batches: Any) -> Any:
        """One task of the first batch fails, once: the batch is aborted and runs again."""
        for batch in batches:
            if not flag.exists():
                flag.write_text("")
                raise RuntimeError("stumbled")
            yield batch

    listener = Listener()
    session.streams.addListener(listener)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source, maxOffsetsPerTrigger="40").load()
    with caplog.at_level(logging.INFO, "semel.spark"):
        running = (
            rows.selectExpr("key", "value")
            .mapInArrow(stumble, "key BINARY, value BINARY")
            .writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(query.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert running.awaitTermination(120)
    assert complete.wait(PATIENCE_S)
    session.streams.removeListener(listener)
    sink.close()
    sizes = [40, 40, 10] if HAS_ADMISSION_CONTROL else [90]
    assert [report.rows for report in sink.reports] == sizes == [report.rows for report in called]
    assert [report.attempts for report in sink.reports] == [2] + [1] * (len(sizes) - 1)
    assert all(report.write_ms > 0 and report.commit_ms > 0 for report in sink.reports)
    assert [listened[n].rows for n in range(len(sizes))] == sizes
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any("batch 0 write: " in line and "attempt 2" in line for line in lines)
    assert any("on_batch failed" in record.getMessage() for record in caplog.records)
    assert sink.report(99) is None
    found = sink.metrics()
    assert (found.batch_total, found.commit_total, found.replay_total) == (len(sizes), len(sizes), 0)
    assert (found.abort_total, found.retry_total, found.error_total) == (1, 1, 0)
    assert (found.row_total, found.ledger_sequence, found.last_batch_id) == (90, len(sizes) - 1, len(sizes) - 1)
    assert set(found.stage_seconds_total) == {"decide", "begin", "write", "audit", "commit"}
    assert all(seconds > 0 for seconds in found.stage_seconds_total.values())
    assert found.last_batch_seconds is not None
    if HAS_ADMISSION_CONTROL:
        assert lags == [0, 50, 10]
        assert set(found.records_lag.values()) == {0}
        labels = f'application_id="{found.application_id}",topic="{query.source}",partition="0"'
        assert f"semel_sink_records_lag{{{labels}}} 0\n" in semel.prometheus(found)
    assert f'semel_sink_row_total{{application_id="{found.application_id}"}} 90\n' in semel.prometheus(found)
