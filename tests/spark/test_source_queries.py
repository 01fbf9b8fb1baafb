"""The source under a real Spark: found without a call, right counts in the query's progress, every trigger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel.local.processes import family
from semel.spark.offsets import edge_of, from_json
from semel.spark.session import SOURCE_ENVIRONMENT, reserve_environment
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.waiting import eventually

ROWS = 90
BOTH = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
needs_limits = pytest.mark.skipif(not HAS_ADMISSION_CONTROL, reason="PySpark 4.1 gives Python sources no limit")


def options(query: Query, **more: Any) -> dict[str, str]:
    return {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, **more}


def stream(session: Any, query: Query, **more: Any) -> Any:
    return session.readStream.format("semel").options(**options(query, **more)).load()


@BOTH
def test_batch_queries_find_the_source_without_a_call_and_have_sparks_columns(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    rows = session.read.format("semel").options(**options(query, includeHeaders="true", minPartitions="4")).load()
    assert rows.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    assert rows.rdd.getNumPartitions() >= 4
    found = rows.selectExpr("count(*)", "sum(offset)", "count(distinct partition)", "max(topic)").first()
    half = ROWS // PARTITIONS
    assert tuple(found) == (ROWS, PARTITIONS * half * (half - 1) // 2, PARTITIONS, query.source)


@SEMEL
@pytest.mark.parametrize("emit", ["rows", "ranges"])
def test_a_batch_query_of_which_nothing_is_there_has_no_rows(
    session: Any, cluster: Cluster, tmp_path: Path, emit: str
) -> None:
    query = Query(cluster, tmp_path, "copy")
    rows = session.read.format("semel").options(**options(query, emit=emit)).load()
    assert rows.collect() == []
    assert rows.selectExpr("count(*)", "max(topic)").collect() == [(0, None)]


@SEMEL
def test_values_are_read_as_json_by_the_source_as_from_json_reads_them(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy")
    schema = "id long, `a b` struct<x: array<int>>, at timestamp, `day` date, ratio double, m map<string, boolean>"
    order = {"a b": {"x": [1, None]}, "at": "2026-01-01T00:00:00+02:00", "day": "2026-01-02", "m": {"k": True}}
    producer = Producer({"bootstrap.servers": query.bootstrap, "log_level": 0})
    for n in range(20):
        producer.produce(query.source, json.dumps({"id": n, **order, "ratio": 2}) if n % 5 else "not JSON")
    producer.produce(query.source, '{"id": "of another type", "ratio": 2}')
    producer.produce(query.source, key=b"a tombstone", value=None)
    assert producer.flush(30) == 0
    rows = session.read.format("semel").options(**options(query, jsonSchema=schema)).load()
    assert rows.columns[-1] == "json"
    readable = rows.where("json IS NOT NULL").selectExpr(
        "json", f"from_json(cast(value AS string), '{schema}') AS sparks"
    )
    found = readable.collect()
    assert sorted(row.json.id for row in found) == [n for n in range(20) if n % 5]
    assert [row.json for row in found] == [row.sparks for row in found]
    assert rows.where("json IS NULL").count() == 4 + 1 + 1

    names = stream(session, query, startingOffsets="earliest", jsonSchema=schema, columns="json")
    sink = semel.sink(cluster.bootstrap, application_id=query.application_id, topic=query.output)
    query.run_through(names.where("json.id >= 10").selectExpr("to_json(json) AS value"), sink)
    written = session.read.format("semel").options(**options(query, subscribe=query.output)).load()
    assert sorted(json.loads(row.value)["id"] for row in written.collect()) == [11, 12, 13, 14, 16, 17, 18, 19]


@needs_limits
@pytest.mark.timeout(300)
@BOTH
def test_available_now_reads_all_in_limited_batches_and_progress_has_the_counts(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    rows = stream(session, query, startingOffsets="earliest", maxOffsetsPerTrigger="40")
    running = (
        rows.writeStream.format("noop")
        .option("checkpointLocation", str(query.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert running.awaitTermination(120)
    progress = [p for p in running.recentProgress if p.numInputRows]
    assert [p.numInputRows for p in progress] == [40, 40, 10]
    ends = {query.source: {str(p): ROWS // PARTITIONS for p in range(PARTITIONS)}}
    last = progress[-1].sources[0]
    assert from_json(json.loads(last.endOffset)) == from_json(ends)
    assert set(edge_of(json.loads(last.endOffset)).ids) == {query.source}
    assert json.loads(last.latestOffset) == ends
    assert json.loads(progress[0].sources[0].latestOffset) == ends  # the lag is visible in every batch
    assert all(p.sources[0].numInputRows == p.numInputRows for p in progress)


@pytest.mark.timeout(300)
@SEMEL
def test_with_a_trigger_by_time_new_records_and_new_partitions_are_read(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    name = cluster.unique("memory").replace("-", "_")
    running = (
        stream(session, query, startingOffsets="earliest")
        .selectExpr("cast(value AS STRING) AS value", "partition")
        .writeStream.format("memory")
        .queryName(name)
        .trigger(processingTime="100 milliseconds")
        .start()
    )

    def found() -> list[str]:
        assert running.exception() is None
        return sorted((row.value for row in session.table(name).collect()), key=int)

    try:
        eventually(found, lambda values: len(values) >= ROWS)
        with semel.Admin({"bootstrap.servers": query.bootstrap}) as admin:
            admin.create_partitions(query.source, PARTITIONS + 1)
        producer = semel.Producer({"bootstrap.servers": query.bootstrap})
        producer.send(query.source, value=str(ROWS).encode(), partition=PARTITIONS)
        producer.close()
        eventually(found, lambda values: len(values) >= ROWS + 1)
    finally:
        running.stop()
    assert found() == [str(n) for n in range(ROWS + 1)]


@pytest.mark.timeout(300)
@SEMEL
def test_errors_of_the_source_reach_the_user_with_their_text(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", 4)
    with pytest.raises(Exception, match="did you mean startingOffsets"):
        session.read.format("semel").options(**options(query, startingOfsets="earliest")).load().count()
    with pytest.raises(Exception, match="no-such-topic"):
        session.read.format("semel").options(**options(query, subscribe="no-such-topic")).load().count()
    with pytest.raises(Exception, match=r"kafka\.bootstrap\.servers"):
        session.read.format("semel").option("subscribe", query.source).load().count()


DAEMON = ".daemon pyspark.worker"


@SEMEL
def test_tasks_of_the_source_and_other_python_tasks_share_the_workers_of_one_daemon(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    name = cluster.unique("SEMEL_MARK").replace("-", "_")  # tests before this one have started daemons without it
    mark = (name, str(tmp_path))
    session.sparkContext.environment[mark[0]] = mark[1]
    environment = source_environment(session)
    for known in SOURCE_ENVIRONMENT:  # as before the first query of the JVM
        environment.remove(known)
    environment.put("PYTHONPATH", "Spark's own")
    reserve_environment(session, shares_workers=True)
    try:
        rows = session.read.format("semel").options(**options(query)).load().select("value")
        assert rows.mapInArrow(lambda batches: batches, "value BINARY").count() == ROWS
    finally:
        del session.sparkContext.environment[mark[0]]
        environment.remove(mark[0])
    jvm = session.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    daemons = [pid for pid, parent, command in family(os.getpid()) if parent == jvm and DAEMON in command]
    started = [found for pid in daemons if mark in (found := environment_of(pid)).items()]
    assert started, "no daemon was seen"
    # A daemon that seemed dead was started once more, and Spark adds names for the task that starts one.
    assert len({found.get("PYTHONPATH") for found in started}) == 1, "the paths keep them apart"


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def source_environment(session: Any) -> Any:
    source = session._jsparkSession.sessionState().dataSourceManager().lookupDataSource("semel")
    return source.dataSourceCls().envVars()


@SEMEL
def test_queries_add_no_name_to_the_environment_that_they_share(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    """Spark's threads would do so without a lock, and two at once break every query of the JVM."""
    environment = source_environment(session)
    for name in SOURCE_ENVIRONMENT:
        environment.remove(name)
    query = Query(cluster, tmp_path, "copy", ROWS)
    semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output)
    names = set(environment.keySet())
    assert names >= set(SOURCE_ENVIRONMENT)
    started = stream(session, query, startingOffsets="earliest").writeStream.format("noop")
    running = started.option("checkpointLocation", str(tmp_path / "shared")).start()
    running.processAllAvailable()
    running.stop()
    assert set(environment.keySet()) == names
    assert environment.get("SPARK_LOCAL_DIRS") != SOURCE_ENVIRONMENT["SPARK_LOCAL_DIRS"]  # it is this map
