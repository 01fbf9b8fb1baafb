"""Less than exactly once, by name: what each mode does at a crash. And sources that are not Kafka."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import Query
from tests.support.broker import Cluster

ROWS = 300
BATCH = 100 if HAS_ADMISSION_CONTROL else ROWS
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_at_least_once_writes_a_batch_again_and_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    mode = {"guarantee": "at_least_once"}
    query.crash("sink.after_write", batch=2, sink=mode)
    query.run(sink=mode)
    found = query.values()
    assert set(found) == {str(n) for n in range(ROWS)}
    assert sum(found.values()) == ROWS + BATCH  # the batch that was written and not yet said to be


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_at_most_once_leaves_a_batch_out_and_writes_nothing_twice(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    mode = {"guarantee": "at_most_once"}
    query.crash("sink.after_offsets", batch=2, sink=mode)
    said = query.run(sink=mode)
    assert '"verdict": "already tried"' in said
    found = query.values()
    assert not found - Counter(str(n) for n in range(ROWS))  # nothing twice, nothing that was not there
    assert sum(found.values()) == ROWS - BATCH


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_files_as_a_source_are_written_once_through_a_crash(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text("\n".join(str(n) for n in range(number * 50, number * 50 + 50)))
    source = {"path": str(folder), "maxFilesPerTrigger": "1"}
    query = Query(cluster, tmp_path, "text", format="text", source=source)
    # A batch that is written already reaches no point: the crashes are in the first, third and fifth batch.
    query.crash("sink.after_commit", batch=1)
    query.crash("sink.after_commit", batch=2)
    query.crash("sink.after_offsets", batch=2)
    query.run()
    assert query.values() == Counter(str(n) for n in range(250))


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_at_most_once_needs_offsets_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    source = {"rowsPerBatch": "10", "startTimestamp": "1000", "advanceMillisPerBatch": "5"}
    query = Query(cluster, tmp_path, "text", format="rate-micro-batch", source=source)
    said = query.failure(sink={"guarantee": "at_most_once"}, trigger={"processingTime": "1 second"})
    assert "at_least_once or exactly_once" in said
