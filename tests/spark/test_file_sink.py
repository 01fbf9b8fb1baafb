"""Spark's own file sink behind a semel source: a batch that runs again adds nothing for readers with Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import semel
from tests.support.broker import Cluster
from tests.support.reading import create_topic


@pytest.mark.full  # it is Spark's own sink
def test_a_batch_that_runs_again_adds_no_rows_to_files(shared_semel_broker: Any, session: Any, tmp_path: Path) -> None:
    """Fault: Spark's commit of the last batch is gone, as after kill -9 before it was written."""
    cluster = Cluster("semel", shared_semel_broker)
    topic = create_topic(cluster.bootstrap, cluster.unique("to-files"), 2)
    with semel.Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(100):
            producer.send(topic, b"%d" % number)
    checkpoint, target = tmp_path / "checkpoint", str(tmp_path / "files")

    def run() -> int:
        rows = session.readStream.format("semel").option("kafka.bootstrap.servers", cluster.bootstrap)
        rows = rows.option("subscribe", topic).option("startingOffsets", "earliest").load().select("value")
        writer = rows.writeStream.format("parquet").option("path", target).option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return int(query.lastProgress["batchId"])

    last = run()
    (checkpoint / "commits" / str(last)).unlink()
    assert run() == last, "the batch ran again"
    values = [int(row.value) for row in session.read.parquet(target).collect()]
    assert sorted(values) == list(range(100))
