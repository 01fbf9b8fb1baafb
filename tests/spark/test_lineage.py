"""Which columns of a query are the source's own, unchanged: read from plans that Spark has analyzed, and not run."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as f

from semel.spark import in_place

SOURCE = {"kafka.bootstrap.servers": "localhost:1", "subscribe": "in"}
NAMES = ("key", "partition")


@pytest.fixture
def source(session: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source that is not started: a leaf with this name in its plan."""
    monkeypatch.setattr(in_place, "MICRO_BATCH", {"StreamingRelationV2"})
    monkeypatch.setattr(in_place, "SOURCE", {"StreamingRelationV2"})
    return session.readStream.format("semel").options(**SOURCE).load()


def found(rows: Any, source: Any) -> dict[str, str]:
    plans = [df._jdf.queryExecution().analyzed() for df in (rows, source)]
    return in_place.origins(*plans, NAMES)


@pytest.mark.timeout(300)
def test_columns_that_are_passed_on_are_the_sources(source: Any) -> None:
    both = {"key": "key", "partition": "partition"}
    kept = {
        "as it is": source,
        "chosen": source.select("partition", "value", "key"),
        "cast": source.selectExpr("cast(key AS STRING)", "partition"),
        "cast to and fro": source.selectExpr("cast(cast(key AS STRING) AS BINARY) AS key", "partition"),
        "renamed and back": source.selectExpr("key AS k", "partition")
        .filter("k IS NOT NULL")
        .selectExpr("k AS key", "partition"),
        "value changed": source.withColumn("value", f.upper(f.col("value").cast("string"))),
        "watermark": source.withWatermark("timestamp", "1 minute").where("offset > 5"),
        "several rows of one": source.select("key", "partition", f.explode(f.array("offset"))),
        "alias of the whole": source.alias("s").select("s.key", "s.partition"),
    }
    assert {name: found(rows, source) for name, rows in kept.items()} == dict.fromkeys(kept, both)


@pytest.mark.timeout(300)
def test_columns_that_are_made_are_not_the_sources(source: Any) -> None:
    parsed = source.select("key", f.from_json(f.col("value").cast("string"), "id INT, key STRING").alias("d"))
    made = {
        "another column": source.selectExpr("value AS key"),
        "computed": source.selectExpr("concat(key, value) AS key"),
        "upper case": source.selectExpr("upper(cast(key AS STRING)) AS key"),
        "out of JSON": parsed.selectExpr("d.key AS key", "to_json(d) AS value"),
        "a number as text": source.selectExpr("cast(offset AS STRING) AS key"),
        "a default": source.selectExpr("coalesce(key, value) AS key"),
        "replaced": source.withColumn("key", f.lit("k")),
        "exploded": source.select(f.explode(f.array("key")).alias("key")),
        "no such column": source.select("value"),
    }
    said = {name: found(rows, source).get("key") for name, rows in made.items()}
    assert said == {**dict.fromkeys(made), "another column": "value"}


@pytest.mark.timeout(300)
def test_rows_that_may_have_moved_have_no_lineage(session: Any, source: Any) -> None:
    counts = session.range(10).selectExpr("cast(cast(id AS STRING) AS BINARY) AS key", "id")
    moved = {
        "shuffled": source.repartition(4),
        "coalesced": source.coalesce(1),
        "united": source.select("key").union(source.select("key")),
        "joined": source.join(counts, "key"),
        "grouped": source.groupBy("key").count(),
        "deduplicated": source.dropDuplicates(["key"]),
        "through Python": source.select("key").mapInArrow(lambda batches: batches, "key BINARY"),
    }
    assert {name: found(rows, source) for name, rows in moved.items()} == {name: {} for name in moved}
