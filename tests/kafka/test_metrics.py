"""What producers and consumers count is what happened."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

import semel
from semel.client import Consumer, Producer, TopicPartition
from semel.protocol.messages.records import PRODUCE
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.waiting import until

PATIENCE_MS = 60_000


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("counted"))


def test_a_producer_counts_records_requests_and_bytes(cluster: Cluster, topic: str) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, client_id="counted") as producer:
        empty = producer.metrics()
        assert (empty.record_send_total, empty.request_total, empty.transaction_open_ms) == (0, 0, None)
        for _ in range(1000):
            producer.send(topic, b"x" * 100)
        producer.send_table(topic, pa.table({"value": [b"y" * 100] * 500}))
        producer.flush()
        found = producer.metrics()
        assert found.record_send_total == 1500
        assert found.outgoing_byte_total > 150_000
        assert 1 <= found.request_total <= 1500
        assert (found.record_error_total, found.record_retry_total, found.record_duplicate_total) == (0, 0, 0)
        assert (found.requests_in_flight, found.buffer_used_bytes) == (0, 0)
        assert found.buffer_total_bytes == producer.settings.buffer_memory
    assert producer.metrics() == found, "also after close"
    assert 'kafka_producer_record_send_total{client_id="counted"} 1500\n' in semel.prometheus(found)


def test_a_lost_response_is_a_retry_and_not_a_second_record(cluster: Cluster, topic: str) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        fault = proxy.add(Rule(PRODUCE, Effect.DROP_RESPONSE, times=1))
        with Producer(bootstrap_servers=proxy.bootstrap, request_timeout_ms=1000) as producer:
            producer.send(topic, b"x").result(timeout_ms=PATIENCE_MS)
            found = producer.metrics()
        fault.assert_fired()
    assert found.record_send_total == 1
    assert found.record_retry_total >= 1
    assert found.request_total >= 2
    assert found.requests_in_flight == 0


def test_records_that_are_not_delivered_are_errors(cluster: Cluster, topic: str) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        fault = proxy.add(Rule(PRODUCE, Effect.DROP_REQUEST, times=10_000))
        options = {"delivery_timeout_ms": 5_000, "request_timeout_ms": 1_000}  # the request must have been sent
        with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
            assert producer.send(topic, b"x").exception(timeout_ms=PATIENCE_MS) is not None
            found = producer.metrics()
        fault.assert_fired()
    assert (found.record_send_total, found.record_error_total) == (0, 1)


def test_the_age_of_a_transaction_is_that_of_the_open_one(cluster: Cluster, topic: str) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("aged")) as producer:
        producer.init_transactions()
        assert producer.metrics().transaction_open_ms is None
        producer.begin_transaction()
        producer.send(topic, b"x").result()
        first = producer.metrics().transaction_open_ms
        assert first is not None
        until(lambda: (producer.metrics().transaction_open_ms or 0) > first, "the transaction does not age")
        producer.commit_transaction()
        assert producer.metrics().transaction_open_ms is None


def test_a_consumer_counts_records_commits_rebalances_and_its_lag(cluster: Cluster, topic: str) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for _ in range(30):
            producer.send(topic, b"x" * 100)
    options = {"group_id": cluster.unique("counters"), "auto_offset_reset": "earliest", "enable_auto_commit": False}
    with Consumer(bootstrap_servers=cluster.bootstrap, **options) as consumer:
        assert consumer.metrics().rebalance_total == 0
        consumer.subscribe([topic])
        got = 0
        while got < 10:
            got += len(consumer.poll(1000, max_records=10 - got))
        consumer.commit()
        found = consumer.metrics()
        assert (found.records_consumed_total, found.commit_total, found.commit_error_total) == (10, 1, 0)
        assert found.rebalance_total == 1
        assert found.fetch_total >= 1
        assert found.bytes_consumed_total > 1000
        assert found.records_lag == {TopicPartition(topic, 0): 20}
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(consumer.metrics()))  # a scrape comes from another thread
        thread.start()
        thread.join()
        assert len(seen) == 1
    assert consumer.metrics().records_consumed_total == 10
