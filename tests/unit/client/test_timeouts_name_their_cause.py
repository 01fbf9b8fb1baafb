"""A call that runs out of time says what was wrong, not only that the time is over."""

from __future__ import annotations

import itertools
import socket

import pytest

from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode
from semel.client.errors import TimedOutError
from semel.client.settings import ClientSettings
from semel.protocol.messages.cluster import METADATA, MetadataRequest
from tests.support.fake_broker import server


def test_a_timeout_keeps_the_first_cause() -> None:
    numbers = itertools.count()

    def close_the_first_and_ignore_the_rest(sock: socket.socket) -> None:
        if next(numbers) > 0:
            while sock.recv(4096):
                pass

    with server(close_the_first_and_ignore_the_rest) as address:
        cluster = Cluster(ClientSettings.of(bootstrap_servers=address))
        with cluster, pytest.raises(TimedOutError) as failure:
            cluster.call(AnyNode(), METADATA, MetadataRequest(topics=[]), timeout_s=2)
    assert next(numbers) >= 2, "a second connection was needed, or the first cause was the last one too"
    assert "the first try" in str(failure.value)
    assert "closed the connection" in str(failure.value)
