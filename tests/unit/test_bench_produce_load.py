"""The load generator tells the truth: errors are noticed, and a stall counts for every request that it held up."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks.peers.raw_client import RawClient
from benchmarks.produce_load import BrokerRefused, Load, closed_loop, open_loop, percentile
from semel.local.brokers import SemelBroker
from tests.support.waiting import until


def load_on(broker: SemelBroker, topic: str) -> Load:
    return Load(broker.bootstrap, topic, partitions=2, connections=4, records=3, record_bytes=10)


def end_offsets(broker: SemelBroker, topic: str) -> list[int]:
    with RawClient(broker.bootstrap) as client:
        return [client.fetch((topic, partition)).high_watermark for partition in range(2)]


def test_every_request_is_sent_and_answered(semel_broker: SemelBroker) -> None:
    with RawClient(semel_broker.bootstrap) as client:
        client.create_topic("load", 2)
    load = load_on(semel_broker, "load")
    assert len(open_loop(load, rate=200, seconds=0.5, warmup_s=0.25)) == 100
    assert end_offsets(semel_broker, "load") == [225, 225]  # 150 requests of 3 records
    assert closed_loop(load, requests=101) > 0
    assert sum(end_offsets(semel_broker, "load")) == 450 + 303


def test_a_stall_is_felt_by_the_requests_that_it_held_up(semel_broker: SemelBroker) -> None:
    with RawClient(semel_broker.bootstrap) as client:
        client.create_topic("stall", 2)

    def stall() -> None:
        until(lambda: sum(end_offsets(semel_broker, "stall")))
        semel_broker.pause()
        time.sleep(0.4)
        semel_broker.resume()

    thread = threading.Thread(target=stall)
    thread.start()
    latencies = open_loop(load_on(semel_broker, "stall"), rate=500, seconds=2.0, warmup_s=0.01)
    thread.join()
    # a closed loop would have had one slow request for each connection
    assert sum(latency > 0.1 for latency in latencies) > 100
    assert percentile(latencies, 99) > 0.3


def test_a_refused_request_ends_the_measurement(semel_broker: SemelBroker) -> None:
    with pytest.raises(BrokerRefused, match="error 3"):
        open_loop(load_on(semel_broker, "no-such-topic"), rate=100, seconds=0.1)
    with pytest.raises(BrokerRefused, match="error 3"):
        closed_loop(load_on(semel_broker, "no-such-topic"), requests=10)
