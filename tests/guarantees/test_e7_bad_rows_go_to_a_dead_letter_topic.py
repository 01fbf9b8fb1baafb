"""E7: bad rows go to a dead-letter topic in the same transaction."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.spark_driver import PARTITIONS, Pipeline, SparkSite

NUMBER = "cast(cast(value as string) as int)"
SELECT = [
    "key",
    "value",
    f"if({NUMBER} % 10 = 3, 'no-such-topic', null) AS topic",
    f"if({NUMBER} % 10 = 4, 99, null) AS partition",
    f"if({NUMBER} % 10 = 5, 'too late', null) AS bad",
]
REASONS = {3: b"unknown topic", 4: b"partition out of range", 5: b"too late"}


BOTH = pytest.mark.parametrize(
    "cluster", ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])], indirect=True
)


@pytest.mark.timeout(400)
@BOTH
def test_bad_rows_are_kept_with_their_reason_once_each_over_a_crash(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path)
    other = create_topic(cluster.bootstrap, cluster.unique("spark-other"), PARTITIONS)
    dead = create_topic(cluster.bootstrap, cluster.unique("spark-dead"), PARTITIONS)
    job = pipeline.job(sink={"topics": [other], "dead_letter_topic": dead, "bad_column": "bad"}, select=SELECT)
    local_spark.faults.arm("task.after_rows", "kill")  # rows and dead letters of an attempt are in the log
    outcome = local_spark.driver().run(job).succeeded()
    local_spark.faults.fired("task.after_rows")
    assert outcome.attempts == 2
    assert sum(report["dead_letters"] for report in outcome.reports) == 60
    assert pipeline.committed() == Counter(v for v in pipeline.expected if int(v) % 10 not in REASONS)
    letters = read_topic(cluster.bootstrap, dead)
    assert Counter(seen.value for seen in letters) == Counter(v for v in pipeline.expected if int(v) % 10 in REASONS)
    for seen in letters:
        headers = dict(seen.headers)
        assert headers["semel.dead-letter.reason"] == REASONS[int(seen.value or b"") % 10]
        assert "semel.dead-letter.topic" in headers


REFUSED = [  # by any broker, with the whole batch that they are in
    f"if({NUMBER} % 10 = 3, null, key) AS key",
    f"if({NUMBER} % 10 = 4, repeat('x', 5000), value) AS value",
    f"timestamp + if({NUMBER} % 10 = 5, interval 30 days, interval 0 days) AS timestamp",
]


@pytest.mark.timeout(300)
@BOTH
def test_rows_that_their_topic_does_not_take_hold_nothing_up(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path, rows=100)
    name, limits = cluster.unique("compacted"), {"cleanup_policy": "compact", "max_message_bytes": "4000"}
    out = create_topic(cluster.bootstrap, name, PARTITIONS, **limits)
    dead = create_topic(cluster.bootstrap, cluster.unique("spark-dead"), max_message_bytes="3000")
    job = pipeline.job(sink={"topic": out, "dead_letter_topic": dead}, select=REFUSED)
    outcome = local_spark.driver().run(job).succeeded()
    assert {report["attempts"] for report in outcome.reports} == {1}
    written = Counter(int(seen.value or b"") for seen in read_topic(cluster.bootstrap, out))
    assert written == Counter(n for n in range(100) if n % 10 not in (3, 4, 5))
    reasons = Counter(
        dict(seen.headers)["semel.dead-letter.reason"][:9] for seen in read_topic(cluster.bootstrap, dead)
    )
    assert reasons == {b"a compact": 10, b"record la": 10, b"timestamp": 10}
