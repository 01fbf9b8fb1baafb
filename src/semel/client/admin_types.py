"""What the admin client answers: plain values that turn into JSON with `msgspec.json.encode`."""

from __future__ import annotations

import msgspec

from semel.client.consumer_types import TopicPartition


class NewTopic(msgspec.Struct, frozen=True):
    """A topic to create; -1 leaves a number to the broker's defaults."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    configs: dict[str, str] = {}


class BrokerInfo(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None = None


class ClusterInfo(msgspec.Struct, frozen=True):
    cluster_id: str
    controller_id: int
    brokers: list[BrokerInfo]
    features: dict[str, int] = {}


class PartitionInfo(msgspec.Struct, frozen=True):
    partition: int
    leader: int
    replicas: list[int]
    in_sync: list[int]
    earliest_offset: int = -1
    latest_offset: int = -1


class TopicInfo(msgspec.Struct, frozen=True):
    name: str
    topic_id: str
    is_internal: bool
    partitions: list[PartitionInfo]


class ConfigEntry(msgspec.Struct, frozen=True):
    name: str
    value: str | None
    is_default: bool
    is_read_only: bool
    is_sensitive: bool


class GroupListing(msgspec.Struct, frozen=True):
    group_id: str
    state: str
    protocol_type: str
    type: str


class MemberInfo(msgspec.Struct, frozen=True):
    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    partitions: list[TopicPartition]


class GroupInfo(msgspec.Struct, frozen=True):
    group_id: str
    state: str
    protocol_type: str
    assignor: str
    coordinator: int
    members: list[MemberInfo]


class GroupPosition(msgspec.Struct, frozen=True):
    """Where a group stands in a partition; None where something is not known."""

    topic: str
    partition: int
    committed: int | None
    end: int | None
    lag: int | None
    member_id: str | None = None
    client_id: str | None = None
    host: str | None = None


class ProducerInfo(msgspec.Struct, frozen=True):
    """A producer that a partition remembers; `transaction_start` is -1 without an open transaction."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    transaction_start: int


class TransactionListing(msgspec.Struct, frozen=True):
    transactional_id: str
    producer_id: int
    state: str


class TransactionInfo(msgspec.Struct, frozen=True):
    transactional_id: str
    state: str
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: list[TopicPartition]
    coordinator: int
