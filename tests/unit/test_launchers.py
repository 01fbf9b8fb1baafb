"""The brokers that other tests stand on: real processes that keep their address and say why they did not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from semel.local.brokers import SemelBroker
from semel.local.processes import ProcessFailed
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S


def reachable(bootstrap: str, timeout_s: float = PATIENCE_S) -> bool:
    metadata = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=timeout_s)
    return [f"{broker.host}:{broker.port}" for broker in metadata.brokers.values()] == [bootstrap]


def test_both_kinds_of_cluster_answer_a_client_that_we_did_not_write(cluster: Cluster) -> None:
    assert reachable(cluster.bootstrap)
    assert cluster.unique("topic") != cluster.unique("topic")


def test_a_killed_broker_comes_back_at_the_same_address(semel_broker: SemelBroker) -> None:
    address = semel_broker.bootstrap
    semel_broker.kill()
    assert semel_broker.process is not None
    assert not semel_broker.process.running
    semel_broker.restart()
    assert semel_broker.bootstrap == address
    assert reachable(address)


def test_a_stopped_broker_ends_in_order(semel_broker: SemelBroker) -> None:
    assert semel_broker.stop() == 0


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="--no-such-option"):
        SemelBroker(tmp_path / "data", "--no-such-option").start()
