"""What is known about a cluster: brokers, topics, leaders. Filled from Metadata responses."""

from __future__ import annotations

from typing import NamedTuple

from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import MetadataResponse, MetadataResponsePartition, MetadataResponseTopic
from semel.protocol.schema import NO_UUID


class BrokerAddress(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None = None


class PartitionMetadata(NamedTuple):
    number: int
    leader: int  # node id, -1 without one
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    error: ErrorCode


class TopicMetadata(NamedTuple):
    name: str
    topic_id: bytes
    is_internal: bool
    partitions: dict[int, PartitionMetadata]


class Metadata:
    """The newest known state; a stale response never replaces a partition's leader of a newer epoch."""

    def __init__(self) -> None:
        self.brokers: dict[int, BrokerAddress] = {}
        self.topics: dict[str, TopicMetadata] = {}
        self.errors: dict[str, ErrorCode] = {}  # topics that the last response refused
        self.controller_id = -1
        self.is_controller_in_doubt = False
        self.cluster_id: str | None = None
        self._fetched_at_s: dict[str, float] = {}

    def update(self, response: MetadataResponse, now_s: float, is_complete: bool = False) -> None:
        """`is_complete`: the request was for all topics, so those that are not in the response do not exist."""
        self.brokers = {b.node_id: BrokerAddress(b.node_id, b.host, b.port, b.rack) for b in response.brokers}
        self.controller_id = response.controller_id
        self.is_controller_in_doubt = False
        self.cluster_id = response.cluster_id
        for topic in response.topics:
            if topic.name is not None:
                self._update_topic(topic.name, topic, now_s)
        if is_complete:
            for name in self.topics.keys() - {topic.name for topic in response.topics}:
                del self.topics[name]
                self.forget(name)

    def forget(self, topic: str) -> None:
        """Its leaders are in doubt: they are looked up again."""
        self._fetched_at_s.pop(topic, None)

    def is_fresh(self, topic: str, now_s: float, max_age_s: float) -> bool:
        fetched_at_s = self._fetched_at_s.get(topic)
        return fetched_at_s is not None and now_s - fetched_at_s < max_age_s and topic in self.topics

    def _update_topic(self, name: str, response: MetadataResponseTopic, now_s: float) -> None:
        if response.error_code:
            self.errors[name] = ErrorCode.of(response.error_code)
            self._fetched_at_s.pop(name, None)
            if response.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.topics.pop(name, None)
            return
        self.errors.pop(name, None)
        before = self.topics.get(name)
        if before and before.topic_id != response.topic_id and NO_UUID not in (before.topic_id, response.topic_id):
            before = None  # deleted and created again: old epochs say nothing
        known = before.partitions if before else {}
        partitions = {p.partition_index: _newer(known.get(p.partition_index), p) for p in response.partitions}
        self.topics[name] = TopicMetadata(name, response.topic_id, response.is_internal, partitions)
        self._fetched_at_s[name] = now_s


def _newer(known: PartitionMetadata | None, response: MetadataResponsePartition) -> PartitionMetadata:
    if known and -1 < response.leader_epoch < known.leader_epoch:
        return known
    return PartitionMetadata(
        response.partition_index,
        response.leader_id,
        response.leader_epoch,
        tuple(response.replica_nodes),
        tuple(response.isr_nodes),
        ErrorCode.of(response.error_code),
    )
