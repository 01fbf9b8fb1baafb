"""D6: a stateful query that crashes between EndTxn and Spark's commit log: state and output agree afterwards.

Spark runs the batch again from the state of the batch before. The ledger says that its output is there, so the plan
runs and its rows go nowhere; the state moves on, and the next batch writes what it would have written without the
crash. What each batch must write follows from the numbers in the input.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import Query
from tests.support.broker import KAFKA_IN_FULL, Cluster

ROWS = 300
BATCH = 100 if HAS_ADMISSION_CONTROL else ROWS  # PySpark 4.1 reads everything at once
STATEFUL = {
    "windows": "append",  # an aggregation with a watermark: every window once, when it is over
    "running": "update",  # transformWithState: a running count per key
}
STATEFUL_IN_FULL = [pytest.param(name, marks=pytest.mark.full) if name == "windows" else name for name in STATEFUL]


def check(pipeline: str, found: Counter[str]) -> None:
    if pipeline == "running":  # every batch wrote each key's count up to its end
        ends = range(BATCH, ROWS + 1, BATCH)
        assert found == Counter(f"k{k}:{len(range(k, end, 7))}" for end in ends for k in range(7))
    else:  # all windows but the last ones, which the watermark has not passed: once, and whole
        last = max(int(value.partition(":")[0]) for value in found)
        assert last >= ROWS - 40
        assert found == Counter(f"{start}:10" for start in range(0, last + 10, 10))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
@pytest.mark.parametrize("pipeline", STATEFUL_IN_FULL)
def test_crash_between_the_commit_of_the_output_and_sparks_own(cluster: Cluster, tmp_path: Path, pipeline: str) -> None:
    query = Query(cluster, tmp_path, pipeline, ROWS, mode=STATEFUL[pipeline])
    query.crash("sink.after_commit", batch=2)
    said = query.run()
    assert '"verdict": "already written"' in said  # the replay was noticed
    check(pipeline, query.values())


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["sink.after_write", "sink.after_offsets"])
@pytest.mark.parametrize("pipeline", STATEFUL)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_crash_before_the_commit(cluster: Cluster, tmp_path: Path, pipeline: str, point: str) -> None:
    query = Query(cluster, tmp_path, pipeline, ROWS, mode=STATEFUL[pipeline])
    query.crash(point, batch=3)
    query.run()
    check(pipeline, query.values())


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pipeline", STATEFUL)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_a_batch_that_is_aborted_and_runs_again_counts_once(cluster: Cluster, tmp_path: Path, pipeline: str) -> None:
    flag = tmp_path / "stumbled"
    query = Query(cluster, tmp_path, pipeline, ROWS, mode=STATEFUL[pipeline], stumble=str(flag))
    said = query.run()
    assert flag.exists()
    assert '"attempts": 2' in said
    check(pipeline, query.values())


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_the_stream_writer_keeps_the_same_promise(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "windows", ROWS, writer={})
    query.crash("sink.after_commit", batch=2)
    query.run()
    check("windows", query.values())


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
