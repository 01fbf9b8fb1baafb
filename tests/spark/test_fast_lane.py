"""The fast lane: one Python worker fetches, calls the function and produces; same transaction, same recovery."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import semel
from semel.protocol.partitioning import partition_for_key
from semel.spark.options import OptionError
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.queries import PARTITIONS, Query
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import read_topic, read_values
from tests.support.waiting import eventually

ROWS = 300
BOTH = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


def start(session: Any, query: Query, function: Any = None, *, by_key: bool = False, **changes: Any) -> tuple[Any, Any]:
    """(sink, running query)"""
    trigger = changes.pop("trigger", {"availableNow": True})
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output, **changes)
    source = {"subscribe": query.source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 100}
    writer = semel.table_pipeline(session, source=source, sink=sink, function=function, by_key=by_key)
    return sink, writer.option("checkpointLocation", str(query.checkpoint)).trigger(**trigger).start()


def run(session: Any, query: Query, function: Any = None, **changes: Any) -> Any:
    sink, running = start(session, query, function, **changes)
    try:
        assert running.awaitTermination(120)
    finally:
        sink.close()
    return sink


@pytest.mark.timeout(300)
@BOTH
def test_a_copy_keeps_partition_order_keys_and_timestamps(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "fast", ROWS)
    sink = run(session, query)
    found = read_values(query.bootstrap, query.output)
    for partition in range(PARTITIONS):
        values = [int(value or b"") for p, _, value in found if p == partition]
        assert values == list(range(partition, ROWS, PARTITIONS))
    assert sum(report.rows for report in sink.reports) == ROWS
    assert len(sink.reports) >= (3 if HAS_ADMISSION_CONTROL else 1)


def keep_even(table: pa.Table) -> pa.Table | None:
    numbers = pc.cast(pc.cast(table["value"], pa.string()), pa.int64())
    kept = table.filter(pc.equal(pc.bit_wise_and(numbers, 1), 0))
    return kept if kept.num_rows else None


def without_keys_and_times(table: pa.Table) -> pa.Table:
    nothing = [None] * table.num_rows
    return pa.table({"key": nothing, "value": table["value"], "headers": nothing, "timestamp": nothing})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_key", [False, True])
@SEMEL
def test_what_a_function_leaves_out_in_all_rows_is_left_out(
    session: Any, cluster: Cluster, tmp_path: Path, by_key: bool
) -> None:
    """A list of keys that are all None has no type."""
    query = Query(cluster, tmp_path, "fast", ROWS)
    began_ms = time.time() * 1000
    run(session, query, without_keys_and_times, by_key=by_key, max_attempts=1)
    assert query.values() == Counter(str(n) for n in range(ROWS))
    found = read_topic(query.bootstrap, query.output)
    assert all(seen.key is None and seen.timestamp >= began_ms - 1 for seen in found)


def by_last_digit(table: pa.Table) -> pa.Table:
    values = [value.decode() for value in table["value"].to_pylist()]
    return pa.table({"key": [f"digit-{value[-1]}" for value in values], "value": values})


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_a_filter_drops_rows_and_a_new_key_moves_them(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    filtered = Query(cluster, tmp_path, "fast", ROWS)
    run(session, filtered, keep_even)
    assert filtered.values() == Counter(str(n) for n in range(0, ROWS, 2))
    moved = Query(cluster, tmp_path, "fast", ROWS)
    run(session, moved, by_last_digit, by_key=True)
    assert moved.values() == Counter(str(n) for n in range(ROWS))
    for partition, _, value in read_values(moved.bootstrap, moved.output):
        assert partition == partition_for_key(b"digit-%s" % (value or b"")[-1:], PARTITIONS)


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_bad_rows_go_to_the_dead_letters_and_the_others_stay_where_they_were(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "fast", ROWS)
    dead = cluster.unique("dead")
    with semel.Admin({"bootstrap.servers": query.bootstrap}) as admin:
        admin.create_topic(dead, 1)

    def doubt(table: pa.Table) -> pa.Table:
        odd = [b"13" in value for value in table["value"].to_pylist()]
        return table.append_column("doubtful", pa.array(odd))

    sink = run(session, query, doubt, dead_letter_topic=dead, bad_column="doubtful")
    bad = {str(n) for n in range(ROWS) if "13" in str(n)}
    assert {(value or b"").decode() for _, _, value in read_values(query.bootstrap, dead)} == bad
    assert sum(report.dead_letters for report in sink.reports) == len(bad)
    for partition, _, value in read_values(query.bootstrap, query.output):
        assert partition == int(value or b"") % PARTITIONS


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_errors_in_the_function_are_named_and_nothing_of_the_batch_is_written(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "fast", 20)

    def divide(table: pa.Table) -> pa.Table:
        return 1 // 0  # type: ignore[return-value]

    cases = {
        r"divide.* failed on .*offsets 0 to 9 \(10 rows\): ZeroDivisionError": divide,
        "returned list, expected a pyarrow.Table": lambda table: [1],
        "a column 'value' is needed": lambda table: table.select(["key"]),
        "'partition', which needs by_key=True": lambda table: table.append_column(
            "partition", pa.array([0] * len(table))
        ),
        "int64, expected binary or string": lambda table: pa.table({"value": pa.array([1] * len(table))}),
    }
    for said, function in cases.items():
        _, running = start(session, query, function, max_attempts=1)
        with pytest.raises(Exception, match=said):
            running.awaitTermination(120)
    assert query.values() == Counter()
    run(session, query)  # and the query goes on when the cause is gone
    assert query.values() == Counter(str(n) for n in range(20))


@SEMEL
def test_a_pipeline_needs_an_exactly_once_sink_with_a_topic(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "fast")
    with pytest.raises(OptionError, match="exactly_once"):
        start(session, query, guarantee="at_least_once")
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topics=[query.output])
    with pytest.raises(OptionError, match="topic="):
        semel.table_pipeline(session, source={"subscribe": query.source}, sink=sink)


@pytest.mark.timeout(300)
@SEMEL
def test_rows_may_go_to_a_topic_of_fewer_partitions(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "fast", ROWS)
    small = cluster.unique("small")
    with semel.Admin({"bootstrap.servers": query.bootstrap}) as admin:
        admin.create_topic(small, PARTITIONS - 1)

    def odd_ones_there(table: pa.Table) -> pa.Table:
        topics = [small if int(value) % 2 else None for value in table["value"].to_pylist()]
        return table.append_column("topic", pa.array(topics, pa.string()))

    run(session, query, odd_ones_there, topics=[small], client={"linger.ms": 1})  # what only producers have
    there = Counter(int(value or b"") for _, _, value in read_values(query.bootstrap, small))
    assert there == Counter(range(1, ROWS, 2))
    assert query.values() == Counter(map(str, range(0, ROWS, 2)))


@pytest.mark.timeout(300)
@SEMEL
def test_with_a_trigger_by_time_new_records_keep_coming_and_a_dead_worker_costs_nothing(
    session: Any, cluster: Cluster, tmp_path: Path
) -> None:
    query = Query(cluster, tmp_path, "fast", 100)
    victims = tmp_path / "victims"
    victims.mkdir()

    def slow_once(table: pa.Table) -> pa.Table:
        """The first worker to come by says its process id and waits to be killed."""
        try:
            (victims / "chosen").mkdir()
        except FileExistsError:
            return table
        (victims / "pid").write_text(str(os.getpid()))
        time.sleep(60)
        return table

    sink, running = start(session, query, slow_once, trigger={"processingTime": "200 milliseconds"})
    try:
        pid = eventually(lambda: victims / "pid", lambda path: path.exists() and path.read_text()).read_text()
        os.kill(int(pid), signal.SIGKILL)
        eventually(query.values, lambda found: sum(found.values()) >= 100)
        query.fill(50)
        eventually(query.values, lambda found: sum(found.values()) >= 150)
    finally:
        running.stop()
        sink.close()
    assert query.values() == Counter(str(n) for n in range(150))
    assert max(report.attempts for report in sink.reports) == 2  # the fault fired: a batch ran again


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cluster", "point"),
    [
        pytest.param("semel", "sink.after_commit", marks=pytest.mark.full),
        pytest.param("semel", "sink.after_write", marks=pytest.mark.full),
        pytest.param("apache_kafka", "sink.after_offsets", marks=[pytest.mark.kafka, pytest.mark.full]),
    ],
    indirect=["cluster"],
)
def test_driver_killed_in_the_second_batch_resumes(cluster: Cluster, tmp_path: Path, point: str) -> None:
    query = Query(cluster, tmp_path, "fast", ROWS, function=True)
    query.crash(point, batch=2)
    query.run()
    assert query.values() == Counter(f"{n:06d}" for n in range(0, ROWS, 2))
