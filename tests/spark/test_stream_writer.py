"""`writeStream.format("semel")` under a real Spark: rows land once, also when a batch's commit is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.protocol.partitioning import partition_for_key
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import read_values

ROWS = 300
BOTH = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


def numbers(stop: int) -> Counter[str]:
    return Counter(str(n) for n in range(stop))


def writer_of(session: Any, query: Query, *, route: bool = True, **options: Any) -> Any:
    """The writer as users write it, in this process."""
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source).load().selectExpr("key", "value")
    if route:
        rows = semel.route(rows, query.bootstrap, topic=query.output)
    chosen = {"topic": query.output, "applicationId": query.application_id, "checkpointLocation": str(query.checkpoint)}
    settings = {"kafka.bootstrap.servers": query.bootstrap, **chosen, **options}
    return rows.writeStream.format("semel").options(**settings).trigger(availableNow=True)


@pytest.mark.timeout(300)
@BOTH
def test_rows_land_where_their_keys_belong_and_the_group_and_the_progress_show_it(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    for stop in (ROWS, ROWS + 50):  # the second run goes on where the first ended
        query.fill(stop - query.filled)
        running = writer_of(session, query).start()
        assert running.awaitTermination(120)
        assert query.values() == numbers(stop)
    assert sum(p.sink.numOutputRows for p in running.recentProgress) == 50
    for partition, _, value in read_values(query.bootstrap, query.output):
        assert partition == partition_for_key(b"key-%s" % (value or b""), PARTITIONS)
    with semel.Admin({"bootstrap.servers": query.bootstrap}) as admin:
        found = admin.group_offsets(query.application_id)
    assert sum(at.offset for at in found.values()) == ROWS + 50


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_rows_of_one_partition_in_several_tasks_stop_the_query_with_the_way_out(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    running = writer_of(session, query, route=False).start()
    with pytest.raises(Exception, match=r"semel\.route"):
        running.awaitTermination(120)
    assert query.values() == Counter()
    writer_of(session, query).start().awaitTermination(120)  # the query goes on when the cause is gone
    assert query.values() == numbers(ROWS)


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_a_query_without_keys_and_with_few_tasks_needs_no_routing(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source).load().selectExpr("value").coalesce(PARTITIONS)
    options = {"topic": query.output, "applicationId": query.application_id, "partitioner": "none"}
    settings = {"kafka.bootstrap.servers": query.bootstrap, "checkpointLocation": str(query.checkpoint), **options}
    running = rows.writeStream.format("semel").options(**settings).trigger(availableNow=True).start()
    assert running.awaitTermination(120)
    assert query.values() == numbers(ROWS)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cluster", "point"),
    [
        pytest.param("semel", "sink.after_commit"),
        pytest.param("semel", "sink.after_offsets", marks=pytest.mark.full),
        pytest.param("apache_kafka", "sink.after_commit", marks=[pytest.mark.kafka, pytest.mark.full]),
        pytest.param("apache_kafka", "sink.after_offsets", marks=[pytest.mark.kafka, pytest.mark.full]),
    ],
    indirect=["cluster"],
)
def test_commit_process_killed_in_the_second_batch(cluster: Cluster, tmp_path: Path, point: str) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS, writer={})
    query.crash(point, batch=2)
    query.run()
    assert query.values() == numbers(ROWS)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["sink.after_begin", "sink.after_offsets", "sink.after_commit"])
def test_driver_killed_while_a_batch_is_at_a_named_point(cluster: Cluster, tmp_path: Path, point: str) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS, writer={})
    process = query.start(f"{point}:stop:1")  # the Python process stands still there; then the whole driver dies
    try:
        process.wait_for_line(f"fault fired: {point}", timeout_s=180)
    finally:
        process.kill()
    query.run()
    assert query.values() == numbers(ROWS)
