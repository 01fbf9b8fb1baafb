"""A broker that was reached once is retried for default.api.timeout.ms, not only until the first poll ends."""

from __future__ import annotations

import socket
import threading

from semel.client.consumer import Consumer
from tests.support.fake_broker import as_kafka, read_request, server


def test_connection_that_is_cut_in_the_first_request_does_not_end_the_poll() -> None:
    was_cut = threading.Event()

    def cut(sock: socket.socket) -> None:
        read_request(sock)
        was_cut.set()

    with (
        server(as_kafka(cut)) as address,
        Consumer(bootstrap_servers=address, reconnect_backoff_ms=60_000, reconnect_backoff_max_ms=60_000) as consumer,
    ):
        consumer.assign([("t", 0)])
        while not was_cut.is_set():
            assert consumer.poll(100) == []
        for _ in range(3):
            assert consumer.poll(200) == []
