"""A topic that is copied with its keys needs no shuffle; one whose keys change gets it, and no attempt is aborted."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]

import semel
from semel.protocol.partitioning import partition_for_key
from semel.spark import in_place, write_job
from semel.spark.source import HAS_ADMISSION_CONTROL
from semel.spark.writing import OwnerStalledError, failure_report
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import Cluster
from tests.support.reading import read_values

ROWS = 200
RIGHT = 100  # so many keys of a source are where they belong, in which others are not
KEEP = ("cast(key AS STRING) AS key", "value")
CHANGE = ("concat('other-', cast(value AS STRING)) AS key", "value")
MOST_QUESTIONS = 115
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


@pytest.fixture
def collects(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every job that Spark ran: whether it failed. A task that fails is an ERROR in Spark's log."""
    seen: list[bool] = []
    collected = write_job._collect

    def noted(*arguments: Any) -> Any:
        seen.append(True)
        result = collected(*arguments)
        seen[-1] = False
        return result

    monkeypatch.setattr(write_job, "_collect", noted)
    return seen


def copied(session: Any, query: Query, *select: str, **options: Any) -> list[Any]:
    """The reports of the batches; what they wrote is complete."""
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output, **options)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source, maxOffsetsPerTrigger=ROWS // 3 + 2).load()
    query.run_through(rows.selectExpr(*select or KEEP), sink)
    found = read_values(query.bootstrap, query.output)
    assert Counter(number(value) for _, _, value in found) == Counter(range(ROWS))
    return list(sink.reports)


def number(value: bytes | None) -> int:
    return int((value or b"").split(b" ")[0])


def places(query: Query, prefix: str = "key-") -> tuple[set[int], set[int]]:
    """How far rows are from where their key belongs, and from where an even or odd number was read."""
    found = [(partition, number(value)) for partition, _, value in read_values(query.bootstrap, query.output)]
    by_key = {partition - partition_for_key(f"{prefix}{n}".encode(), PARTITIONS) for partition, n in found}
    return by_key, {partition - n % PARTITIONS for partition, n in found}


def test_topic_that_is_copied_with_its_keys_is_not_shuffled(session: Any, query: Query, shuffles: list[int]) -> None:
    reports = copied(session, query)
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert shuffles == []
    assert places(query)[0] == {0}


def test_keys_that_change_are_shuffled_from_the_start_and_nothing_fails(
    session: Any, query: Query, shuffles: list[int], collects: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "tasks_without_shuffle", None)  # dozens of calls of the JVM that would change nothing
    reports = copied(session, query, *CHANGE)
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert len(shuffles) == BATCHES
    assert not any(collects)
    assert places(query, "other-")[0] == {0}


@pytest.mark.skipif(BATCHES == 1, reason="the first batch of a query asks more")
def test_a_batch_asks_the_jvm_few_questions(session: Any, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as long as a few hundred rows, and nothing is visible before the last one. PySpark itself asks nearly
    three in four."""
    asked: Counter[int] = Counter()
    at_end: list[int] = []
    send = ClientServerConnection.send_command

    def counted(connection: Any, command: str) -> Any:
        asked[threading.get_ident()] += 1
        return send(connection, command)

    monkeypatch.setattr(ClientServerConnection, "send_command", counted)
    copied(session, query, *CHANGE, on_batch=lambda _: at_end.append(asked[threading.get_ident()]))
    assert [later - before <= MOST_QUESTIONS for before, later in pairwise(at_end)] == [True, True], at_end


@pytest.fixture
def deceptive(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Query:
    """Its first keys are where they belong, and those after them are not. Rows have 20 KB."""
    monkeypatch.setattr(in_place, "LOOKED_AT", 5)
    made = Query(cluster, tmp_path, "copy")
    with semel.Producer(bootstrap_servers=made.bootstrap) as producer:
        for n in range(ROWS):
            key = f"key-{n}".encode()
            partition = partition_for_key(key, PARTITIONS) if n < RIGHT else n % PARTITIONS
            producer.send(made.source, key=key, value=b"%d " % n + bytes(20_000), partition=partition)
    return made


def test_a_guess_that_fails_is_not_made_again_and_is_no_failure_of_the_query(
    session: Any, deceptive: Query, shuffles: list[int], collects: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two attempts, of which another failure takes one."""
    allows, guesses, failed = in_place.InPlace.allows, [], []
    written = write_job.written

    def noted(*arguments: Any) -> bool:
        guesses.append(allows(*arguments))
        return guesses[-1]

    def fails_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("an executor was lost")
        return written(*arguments)

    monkeypatch.setattr(in_place.InPlace, "allows", noted)
    monkeypatch.setattr(write_job, "written", fails_once)
    reports = copied(session, deceptive, max_attempts=2)
    assert places(deceptive)[0] == {0}
    assert failed
    tried = guesses.index(False)
    assert 1 <= tried <= BATCHES, "there was no guess, or it did not fail"
    assert not any(guesses[tried:])
    assert sorted(report.attempts for report in reports) == [*[1] * (BATCHES - 1), 3]
    assert not any(collects)


@pytest.mark.full
def test_rows_that_are_large_and_move_take_no_attempt_of_the_query(
    session: Any, deceptive: Query, shuffles: list[int]
) -> None:
    reports = copied(session, deceptive, max_attempts=2)
    assert max(report.attempts for report in reports) > 1
    assert places(deceptive)[0] == {0}


def test_large_rows_with_changed_keys_are_written_at_once(
    session: Any, deceptive: Query, shuffles: list[int], collects: list[bool]
) -> None:
    key = "concat('other-', split(cast(value AS STRING), ' ')[0]) AS key"
    reports = copied(session, deceptive, key, "value", max_attempts=2)
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert not any(collects)
    assert places(deceptive, "other-")[0] == {0}


def test_partitions_that_are_copied_are_not_shuffled_wherever_their_keys_belong(
    session: Any, cluster: Cluster, tmp_path: Path, shuffles: list[int]
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    reports = copied(session, query, "key", "value", "partition")
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert shuffles == []
    assert places(query)[1] == {0}


@pytest.mark.full
def test_a_partition_that_is_chosen_is_shuffled(session: Any, query: Query, shuffles: list[int]) -> None:
    chosen = "cast(cast(value AS STRING) AS INT) % 2 AS partition"
    reports = copied(session, query, "key", "value", chosen)
    assert [report.attempts for report in reports] == [1] * BATCHES
    assert len(shuffles) == BATCHES
    assert places(query)[1] == {0}


def test_attempt_that_died_costs_its_batch_a_shuffle_and_no_other(
    session: Any, query: Query, shuffles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, died = write_job._collect, []

    def first_dies(*arguments: Any) -> Any:
        if not died:
            died.append(1)
            return [failure_report(OwnerStalledError("another attempt at this task opened it first"))]
        return collected(*arguments)

    monkeypatch.setattr(write_job, "_collect", first_dies)
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
