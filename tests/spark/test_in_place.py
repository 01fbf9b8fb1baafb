"""A topic that is copied with its keys needs no shuffle; one whose keys change gets it, after one aborted attempt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.protocol.partitioning import partition_for_key
from semel.spark import write_job
from semel.spark.compat import HAS_ADMISSION_CONTROL
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import Cluster
from tests.support.load import read_all

ROWS = 200
BATCHES = 3 if HAS_ADMISSION_CONTROL else 1  # PySpark 4.1 reads everything at once
pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("cluster", ["semel"], indirect=True)]


@pytest.fixture
def query(cluster: Cluster, tmp_path: Path) -> Query:
    """Its source has every key where Kafka's producers put it."""
    made = Query(cluster, tmp_path, "copy")
    with semel.Producer(bootstrap_servers=made.bootstrap) as producer:
        for n in range(ROWS):
            producer.send(made.source, key=f"key-{n}".encode(), value=str(n).encode())
    return made


@pytest.fixture
def shuffles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every batch that was shuffled."""
    seen: list[int] = []
    shuffled = write_job.written

    def counted(*arguments: Any) -> Any:
        seen.append(1)
        return shuffled(*arguments)

    monkeypatch.setattr(write_job, "written", counted)
    return seen


def copied(session: Any, query: Query, prefix: str = "key-", **options: Any) -> list[Any]:
    """The reports of the batches; what they wrote is complete, and every row is where its key belongs."""
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output, **options)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source, maxOffsetsPerTrigger=ROWS // 3 + 2).load()
    query.run_through(rows.selectExpr(f"concat('{prefix}', cast(value AS STRING)) AS key", "value"), sink)
    found = list(read_all(query.bootstrap, query.output, PARTITIONS))
    assert Counter(value for _, _, value in found) == Counter(str(n).encode() for n in range(ROWS))
    for partition, _, value in found:
        assert partition == partition_for_key(prefix.encode() + (value or b""), PARTITIONS)
    return list(sink.reports)


def test_topic_that_is_copied_with_its_keys_is_not_shuffled(session: Any, query: Query, shuffles: list[int]) -> None:
    reports = copied(session, query)
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert shuffles == []


def test_keys_that_change_are_noticed_and_shuffled_from_then_on(
    session: Any, query: Query, shuffles: list[int]
) -> None:
    reports = copied(session, query, "other-")
    assert [report.attempts for report in reports] == [2, *[1] * (BATCHES - 1)]
    assert len(shuffles) == BATCHES


def test_attempt_that_died_costs_its_batch_a_shuffle_and_no_other(
    session: Any, query: Query, shuffles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, died = write_job.collected, []

    def first_dies(*arguments: Any) -> Any:
        if not died:
            died.append(1)
            raise RuntimeError("PythonException: OwnerStalledError: another attempt at this task opened it first")
        return collected(*arguments)

    monkeypatch.setattr(write_job, "collected", first_dies)
    reports = copied(session, query)
    assert [report.attempts for report in reports] == [2, *[1] * (BATCHES - 1)]
    assert died == shuffles == [1]


def test_source_whose_keys_are_elsewhere_is_shuffled_from_the_start(
    session: Any, cluster: Cluster, tmp_path: Path, shuffles: list[int]
) -> None:
    reports = copied(session, Query(cluster, tmp_path, "copy", ROWS))
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert len(shuffles) == BATCHES


def test_shuffle_can_be_asked_for(session: Any, query: Query, shuffles: list[int]) -> None:
    reports = copied(session, query, shuffle="always")
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert len(shuffles) == BATCHES
