"""E6: a batch job writes atomically; running the same job id twice writes once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import semel
from semel.protocol.partitioning import partition_for_key
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_values


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster",
    ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])],
    indirect=True,
)
def test_a_job_is_written_whole_and_once(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    topic, app = create_topic(cluster.bootstrap, cluster.unique("batch-out"), 3), cluster.unique("batch-app")
    scattered = session.range(0, 300, 1, 3).selectExpr("cast(id as string) AS key", "concat('v', id) AS value")
    routed = semel.route(scattered, cluster.bootstrap, topic=topic)
    broken = routed.selectExpr("key", "if(key = '17', raise_error('boom'), value) AS value", "partition")

    def save(rows: Any, job: str) -> None:
        options = {"kafka.bootstrap.servers": cluster.bootstrap, "topic": topic, "applicationId": app, "jobId": job}
        rows.write.format("semel").mode("append").options(**options).save()

    with pytest.raises(Exception, match="boom"):  # the fault: a task fails in the middle
        save(broken, "broken")
    with pytest.raises(Exception, match=r"semel\.route"):  # rows of one partition in three tasks
        save(scattered, "scattered")
    save(routed, "nightly")
    with pytest.raises(Exception, match="nothing was written now"):
        save(routed, "nightly")
    found = read_values(cluster.bootstrap, topic)
    assert sorted(value or b"" for _, _, value in found) == sorted(b"v%d" % n for n in range(300))
    assert all(partition == partition_for_key((value or b"")[1:], 3) for partition, _, value in found)
