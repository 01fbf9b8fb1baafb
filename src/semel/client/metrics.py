"""What producers, consumers, loops and sinks have done so far, and Prometheus' text format of it.

    print(semel.prometheus(producer.metrics(), consumer.metrics(), labels={"app": "billing"}))

Totals count from the start of the client. They are counted per batch and per request, never per record. Names are those
of Kafka's own metrics where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from semel.client.errors import ConfigError
from semel.client.types import TopicPartition
from semel.exposition import family, labelled


class MetricsTable(NamedTuple):
    """How a kind of metrics is written: the beginning of its names, the fields that are labels, the help texts of those
    that are numbers. A dict of numbers is labelled by its keys: partitions, or `key_label`."""

    kind: str
    prefix: str
    labels: tuple[str, ...]
    help: Mapping[str, str]
    key_label: str = "stage"


class Measured:
    """A struct that `prometheus` can write. Counters are the fields whose name ends with _total."""

    __slots__ = ()
    TABLE: ClassVar[MetricsTable]


class ProducerMetrics(msgspec.Struct, Measured, frozen=True, kw_only=True):
    """A producer at one moment."""

    client_id: str
    transactional_id: str | None = None
    record_send_total: int = 0  # acknowledged; with acks=0 written to the connection
    record_error_total: int = 0
    record_retry_total: int = 0  # a record counts each time it is sent again
    record_duplicate_total: int = 0  # acknowledged by a broker that says it had them already
    request_total: int = 0
    outgoing_byte_total: int = 0  # of batches, with retries
    requests_in_flight: int = 0
    buffer_used_bytes: int = 0
    buffer_total_bytes: int = 0
    transaction_open_ms: float | None = None  # since begin_transaction(); None: no transaction is open


class ConsumerMetrics(msgspec.Struct, Measured, frozen=True, kw_only=True):
    """A consumer at one moment."""

    client_id: str
    group_id: str | None = None
    records_consumed_total: int = 0
    bytes_consumed_total: int = 0
    fetch_total: int = 0
    fetch_error_total: int = 0
    fetches_in_flight: int = 0
    commit_total: int = 0
    commit_error_total: int = 0
    rebalance_total: int = 0
    records_lag: dict[TopicPartition, int] = {}  # by the last fetch; partitions that were fetched


_LABELS = ("client_id", "group_id", "transactional_id")
_HELP = {
    "record_send_total": "Records that brokers acknowledged.",
    "record_error_total": "Records that were not delivered.",
    "record_retry_total": "Records that were sent again, each time.",
    "record_duplicate_total": "Records that a broker acknowledged as stored before.",
    "request_total": "Produce requests.",
    "outgoing_byte_total": "Bytes of batches in produce requests, with retries.",
    "requests_in_flight": "Produce requests without a response yet.",
    "buffer_used_bytes": "Part of buffer.memory that is in use.",
    "buffer_total_bytes": "The setting buffer.memory.",
    "transaction_open_ms": "Age of the open transaction in milliseconds.",
    "records_consumed_total": "Records that poll returned.",
    "bytes_consumed_total": "Bytes of batches whose records poll returned.",
    "fetch_total": "Fetch requests.",
    "fetch_error_total": "Fetch requests that failed as a whole.",
    "fetches_in_flight": "Fetch requests without a response yet.",
    "commit_total": "Commits of offsets that succeeded.",
    "commit_error_total": "Commits of offsets that failed.",
    "rebalance_total": "Assignments that were adopted.",
    "records_lag": "Offsets between the consumer and the end of the partition, by its last fetch.",
}

ProducerMetrics.TABLE = MetricsTable("producer", "kafka_producer_", _LABELS, _HELP)
ConsumerMetrics.TABLE = MetricsTable("consumer", "kafka_consumer_", _LABELS, _HELP)
Labels = dict[str, str]


def prometheus(*metrics: Measured, labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text format 0.0.4 of any number of producers, consumers, sinks and loops. Each is labelled with its
    client.id and its group.id or transactional.id, or with its application id; all with `labels`."""
    families: dict[str, dict[str, float]] = {}
    texts: dict[str, str] = {}
    for each in metrics:
        for field, own, value in _samples(each):
            written = labelled({**(labels or {}), **own})
            name = f"{each.TABLE.prefix}{field}"
            texts[name] = each.TABLE.help[field]
            samples = families.setdefault(name, {})
            if written in samples:
                raise ConfigError(
                    f"two {each.TABLE.kind}s have the labels {written}: give each a {each.TABLE.labels[0]} of its own, "
                    "or render them with different labels"
                )
            samples[written] = value
    return "".join(
        family(name, "counter" if name.endswith("_total") else "gauge", texts[name], samples.items())
        for name, samples in families.items()
    )


def _samples(metrics: Measured) -> Iterator[tuple[str, Labels, float]]:
    own = {name: str(value) for name in metrics.TABLE.labels if (value := getattr(metrics, name, None)) is not None}
    for field in metrics.TABLE.help:
        value = getattr(metrics, field, None)
        if isinstance(value, dict):
            for key, number in sorted(value.items()):
                yield field, {**own, **_key_labels(key, metrics.TABLE.key_label)}, number
        elif value is not None:
            yield field, own, value


def _key_labels(key: TopicPartition | str, name: str) -> Labels:
    return {name: key} if isinstance(key, str) else {"topic": key.topic, "partition": str(key.partition)}


class ProducerCounters:
    """What a producer's core counts."""

    __slots__ = ("duplicates", "errors", "in_flight", "outgoing_bytes", "records", "requests", "retries")

    def __init__(self) -> None:
        self.records = self.errors = self.retries = self.duplicates = 0
        self.requests = self.in_flight = self.outgoing_bytes = 0
