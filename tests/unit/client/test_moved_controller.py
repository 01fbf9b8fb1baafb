"""A controller that has moved, or is gone: requests to it go to the one that metadata names next."""

from __future__ import annotations

import socket

import pytest

from semel.client.admin import Admin
from semel.client.metadata import BrokerAddress
from tests.support.broker import Cluster

GONE = 99


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_topics_are_created_and_deleted_at_the_new_controller(cluster: Cluster) -> None:
    name = cluster.unique("moved")
    with socket.socket() as nobody_listens, Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        nobody_listens.bind(("127.0.0.1", 0))
        known = admin._cluster
        for change in (lambda: admin.create_topic(name, 1), lambda: admin.delete_topics([name])):
            known.refresh([])
            known.metadata.brokers[GONE] = BrokerAddress(GONE, *nobody_listens.getsockname(), None)
            known.metadata.controller_id = GONE
            change()
            assert known.metadata.controller_id != GONE
