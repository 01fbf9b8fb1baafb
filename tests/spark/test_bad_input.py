"""What users get wrong: a clear error that names what to change, nothing written, and the query goes on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semel.local.brokers import SemelBroker
from semel.local.processes import free_ports
from semel.prove.proxy import Proxy
from tests.support.broker import Cluster
from tests.support.spark_driver import Pipeline, SparkDriver, SparkSite

QUICKLY = {"request.timeout.ms": 1000, "default.api.timeout.ms": 3000}


@pytest.fixture
def driver(local_spark: SparkSite) -> SparkDriver:
    """A local Spark is enough here: nothing happens to its processes."""
    return local_spark.driver()


@pytest.fixture
def pipeline(shared_semel_broker: SemelBroker, tmp_path: Path) -> Pipeline:
    return Pipeline(Cluster("semel", shared_semel_broker), tmp_path, rows=20)


NUMBER = "cast(cast(value as string) as int)"
BAD_COLUMNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no value": (["key"], ("no column 'value'", "selectExpr")),
    "value of another type": (["key", "offset AS value"], ("column 'value' is bigint", "binary or string", "cast")),
    "key of another type": (["offset AS key", "value"], ("column 'key' is bigint", "cast")),
    "headers of another type": (["value", "'x' AS headers"], ("headers", "array<struct<key:string,value:binary>>")),
    "topic of another type": (["value", "1 AS topic"], ("topic", "string")),
    "partition of another type": (["value", "'1' AS partition"], ("partition", "int")),
    "unknown topic": (["value", "'nowhere' AS topic"], ("unknown topic", "nowhere", "dead_letter_topic")),
    "partition out of range": (["value", "4 AS partition"], ("partition out of range", "dead_letter_topic")),
    "negative partition": (["value", "-1 AS partition"], ("partition out of range", "dead_letter_topic")),
    "record too large": (["repeat('x', 3000000) AS value"], ("max.request.size", "dead_letter_topic")),
}
ALWAYS = {"no value", "value of another type", "unknown topic", "partition out of range"}  # the rest: make test-full
GO_ON = ("no value", "partition out of range")  # an error before and one inside the job


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.full) for case in BAD_COLUMNS]
)
def test_rows_that_cannot_be_written(pipeline: Pipeline, driver: SparkDriver, case: str) -> None:
    select, words = BAD_COLUMNS[case]
    sink = {"topics": [pipeline.source]}  # a second topic, so that the column `topic` counts
    driver.run(pipeline.job(select=select, sink=sink)).failed_with(*words)
    assert not pipeline.committed()
    assert not pipeline.has_open_transaction(), "the failed batch is still open: readers wait"
    if case in GO_ON:
        driver.run(pipeline.job()).succeeded()  # the cause is gone
        pipeline.assert_exact()


BAD_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown output topic": ({"topic": "nowhere"}, ("'nowhere'", "topic")),
    "no topic": ({"topic": None}, ("topic=", "topics=")),
    "unknown dead-letter topic": ({"dead_letter_topic": "grave"}, ("'grave'", "dead_letter_topic")),
    "application id": ({"application_id": "a b"}, ("application_id",)),
    "partitioner": ({"partitioner": "murmur"}, ("partitioner", "did you mean 'murmur2'")),
    "guarantee": ({"guarantee": "exactly-once"}, ("guarantee", "exactly_once")),
    "attempts": ({"max_attempts": 0}, ("max_attempts",)),
    "transaction timeout": (
        {"transaction_timeout_ms": 10**9},
        ("transaction_timeout_ms", "transaction.max.timeout.ms"),
    ),
    "client option": ({"client": {"sasl.usrname": "x"}}, ("sasl.usrname", "sasl.username")),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_cannot_be(pipeline: Pipeline, driver: SparkDriver, case: str) -> None:
    changes, words = BAD_OPTIONS[case]
    driver.start(pipeline.job(sink=changes)).failed_with(*words)
    assert not pipeline.committed()


@pytest.mark.timeout(200)
def test_two_queries_with_one_application_id(
    pipeline: Pipeline, driver: SparkDriver, shared_semel_broker: SemelBroker, tmp_path: Path
) -> None:
    driver.run(pipeline.job()).succeeded()
    other = Pipeline(Cluster("semel", shared_semel_broker), tmp_path / "other", rows=20)
    own, other.application_id = other.application_id, pipeline.application_id
    driver.run(other.job()).failed_with("RefusedError", "application id", "startingOffsets=committed")
    assert not other.committed()
    other.application_id = own
    driver.run(other.job()).succeeded()  # with an id of its own
    other.assert_exact()
    pipeline.fill(20)
    driver.run(pipeline.job()).succeeded()  # and the first goes on
    pipeline.assert_exact()


@pytest.mark.timeout(200)
def test_checkpoint_of_another_query(pipeline: Pipeline, driver: SparkDriver, tmp_path: Path) -> None:
    """Another application wrote the batches before: its output may hold them, this one's ledger does not."""
    driver.run(pipeline.job(source={"maxOffsetsPerTrigger": "10"})).succeeded()
    pipeline.fill(20)
    foreign = {"application_id": f"{pipeline.application_id}-2"}
    driver.run(pipeline.job(sink=foreign)).failed_with("RefusedError", "ledger is empty", "adopt_checkpoint=True")
    driver.run(pipeline.job()).succeeded()
    pipeline.assert_exact()
    pipeline.fill(20)
    driver.run(pipeline.job(sink={**foreign, "adopt_checkpoint": True})).succeeded()  # a named option
    pipeline.assert_exact()


@pytest.mark.timeout(200)
def test_broker_that_cannot_be_reached_at_the_start(pipeline: Pipeline, driver: SparkDriver) -> None:
    (nobody,) = free_ports(1)
    there, pipeline.bootstrap = pipeline.bootstrap, f"127.0.0.1:{nobody}"
    refused = driver.start(pipeline.job(sink={"client": QUICKLY}))
    refused.failed_with(f"127.0.0.1:{nobody}", "bootstrap")
    pipeline.bootstrap = there
    driver.run(pipeline.job()).succeeded()
    pipeline.assert_exact()


@pytest.mark.timeout(200)
def test_broker_that_cannot_be_reached_in_the_middle(
    shared_semel_broker: SemelBroker, local_spark: SparkSite, driver: SparkDriver, tmp_path: Path
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        cluster = Cluster("semel", shared_semel_broker)
        pipeline = Pipeline(cluster, tmp_path, rows=20, bootstrap=proxy.bootstrap)
        local_spark.faults.arm("sink.after_write", "stop")
        job = pipeline.job(sink={"client": QUICKLY}, source={f"kafka.{name}": str(v) for name, v in QUICKLY.items()})
        number = driver.begin(job)
        local_spark.faults.fired("sink.after_write")
        proxy.refuse()
        driver.process.resume()
        driver.end(number).failed_with(proxy.bootstrap)
        proxy.admit()
        driver.run(job).succeeded()  # the cause is gone
    pipeline.assert_exact()
