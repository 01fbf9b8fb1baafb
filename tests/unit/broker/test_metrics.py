"""The broker's metrics are what happened, an independent parser reads them, and their number is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from semel.broker import metrics
from semel.broker.metrics import METRICS, _Partitions
from semel.client import Consumer, Producer
from semel.client.admin import Admin
from semel.local.brokers import SemelBroker
from semel.local.processes import free_ports
from semel.protocol.errors import ErrorCode
from tests.support.direct import DirectClient, batch_of
from tests.support.waiting import PATIENCE_S, until

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
URLS: dict[str, str] = {}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemelBroker]:
    (port,) = free_ports(1)
    quick = "transaction.abort.timed.out.transaction.cleanup.interval.ms=200"
    folder = tmp_path_factory.mktemp("measured") / "broker"
    with SemelBroker(folder, "--metrics-port", str(port), "--set", quick) as started:
        URLS[started.bootstrap] = f"http://127.0.0.1:{port}"
        yield started


def page(broker: SemelBroker) -> str:
    with urllib.request.urlopen(f"{URLS[broker.bootstrap]}/metrics", timeout=PATIENCE_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: str = response.read().decode()
        return text


def values(broker: SemelBroker) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page(broker))
        for sample in family.samples
    }


def value(found: Values, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def test_what_becomes_of_batches_is_counted(broker: SemelBroker) -> None:
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("batches")
        pid, epoch = client.new_producer()
        before = values(broker)
        first = batch_of([b"a", b"b"], pid=pid, epoch=epoch, sequence=0)
        assert client.produce("batches", first)[0] == client.produce("batches", first)[0] == ErrorCode.NONE
        gap = batch_of([b"z"], pid=pid, epoch=epoch, sequence=9)
        assert client.produce("batches", gap)[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce("batches", batch_of([b"n"], pid=pid, epoch=epoch + 1, sequence=0))[0] == ErrorCode.NONE
        late = batch_of([b"z"], pid=pid, epoch=epoch, sequence=2)
        assert client.produce("batches", late)[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    after = values(broker)

    def grew(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grew("semel_duplicate_batches_total") == 1
    assert grew("semel_out_of_order_batches_total") == 1
    assert grew("semel_fenced_requests_total", api="Produce") == 1
    assert grew("semel_request_total_time_seconds_count", api="Produce") == 5
    assert grew("semel_request_total_time_seconds_bucket", api="Produce", le="+Inf") == 5
    assert grew("semel_request_total_time_seconds_sum", api="Produce") > 0
    assert value(after, "semel_log_end_offset", topic="batches", partition="0") == 3


def test_transactions_are_counted_by_state_outcome_and_reason(broker: SemelBroker) -> None:
    options = {"bootstrap_servers": broker.bootstrap, "transactional_id": "measured"}
    with Admin(bootstrap_servers=broker.bootstrap) as admin:
        admin.create_topic("held", partitions=1)
    before = values(broker)
    with Producer(options) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send("held", b"committed").result()
        producer.begin_transaction()
        for _ in range(3):
            producer.send("held", b"open").result()
        found = values(broker)
        assert value(found, "semel_transactions", state="Ongoing") == 1
        assert value(found, "semel_oldest_transaction_seconds") > 0
        assert value(found, "semel_last_stable_offset_lag", topic="held", partition="0") == 3
        assert value(found, "semel_last_stable_offset_lag_max") == 3
        assert value(found, "semel_partitions_with_open_transactions") == 1
        assert value(found, "semel_partitions_with_late_transactions") == 0
        with Producer(options) as new_owner:
            new_owner.init_transactions()
        with pytest.raises(Exception, match="PRODUCER_FENCED"):
            producer.commit_transaction()
    found = values(broker)

    def grew(name: str, **labels: str) -> float:
        return value(found, name, **labels) - value(before, name, **labels)

    assert grew("semel_transactions_ended_total", outcome="commit", reason="client") == 1
    assert grew("semel_transactions_ended_total", outcome="abort", reason="new_owner") == 1
    assert grew("semel_fenced_requests_total", api="EndTxn") >= 1
    assert value(found, "semel_transactional_ids") == 1
    until(lambda: value(values(broker), "semel_last_stable_offset_lag_max") == 0, "the LSO does not move")
    assert value(values(broker), "semel_markers_outstanding") == 0


def test_a_transaction_that_runs_into_its_timeout_is_an_abort_with_that_reason(broker: SemelBroker) -> None:
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("slow")
        client.find_coordinator("slow", 1)
        code, pid, epoch = client.init_producer_id("slow", timeout_ms=1)
        assert code == ErrorCode.NONE
        batch = batch_of([b"x"], pid=pid, epoch=epoch, sequence=0, transactional=True)
        code, _ = client.produce("slow", batch, transactional_id="slow", version=12)
        assert code == ErrorCode.NONE

    def aborted() -> bool:
        return value(values(broker), "semel_transactions_ended_total", outcome="abort", reason="timeout") == 1

    until(aborted, "the timeout of the transaction is not counted")


def test_groups_and_their_lag(broker: SemelBroker) -> None:
    with Admin(bootstrap_servers=broker.bootstrap) as admin:
        admin.create_topic("read", partitions=2)
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            for _ in range(10):
                producer.send("read", b"x", partition=0)
        admin.alter_group_offsets('g"1', {("read", 0): 4, ("read", 1): 0})
    found = values(broker)
    assert value(found, "semel_group_lag", group='g"1', topic="read", partition="0") == 6
    assert value(found, "semel_group_offset", group='g"1', topic="read", partition="0") == 4
    assert value(found, "semel_group_lag_sum", group='g"1') == 6
    assert value(found, "semel_groups", state="Empty") >= 1


def test_every_metric_of_the_table_is_there_with_its_type(broker: SemelBroker) -> None:
    with Consumer(bootstrap_servers=broker.bootstrap) as consumer:
        consumer.assign([("read", 0)])
        consumer.poll(0)
    families = {family.name: family for family in text_string_to_metric_families(page(broker))}
    for name, metric in METRICS.items():
        shown = families[name.removesuffix("_total") if metric.kind == "counter" else name]
        assert shown.type == metric.kind
        assert shown.documentation == metric.text
    assert set(families) == {name.removesuffix("_total") for name in METRICS}


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"\x16\x03\x01nonsense\r\n\r\n", b"405"),
    ],
)
def test_other_requests_are_refused_and_the_port_stays_open(
    broker: SemelBroker, request_text: bytes, status: bytes
) -> None:
    port = int(URLS[broker.bootstrap].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
        raw.sendall(request_text)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.split(b" ")[1] == status
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
        raw.sendall(b"GET /" + b"x" * (metrics.LONGEST_REQUEST_BYTES * 3))
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):  # closed or reset: both are right
            assert raw.recv(65536) == b""
    assert page(broker)


def test_a_port_in_use_is_named(tmp_path: Path, broker: SemelBroker) -> None:
    port = URLS[broker.bootstrap].rpartition(":")[2]
    with pytest.raises(Exception, match="cannot serve metrics"), SemelBroker(tmp_path / "b", "--metrics", port):
        pass


# --- bounded cardinality ---


def partition(index: int, lag: int = 0) -> SimpleNamespace:
    states = SimpleNamespace(producers={}, open_transactions={})
    segments = SimpleNamespace(size_bytes=1)
    opened = SimpleNamespace(
        states=states,
        last_stable_offset=100 - lag,
        high_watermark=100,
        end_offset=100,
        start_offset=0,
        segments=segments,
    )
    return SimpleNamespace(index=index, log=SimpleNamespace(is_open=True, opened=opened))


@pytest.mark.parametrize(("partitions", "kept_ms"), [(2_499, 0), (10_000, 4_000)])
def test_many_partitions_are_not_collected_at_every_scrape(partitions: int, kept_ms: int) -> None:
    now_ms = [1_000]
    topic = SimpleNamespace(name="many", partitions=[partition(index) for index in range(partitions)])
    broker = SimpleNamespace(
        topics=[topic],
        clock=SimpleNamespace(now_ms=lambda: now_ms[0]),
        settings={"transaction.max.timeout.ms": 900_000},
    )
    collected = metrics.BrokerMetrics(broker, None)  # type: ignore[arg-type]
    assert "semel_topics 1\n" in asyncio.run(collected._topics(metrics.Turns()))
    broker.topics = [topic, SimpleNamespace(name="new", partitions=[])]
    if kept_ms:
        now_ms[0] += kept_ms - 1
        assert "semel_topics 1\n" in asyncio.run(collected._topics(metrics.Turns()))
    now_ms[0] += 1
    assert "semel_topics 2\n" in asyncio.run(collected._topics(metrics.Turns()))


def test_ten_thousand_partitions_make_a_bounded_number_of_series_and_the_worst_is_shown() -> None:
    found = _Partitions(now_ms=0, late_after_ms=0)
    topic = SimpleNamespace(name="many")
    for index in range(10_000):
        found.add(topic, partition(index, lag=7 if index == 9_999 else 0))
    assert found.opened == 10_000
    assert {len(samples) for samples in found.series.values()} == {metrics.MOST_PARTITIONS}
    assert [lag for lag, _ in found.lags] == [7]
    assert 'partition="9999"' in found.lags[0][1]
