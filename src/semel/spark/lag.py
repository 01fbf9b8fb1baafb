"""The sources' positions as a consumer group's: any Kafka tool shows the lag. The ledger, not they, is the truth."""

from __future__ import annotations

from collections.abc import Callable

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.client.producer.handle import TransactionOwner
from semel.client.types import OffsetAndMetadata
from semel.protocol.errors import ErrorCode
from semel.spark.ledger import Batch
from semel.spark.offsets import Offsets, parse
from semel.spark.sink_options import SinkOptions


def group_positions(batch: Batch, allowed: Callable[[str], bool]) -> dict[tuple[str, int], OffsetAndMetadata]:
    """Source positions for the group, for lag tools. The same topic in two sources: the lower position."""
    merged: Offsets = {}
    for line in batch.ends:
        for topic, parts in (parse(line or "") or {}).items():
            for partition, offset in parts.items():
                known = merged.setdefault(topic, {}).get(partition, offset)
                merged[topic][partition] = min(known, offset)
    return {
        (topic, partition): OffsetAndMetadata(offset)
        for topic, parts in merged.items()
        if allowed(topic)
        for partition, offset in parts.items()
    }


def send_positions(owner: TransactionOwner, options: SinkOptions, batch: Batch) -> None:
    """Source positions for the group, in the transaction: those of topics that this cluster has."""
    positions = group_positions(batch, lambda topic: options.position_topics(topic) and is_here(owner.cluster, topic))
    if not positions:
        return
    try:
        owner.send_offsets(positions, options.application_id)
    except KafkaError:
        for topic, _ in positions:
            owner.cluster.metadata.forget(topic)  # perhaps it was deleted meanwhile: look before the next try
        raise


def is_here(cluster: Cluster, topic: str) -> bool:
    """Whether the cluster has a topic. A source may be on another one, or its topic deleted since."""

    def attempt() -> bool:
        try:
            cluster.topic(topic)
        except KafkaError as error:
            if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                return False
            raise
        return True

    return cluster.retry(attempt, f"looking up topic {topic!r}", cluster.deadline())
