"""Metrics of producers and consumers in Prometheus' text format."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.client.metrics import _HELP, _LABELS, ConsumerMetrics, ProducerMetrics
from semel.client.types import TopicPartition

PRODUCER = ProducerMetrics(client_id="a", record_send_total=10**15 + 1, buffer_used_bytes=7)
CONSUMER = ConsumerMetrics(
    client_id='quote " backslash \\ line\nend',
    group_id="g",
    records_lag={TopicPartition("t", 1): 5, TopicPartition("t", 0): 3},
)


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_an_independent_parser_reads_every_number_and_label() -> None:
    found = parsed(semel.prometheus(PRODUCER, CONSUMER, labels={"app": "billing"}))
    own = {("app", "billing"), ("client_id", CONSUMER.client_id), ("group_id", "g"), ("topic", "t")}
    assert found["kafka_consumer_records_lag", frozenset(own | {("partition", "1")})] == 5
    assert found["kafka_consumer_records_lag", frozenset(own | {("partition", "0")})] == 3
    sent = "kafka_producer_record_send_total", frozenset({("app", "billing"), ("client_id", "a")})
    assert found[sent] == 10**15 + 1
    assert not any(name == "kafka_producer_transaction_open_ms" for name, _ in found), "no transaction is open"


def test_every_number_of_both_kinds_is_rendered_with_help_and_type() -> None:
    fields = {*ProducerMetrics.__struct_fields__, *ConsumerMetrics.__struct_fields__} - set(_LABELS)
    assert fields == set(_HELP)
    full = msgspec.structs.replace(PRODUCER, transaction_open_ms=1.5, transactional_id="x")
    text = semel.prometheus(full, CONSUMER)
    for field in fields:
        assert text.count(f"_{field} ") == 2, field  # HELP and TYPE
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert kind == ("counter" if name.endswith("_total") else "gauge")


def test_families_stand_together_whatever_the_order_of_the_clients() -> None:
    others = [msgspec.structs.replace(PRODUCER, client_id=name) for name in ("b", "c")]
    text = semel.prometheus(PRODUCER, CONSUMER, *others)
    assert text.count("# TYPE kafka_producer_request_total") == 1
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert sorted(set(names), key=names.index) == [name for i, name in enumerate(names) if i == names.index(name)]
    blocks = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert len(blocks) == len(set(blocks))


def test_two_clients_with_the_same_labels_are_refused() -> None:
    with pytest.raises(semel.ConfigError, match=r"two producers.*client_id"):
        semel.prometheus(PRODUCER, PRODUCER)


def test_nothing_renders_as_nothing_and_metrics_are_frozen() -> None:
    assert semel.prometheus() == ""
    with pytest.raises(AttributeError):
        PRODUCER.record_send_total = 1  # type: ignore[misc]
