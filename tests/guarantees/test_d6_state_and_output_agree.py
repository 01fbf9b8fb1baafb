"""D6: a stateful query that crashes between EndTxn and Spark's commit log: state and output agree afterwards.

Spark runs the batch again from the state of the batch before. The ledger says that its output is there, so the plan
runs and its rows go nowhere; the state moves on, and the next batch writes what it would have written without the
crash. Each test compares with a query over the same input that never crashed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.spark.queries import Query
from tests.support.broker import Cluster

ROWS = 400  # four batches of 100
KAFKA_IN_FULL = pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])
STATEFUL = {
    "windows": "append",  # an aggregation with a watermark: every window once, when it is over
    "running": "update",  # transformWithState: a running count per key
}


def expected(cluster: Cluster, folder: Path, pipeline: str) -> tuple[Query, object]:
    """The same query without a crash, and a second one to crash, over the same input."""
    calm = Query(cluster, folder, pipeline, ROWS, mode=STATEFUL[pipeline])
    calm.run()
    wanted = calm.values()
    assert wanted
    crashed = Query(cluster, folder, pipeline, mode=STATEFUL[pipeline])
    crashed.source = calm.source
    return crashed, wanted


def check_counts(pipeline: str, query: Query) -> None:
    """By arithmetic too, so that both queries cannot be wrong together."""
    found = {
        key: int(count) for key, _, count in (value.partition(":") for value in sorted(query.values(), key=_number))
    }
    if pipeline == "running":
        assert found == {f"k{k}": len(range(k, ROWS, 7)) for k in range(7)}
    else:
        closed = {str(start): 10 for start in range(0, max(map(int, found)) + 10, 10)}
        assert found == closed
        assert len(found) >= ROWS // 10 - 3  # all but the last windows, which the watermark has not passed


def _number(value: str) -> int:
    return int(value.partition(":")[2])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
@pytest.mark.parametrize("pipeline", STATEFUL)
def test_crash_between_the_commit_of_the_output_and_sparks_own(cluster: Cluster, tmp_path: Path, pipeline: str) -> None:
    query, wanted = expected(cluster, tmp_path, pipeline)
    query.crash("sink.after_commit", batch=2)
    said = query.run()
    assert '"verdict": "already written"' in said  # the replay was noticed
    assert query.values() == wanted
    check_counts(pipeline, query)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["sink.after_write", "sink.after_positions"])
@pytest.mark.parametrize("pipeline", STATEFUL)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_crash_before_the_commit(cluster: Cluster, tmp_path: Path, pipeline: str, point: str) -> None:
    query, wanted = expected(cluster, tmp_path, pipeline)
    query.crash(point, batch=3)
    query.run()
    assert query.values() == wanted
    check_counts(pipeline, query)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_the_stream_writer_keeps_the_same_promise(cluster: Cluster, tmp_path: Path) -> None:
    query, wanted = expected(cluster, tmp_path, "running")
    query.job["writer"] = {}
    query.job["mode"] = "append"  # transformWithState in update mode, into a writer that appends
    query.crash("sink.after_commit", batch=2)
    query.run()
    assert query.values() == wanted


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_a_lost_checkpoint_of_a_stateful_query_is_not_passed_over_in_silence(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "running", 100, mode="update")
    query.run()
    before = query.values()
    shutil.rmtree(query.checkpoint)
    query.fill(100)
    said = query.failure(starting="committed")
    assert "accept_lost_state" in said
    assert query.values() == before  # nothing was written
    shutil.rmtree(query.checkpoint)
    query.run(starting="committed", sink={"accept_lost_state": True})
    assert query.values() - before  # counts that start anew, as the user said
