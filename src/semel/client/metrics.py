"""What producers and consumers have done so far, and Prometheus' text format of it.

    print(semel.prometheus(producer.metrics(), consumer.metrics(), labels={"app": "billing"}))

Totals count from the start of the client. They are counted per batch and per request, never per record. Names are those
of Kafka's own metrics where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from semel.client.errors import ConfigError
from semel.client.types import TopicPartition


class ProducerMetrics(msgspec.Struct, frozen=True, kw_only=True):
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


class ConsumerMetrics(msgspec.Struct, frozen=True, kw_only=True):
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


Metrics = ProducerMetrics | ConsumerMetrics

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

Labels = dict[str, str]


def prometheus(*metrics: Metrics, labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text format 0.0.4 of any number of producers and consumers. Each is labelled with its client.id and
    its group.id or transactional.id, all with `labels`."""
    families: dict[str, dict[str, float]] = {}
    for each in metrics:
        for field, own, value in _samples(each):
            kind = "producer" if isinstance(each, ProducerMetrics) else "consumer"
            written = _written({**(labels or {}), **own})
            family = families.setdefault(f"kafka_{kind}_{field}", {})
            if written in family:
                raise ConfigError(
                    f"two {kind}s have the labels {written}: give each a client.id of its own, or render them with "
                    "different labels"
                )
            family[written] = value
    return "".join(_rendered(name, family) for name, family in families.items())


def _samples(metrics: Metrics) -> Iterator[tuple[str, Labels, float]]:
    values = msgspec.structs.asdict(metrics)
    own = {name: values[name] for name in _LABELS if values.get(name) is not None}
    for field in _HELP:
        value = values.get(field)
        if isinstance(value, dict):
            for partition, number in sorted(value.items()):
                yield field, {**own, "topic": partition.topic, "partition": str(partition.partition)}, number
        elif value is not None:
            yield field, own, value


def _written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _rendered(name: str, family: dict[str, float]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    field = name.split("_", 2)[2]
    lines = [f"# HELP {name} {_HELP[field]}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{labels} {value!r}" for labels, value in family.items()]
    return "\n".join(lines) + "\n"


class ProducerCounters:
    """What a producer's core counts."""

    __slots__ = ("duplicates", "errors", "in_flight", "outgoing_bytes", "records", "requests", "retries")

    def __init__(self) -> None:
        self.records = self.errors = self.retries = self.duplicates = 0
        self.requests = self.in_flight = self.outgoing_bytes = 0
