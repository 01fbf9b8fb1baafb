"""Where rows go: murmur2, Spark's own hash, or nowhere in particular; rows without keys by a rule, never by chance."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.protocol.partitioning import partition_for_key
from tests.spark.queries import Query
from tests.support.broker import Cluster
from tests.support.reading import read_values

ROWS, WIDE = 200, 4
NUMBER = "cast(cast(value AS STRING) AS INT)"
KEY = f"concat('k', {NUMBER} % 20) AS key"
SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


@pytest.fixture
def query(cluster: Cluster, tmp_path: Path) -> Query:
    made = Query(cluster, tmp_path, "copy", ROWS)
    made.output = cluster.unique("wide-out")
    with semel.Admin({"bootstrap.servers": made.bootstrap}) as admin:
        admin.create_topic(made.output, WIDE)
    return made


def written(session: Any, query: Query, *select: str, **options: Any) -> dict[str, int]:
    """Value -> partition, after one run."""
    sink = semel.sink(query.bootstrap, application_id=query.application_id, topic=query.output, **options)
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source, "startingOffsets": "earliest"}
    rows = session.readStream.format("semel").options(**source).load().selectExpr(*select)
    query.run_through(rows, sink)
    found = read_values(query.bootstrap, query.output)
    assert Counter((value or b"").decode() for _, _, value in found) == Counter(str(n) for n in range(ROWS))
    return {(value or b"").decode(): partition for partition, _, value in found}


@pytest.mark.full
@pytest.mark.timeout(300)
@SEMEL
def test_sparks_own_hash_keeps_keys_together_and_is_computed_by_spark(session: Any, query: Query) -> None:
    found = written(session, query, KEY, "value", partitioner="hash")
    places = defaultdict(set)
    for value, partition in found.items():
        places[f"k{int(value) % 20}"].add(partition)
    assert all(len(partitions) == 1 for partitions in places.values())
    keys = session.createDataFrame([(key,) for key in places], "key STRING")
    by_spark = keys.selectExpr("key", f"pmod(xxhash64(cast(key AS BINARY)), {WIDE}) AS p").collect()
    assert {row.key: {row.p} for row in by_spark} == dict(places)


@pytest.mark.timeout(300)
@SEMEL
def test_without_a_partitioner_nothing_is_shuffled_and_keys_do_not_matter(session: Any, query: Query) -> None:
    found = written(session, query, "key", "value", partitioner="none")
    sides = {n % 2: {found[str(m)] for m in range(n % 2, ROWS, 2)} for n in range(2)}
    assert all(len(partitions) == 1 for partitions in sides.values())  # a task keeps to one partition
    assert sides[0] != sides[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "partitioner",
    [pytest.param("murmur2", marks=pytest.mark.full), pytest.param("hash", marks=pytest.mark.full), "none"],
)
@SEMEL
def test_rows_with_and_without_keys_and_with_a_partition_of_their_own(
    session: Any, query: Query, partitioner: str
) -> None:
    select = (
        f"if({NUMBER} % 2 = 0, key, NULL) AS key",
        "value",
        f"if({NUMBER} % 10 IN (5, 8), 3, NULL) AS partition",  # of either task
    )
    found = written(session, query, *select, partitioner=partitioner)
    assert {found[str(n)] for n in range(ROWS) if n % 10 in (5, 8)} == {3}
    if partitioner == "murmur2":
        by_key = [n for n in range(0, ROWS, 2) if n % 10 != 8]
        assert all(found[str(n)] == partition_for_key(f"key-{n}".encode(), WIDE) for n in by_key)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("partitioner", ["murmur2", "hash", "none"])
@pytest.mark.full
@SEMEL
def test_routing_for_writers_puts_rows_where_the_sink_would(session: Any, query: Query, partitioner: str) -> None:
    rows = session.range(ROWS).selectExpr("concat('key-', id) AS key", "cast(id AS STRING) AS value")
    semel.route(rows, query.bootstrap, topic=query.output, partitioner=partitioner).write.format("semel").options(
        **{"kafka.bootstrap.servers": query.bootstrap, "topic": query.output, "partitioner": partitioner}
    ).option("applicationId", query.application_id).mode("append").save()
    found = {(v or b"").decode(): p for p, _, v in read_values(query.bootstrap, query.output)}
    assert set(found) == {str(n) for n in range(ROWS)}
    if partitioner == "murmur2":
        assert all(found[str(n)] == partition_for_key(f"key-{n}".encode(), WIDE) for n in range(ROWS))
    if partitioner == "hash":
        wanted = rows.selectExpr("value", f"pmod(xxhash64(cast(key AS BINARY)), {WIDE}) AS p").collect()
        assert found == {row.value: row.p for row in wanted}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "partitioner",
    [pytest.param("murmur2", marks=pytest.mark.full), pytest.param("hash", marks=pytest.mark.full), "none"],
)
@SEMEL
def test_routing_for_writers_keeps_the_partition_that_a_row_has(session: Any, query: Query, partitioner: str) -> None:
    given = "if(id % 4 = 1, 3, NULL) AS partition"
    rows = session.range(0, ROWS, 1, 3).selectExpr("concat('key-', id) AS key", "cast(id AS STRING) AS value", given)
    semel.route(rows, query.bootstrap, topic=query.output, partitioner=partitioner).write.format("semel").options(
        **{"kafka.bootstrap.servers": query.bootstrap, "topic": query.output, "partitioner": partitioner}
    ).option("applicationId", query.application_id).mode("append").save()
    found = {(v or b"").decode(): p for p, _, v in read_values(query.bootstrap, query.output)}
    assert set(found) == {str(n) for n in range(ROWS)}
    assert {found[str(n)] for n in range(1, ROWS, 4)} == {3}
    if partitioner == "murmur2":
        assert all(found[str(n)] == partition_for_key(f"key-{n}".encode(), WIDE) for n in range(0, ROWS, 2))


@pytest.mark.timeout(300)
@SEMEL
def test_routing_for_writers_knows_how_many_partitions_the_topic_of_a_row_has(session: Any, query: Query) -> None:
    counts = {query.output: WIDE, query.source: 2}
    topic = f"if(id % 2 = 1, '{query.source}', if(id % 4 = 2, NULL, '{query.output}')) AS topic"
    rows = session.range(0, ROWS, 1, 3).selectExpr("concat('key-', id) AS key", "cast(id AS STRING) AS value", topic)
    routed = semel.route(rows, query.bootstrap, topic=query.output, topics=query.source)
    assert all(
        row.partition == partition_for_key(row.key.encode(), counts[row.topic or query.output])
        for row in routed.collect()
    )
    routed.write.format("semel").options(
        **{"kafka.bootstrap.servers": query.bootstrap, "topic": query.output, "topics": query.source}
    ).option("applicationId", query.application_id).mode("append").save()
    found = Counter((value or b"").decode() for _, _, value in read_values(query.bootstrap, query.output))
    assert found == Counter(str(n) for n in range(0, ROWS, 2))


FAR = f"case when {NUMBER} = 7 then 4294967296L when {NUMBER} = 8 then null else {NUMBER} % 4L end AS partition"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ansi", ["true", "false"])
@SEMEL
def test_a_partition_that_no_integer_holds_is_out_of_range_for_its_row_alone(
    session: Any, query: Query, ansi: str
) -> None:
    """A cast to an int makes 0 of it, or fails the batch."""
    dead = f"{query.output}-dead"
    with semel.Admin({"bootstrap.servers": query.bootstrap}) as admin:
        admin.create_topic(dead, WIDE)
    sink = semel.sink(
        query.bootstrap, application_id=query.application_id, topic=query.output, dead_letter_topic=dead, max_attempts=1
    )
    source = {"kafka.bootstrap.servers": query.bootstrap, "subscribe": query.source}
    writer = {"topic": query.output, "deadLetterTopic": dead, "applicationId": f"{query.application_id}-job"}
    before = session.conf.get("spark.sql.ansi.enabled")
    session.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        rows = session.readStream.format("semel").options(**source, startingOffsets="earliest").load()
        query.run_through(rows.selectExpr("value", FAR), sink)
        rows = session.read.format("semel").options(**source).load().selectExpr("value", FAR)
        routed = semel.route(rows, query.bootstrap, topic=query.output)
        routed.write.format("semel").options(**{"kafka.bootstrap.servers": query.bootstrap, **writer}).mode(
            "append"
        ).save()
    finally:
        session.conf.set("spark.sql.ansi.enabled", before)
    found = [(int(value or b""), partition) for partition, _, value in read_values(query.bootstrap, query.output)]
    assert Counter(n for n, _ in found) == Counter({n: 2 for n in range(ROWS) if n != 7})
    assert all(partition == n % 4 for n, partition in found if n != 8)
    assert [value for _, _, value in read_values(query.bootstrap, dead)] == [b"7", b"7"]
