"""Spark is not asked for the size of a batch after every row, while rows are small; what is written is the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.spark import small_rows, write_job
from semel.spark.small_rows import BYTES_PER_BATCH, ROWS_PER_BATCH, UNLIMITED_BYTES
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import Cluster
from tests.support.load import read_all

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("cluster", ["semel"], indirect=True)]
BATCHES = 3 if HAS_ADMISSION_CONTROL else 1  # PySpark 4.1 reads everything at once
ROWS = 300
ROW_BYTES = 2000
REAL_LIMITS_OF = small_rows.limits_of


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch is worth it, and a row of more than ROW_BYTES is large."""
    monkeypatch.setattr(small_rows, "FEW_ROWS", 1)
    monkeypatch.setattr(small_rows, "limits_of", lambda _: small_rows.Limits(50, ROW_BYTES))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits (rows, bytes) of Arrow batches under which each job ran."""
    seen: list[tuple[int, int]] = []
    collected = write_job.collected

    def noted(job: Any, *rest: Any) -> Any:
        conf = job.sparkSession._jsparkSession.sessionState().conf()
        seen.append((conf.arrowMaxRecordsPerBatch(), conf.arrowMaxBytesPerBatch()))
        return collected(job, *rest)

    monkeypatch.setattr(write_job, "collected", noted)
    return seen


def copied(session: Any, cluster: Cluster, path: Path, large: dict[int, dict[str, Any]], **options: Any) -> list[Any]:
    """The reports of the batches of a copy in which some records are other than the rest; the copy is complete."""
    query = Query(cluster, path, "small-rows")
    records = [{"value": b"%d" % n, "key": b"key-%d" % n, **large.get(n, {})} for n in range(ROWS)]
    with semel.Producer(bootstrap_servers=query.bootstrap) as producer:
        for record in records:
            producer.send(query.source, **record)
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output, **options)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source, includeHeaders=True, maxOffsetsPerTrigger=ROWS // 3 + 2)
    query.run_through(rows.load().select("key", "value", "headers"), sink)
    found = Counter(value for _, _, value in read_all(query.bootstrap, query.output, PARTITIONS))
    assert found == Counter(record["value"] for record in records)
    return list(sink.reports)


UNASKED = (50, UNLIMITED_BYTES)


def test_small_rows_are_counted_and_not_asked_for_their_size(
    session: Any, cluster: Cluster, tmp_path: Path, asked: list[tuple[int, int]]
) -> None:
    before = session.conf.get(ROWS_PER_BATCH), session.conf.get(BYTES_PER_BATCH)
    reports = copied(session, cluster, tmp_path, {5: {"value": b"x" * (ROW_BYTES - 100)}})
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert asked == [UNASKED] * BATCHES
    assert (session.conf.get(ROWS_PER_BATCH), session.conf.get(BYTES_PER_BATCH)) == before


@pytest.mark.parametrize(
    "large",
    [
        {"value": b"x" * (ROW_BYTES + 1)},
        {"key": b"x" * (ROW_BYTES + 1)},
        {"headers": [("name", b"x" * 900)] * 3},
        {"headers": [("n" * 900, None)] * 3},
    ],
    ids=["value", "key", "headers", "names"],
)
def test_a_large_row_costs_one_attempt_and_brings_back_the_limit(
    session: Any, cluster: Cluster, tmp_path: Path, asked: list[tuple[int, int]], large: dict[str, Any]
) -> None:
    reports = copied(session, cluster, tmp_path, {ROWS // 2: large})
    assert sorted(report.attempts for report in reports) == [*[1] * (BATCHES - 1), 2]
    tripped = asked.index(next(limits for limits in asked if limits != UNASKED))
    assert asked[:tripped] == [UNASKED] * tripped
    assert tripped > 0
    assert UNASKED not in asked[tripped:]


def test_a_job_that_failed_for_another_reason_brings_back_the_limit_too(
    session: Any, cluster: Cluster, tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth attempt at a task may say that somebody was there before it; who met a large row, and died."""
    collected, died = write_job.collected, []

    def first_dies(*arguments: Any) -> Any:
        result = collected(*arguments)
        if not died:
            died.append(1)
            raise RuntimeError("PythonException: OwnerStalledError: another attempt at this task opened it first")
        return result

    monkeypatch.setattr(write_job, "collected", first_dies)
    reports = copied(session, cluster, tmp_path, {})
    assert [report.attempts for report in reports] == [2, *[1] * (BATCHES - 1)]
    assert asked[0] == UNASKED
    assert UNASKED not in asked[1:]


def test_few_rows_are_not_worth_it(
    session: Any, cluster: Cluster, tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_rows, "FEW_ROWS", 1000)
    copied(session, cluster, tmp_path, {})
    assert asked[0] == UNASKED  # nobody knows yet
    assert UNASKED not in asked[1:]


def test_a_sink_with_one_attempt_keeps_the_limit(
    session: Any, cluster: Cluster, tmp_path: Path, asked: list[tuple[int, int]]
) -> None:
    copied(session, cluster, tmp_path, {}, max_attempts=1)
    assert len(asked) == BATCHES
    assert UNASKED not in asked


def test_limits_follow_the_settings_of_the_session(session: Any, cluster: Cluster) -> None:
    before = {name: session.conf.get(name) for name in (ROWS_PER_BATCH, BYTES_PER_BATCH)}
    found = {}
    try:
        for rows, size in (("10000", "64m"), ("100", "1m"), ("-1", "1m"), ("10000", str(UNLIMITED_BYTES))):
            session.conf.set(ROWS_PER_BATCH, rows)
            session.conf.set(BYTES_PER_BATCH, size)
            found[rows, size] = tuple(REAL_LIMITS_OF(session))
    finally:
        for name, value in before.items():
            session.conf.set(name, value)
    assert found == {
        ("10000", "64m"): (4096, 16384),
        ("100", "1m"): (100, 10485),
        ("-1", "1m"): (4096, 256),
        ("10000", str(UNLIMITED_BYTES)): (4096, 0),  # its user has said that batches may have any size
    }
