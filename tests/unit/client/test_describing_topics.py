"""A topic can be looked at while one of its partitions has no leader: then its description is needed most."""

from __future__ import annotations

from typing import Any

import pytest

from semel.cli import main
from semel.client.admin import Admin
from semel.client.admin.calls import AdminCalls
from tests.support.broker import Cluster


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_a_partition_without_a_leader_is_not_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = cluster.unique("described")
    read = AdminCalls._all_metadata

    async def without_a_leader(calls: AdminCalls, timeout_ms: float | None) -> dict[str, Any]:
        topics = await read(calls, timeout_ms)
        partitions = topics[name].partitions
        return {name: topics[name]._replace(partitions=partitions | {1: partitions[1]._replace(leader=-1)})}

    with Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(name, 2)
        monkeypatch.setattr(AdminCalls, "_all_metadata", without_a_leader)
        (found,) = admin.describe_topics([name], offsets=True)
    assert [(part.leader >= 0, part.earliest_offset, part.latest_offset) for part in found.partitions] == [
        (True, 0, 0),
        (False, -1, -1),
    ]
    assert main(["topic", "describe", name, "-b", cluster.bootstrap]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [(row[0], row[1] == "-", row[-2:]) for row in rows] == [("0", False, ["0", "0"]), ("1", True, ["-", "-"])]
