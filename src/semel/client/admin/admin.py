"""The admin client: topics, configurations, offsets, groups, transactions, the cluster.

    with Admin(bootstrap_servers="localhost:9092") as admin:
        admin.create_topic("orders", partitions=6)
        for group in admin.list_groups():
            print(group.group_id, group.state)

Every call takes `timeout_ms` (default.api.timeout.ms) and raises a `KafkaError` that says what to do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from semel.client.admin import groups, transactions
from semel.client.admin.groups import GroupInfo, GroupLag, GroupListing
from semel.client.admin.transactions import ProducerInfo, TransactionInfo, TransactionListing
from semel.client.cluster import AnyNode, Cluster, Controller, Leader, NodeTarget, Target
from semel.client.consumer.consumer import OffsetsToCommit
from semel.client.consumer.engine import checked_partitions
from semel.client.errors import ConfigError, FatalError, KafkaError, error_of
from semel.client.group.offset_requests import EARLIEST, LATEST, FoundOffset
from semel.client.group.offsets import fetch_committed, list_offsets_retried, retried
from semel.client.settings import ClientSettings
from semel.client.timestamps import timestamp_ms
from semel.client.timing import Deadline
from semel.client.types import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.configs import (
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalConfig,
    IncrementalConfigsResource,
)
from semel.protocol.messages.records import (
    DELETE_RECORDS,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from semel.protocol.messages.topics import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)

TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
SET, DELETE = 0, 1
_DEFAULT_SOURCES = (5, -1)  # the broker's built-in default, or unknown
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
TO_THE_END = -1


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


class Admin:
    def __init__(self, options: Mapping[str, Any] | ClientSettings | None = None, /, **keywords: Any) -> None:
        """Options by Kafka's names: `{"bootstrap.servers": "..."}` or `bootstrap_servers="..."`."""
        keywords = {"allow_auto_create_topics": False, **keywords}  # looking a topic up must not create it
        if isinstance(options, ClientSettings):
            self.settings = options.common(**keywords)
        else:
            self.settings = ClientSettings.of(options, **keywords)
        self._cluster = Cluster(self.settings)

    # -- topics --------------------------------------------------------------------------------------------------------
    def create_topics(
        self, topics: Iterable[NewTopic], timeout_ms: float | None = None, validate_only: bool = False
    ) -> None:
        """Creates topics and waits until each partition has a leader. The first topic that fails is raised."""
        deadline, wanted = self._deadline(timeout_ms), list(topics)
        request = CreateTopicsRequest(
            [
                CreatableTopic(
                    topic.name,
                    topic.partitions,
                    topic.replication_factor,
                    configs=[CreatableTopicConfig(name, str(value)) for name, value in topic.configs.items()],
                )
                for topic in wanted
            ],
            timeout_ms=self._broker_timeout_ms(deadline),
            validate_only=validate_only,
        )
        response = self._cluster.call(
            Controller(),
            CREATE_TOPICS,
            request,
            timeout_s=deadline.remaining_s(),
            errors=lambda response: _moved(response.topics),
            at_least=4,
        )
        _raise_first(response.topics, lambda result: f"creating topic {result.name!r}")
        if not validate_only:
            for topic in wanted:
                self._await_leaders(topic.name, deadline)

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        replication_factor: int = -1,
        configs: Mapping[str, str] | None = None,
        *,
        if_not_exists: bool = False,
        timeout_ms: float | None = None,
    ) -> bool:
        """Creates one topic; whether it was created (`if_not_exists`: False where it was there already)."""
        try:
            self.create_topics([NewTopic(name, partitions, replication_factor, dict(configs or {}))], timeout_ms)
        except KafkaError as error:
            if if_not_exists and error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                return False
            raise
        return True

    def delete_topics(self, names: Iterable[str] | str, timeout_ms: float | None = None) -> None:
        deadline, wanted, controller = self._deadline(timeout_ms), _listed(names), Controller()
        connection = self._cluster.retry(
            lambda: self._cluster.connect(controller, deadline), "looking for the controller", deadline, controller
        )
        limit_ms = self._broker_timeout_ms(deadline)
        if connection.capabilities.version_of(DELETE_TOPICS) >= 6:
            request = DeleteTopicsRequest(topics=[DeleteTopicState(name) for name in wanted], timeout_ms=limit_ms)
        else:
            request = DeleteTopicsRequest(topic_names=wanted, timeout_ms=limit_ms)
        response = self._cluster.call(
            controller,
            DELETE_TOPICS,
            request,
            timeout_s=deadline.remaining_s(),
            errors=lambda response: _moved(response.responses),
        )
        for name in wanted:
            self._cluster.forget(Leader(name, 0))
        _raise_first(response.responses, lambda result: f"deleting topic {result.name!r}")

    def list_topics(self, include_internal: bool = False, timeout_ms: float | None = None) -> list[str]:
        metadata = self._all_metadata(timeout_ms)
        return sorted(name for name, topic in metadata.items() if include_internal or not topic.is_internal)

    def describe_topics(
        self, names: Iterable[str] | str | None = None, offsets: bool = False, timeout_ms: float | None = None
    ) -> list[TopicInfo]:
        """Partitions, leaders, replicas (None: of all topics); with `offsets` also where each log starts and ends."""
        deadline = self._deadline(timeout_ms)
        wanted = None if names is None else _listed(names)
        known = self._all_metadata(timeout_ms)
        missing = [name for name in wanted or () if name not in known]
        if missing:
            raise FatalError(
                f"there is no topic {missing[0]!r}; `semel topic list` shows what there is",
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            )
        chosen = sorted(known) if wanted is None else wanted
        partitions = [TopicPartition(name, index) for name in chosen for index in sorted(known[name].partitions)]
        first = self._offsets(partitions, EARLIEST, READ_UNCOMMITTED, deadline) if offsets else {}
        last = self._offsets(partitions, LATEST, READ_UNCOMMITTED, deadline) if offsets else {}
        none = FoundOffset(-1, -1, -1)
        return [
            TopicInfo(
                name,
                str(uuid.UUID(bytes=bytes(known[name].topic_id))),
                known[name].is_internal,
                [
                    PartitionInfo(
                        part.number,
                        part.leader,
                        list(part.replicas),
                        list(part.in_sync),
                        first.get(TopicPartition(name, part.number), none).offset,
                        last.get(TopicPartition(name, part.number), none).offset,
                    )
                    for _, part in sorted(known[name].partitions.items())
                ],
            )
            for name in chosen
        ]

    def create_partitions(self, topic: str, total: int, timeout_ms: float | None = None) -> None:
        """Raises a topic's number of partitions to `total`."""
        deadline = self._deadline(timeout_ms)
        request = CreatePartitionsRequest(
            [CreatePartitionsTopic(topic, total, None)], timeout_ms=self._broker_timeout_ms(deadline)
        )
        response = self._cluster.call(
            Controller(),
            CREATE_PARTITIONS,
            request,
            timeout_s=deadline.remaining_s(),
            errors=lambda response: _moved(response.results),
        )
        _raise_first(response.results, lambda result: f"adding partitions to topic {result.name!r}")
        self._await_leaders(topic, deadline, at_least=total)

    def delete_records(
        self, before: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """Deletes what stands before an offset (TO_THE_END: everything); returns where each log starts now."""
        deadline = self._deadline(timeout_ms)
        starts: dict[TopicPartition, int] = {}
        for partition, offset in zip(checked_partitions(before), before.values(), strict=True):
            topic = DeleteRecordsTopic(partition.topic, [DeleteRecordsPartition(partition.partition, offset)])
            response = self._cluster.call(
                Leader(*partition),
                DELETE_RECORDS,
                DeleteRecordsRequest([topic], self._broker_timeout_ms(deadline)),
                timeout_s=deadline.remaining_s(),
                errors=lambda response: (part.error_code for topic in response.topics for part in topic.partitions),
            )
            starts[partition] = response.topics[0].partitions[0].low_watermark
        return starts

    # -- configurations ------------------------------------------------------------------------------------------------
    def describe_configs(
        self, *, topic: str | None = None, broker: int | None = None, timeout_ms: float | None = None
    ) -> dict[str, ConfigEntry]:
        """The configuration of a topic or of a broker."""
        kind, name, target = _resource(topic, broker)
        request = DescribeConfigsRequest([DescribeConfigsResource(kind, name, None)])
        response = self._cluster.call(
            target, DESCRIBE_CONFIGS, request, timeout_s=self._seconds(timeout_ms), errors=None
        )
        _raise_first(response.results, lambda result: f"reading the configuration of {result.resource_name!r}")
        return {
            entry.name: ConfigEntry(
                entry.name,
                entry.value,
                entry.config_source in _DEFAULT_SOURCES,
                entry.read_only,
                entry.is_sensitive,
            )
            for entry in response.results[0].configs
        }

    def alter_configs(
        self,
        changes: Mapping[str, str | None],
        *,
        topic: str | None = None,
        broker: int | None = None,
        timeout_ms: float | None = None,
    ) -> None:
        """Sets options of a topic or a broker; None takes an option back to its default."""
        kind, name, target = _resource(topic, broker)
        entries = [
            IncrementalConfig(option, DELETE if value is None else SET, None if value is None else str(value))
            for option, value in changes.items()
        ]
        request = IncrementalAlterConfigsRequest([IncrementalConfigsResource(kind, name, entries)])
        response = self._cluster.call(
            target, INCREMENTAL_ALTER_CONFIGS, request, timeout_s=self._seconds(timeout_ms), errors=None
        )
        _raise_first(response.responses, lambda result: f"changing the configuration of {result.resource_name!r}")

    # -- offsets -------------------------------------------------------------------------------------------------------
    def list_offsets(
        self,
        times: Mapping[TopicPartition, int | datetime] | Mapping[tuple[str, int], int | datetime],
        *,
        read_committed: bool = False,
        timeout_ms: float | None = None,
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """The offset for a time in each partition: EARLIEST, LATEST, MAX_TIMESTAMP, milliseconds since 1970, or a
        datetime with a time zone."""
        at_ms = [timestamp_ms(at) if isinstance(at, datetime) else at for at in times.values()]
        wanted = dict(zip(checked_partitions(times), at_ms, strict=True))
        isolation = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        found = list_offsets_retried(self._cluster, wanted, isolation, self._deadline(timeout_ms))
        return {partition: OffsetAndTimestamp(at.offset, at.timestamp) for partition, at in found.items()}

    # -- groups --------------------------------------------------------------------------------------------------------
    def list_groups(self, timeout_ms: float | None = None) -> list[GroupListing]:
        return groups.list_groups(self._cluster, self._deadline(timeout_ms))

    def describe_group(self, group_id: str, timeout_ms: float | None = None) -> GroupInfo:
        return groups.describe_group(self._cluster, group_id, self._deadline(timeout_ms))

    def group_lag(self, group_id: str, timeout_ms: float | None = None) -> list[GroupLag]:
        """The committed offset of each partition, the end of its log, the lag, and the member that reads it."""
        deadline = self._deadline(timeout_ms)
        group = groups.describe_group(self._cluster, group_id, deadline)
        return groups.group_lag(self._cluster, group, deadline)

    def group_offsets(self, group_id: str, timeout_ms: float | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """All committed offsets of a group."""
        return retried(
            self._cluster,
            lambda deadline: fetch_committed(self._cluster, group_id, None, False, deadline),
            f"reading the committed offsets of group {group_id!r}",
            self._seconds(timeout_ms),
        )

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: OffsetsToCommit,
        timeout_ms: float | None = None,
    ) -> None:
        """Moves a group that has no members now."""
        positions = [at if isinstance(at, OffsetAndMetadata) else OffsetAndMetadata(at) for at in offsets.values()]
        wanted = dict(zip(checked_partitions(offsets), positions, strict=True))
        groups.set_offsets(self._cluster, group_id, wanted, self._deadline(timeout_ms))

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]], timeout_ms: float | None = None
    ) -> None:
        wanted = checked_partitions(partitions)
        groups.delete_offsets(self._cluster, group_id, wanted, self._deadline(timeout_ms))

    def delete_groups(self, group_ids: Iterable[str] | str, timeout_ms: float | None = None) -> None:
        """Deletes groups without members; the first that fails is raised."""
        outcome = groups.delete_groups(self._cluster, _listed(group_ids), self._deadline(timeout_ms))
        for error in outcome.values():
            if error is not None:
                raise error

    # -- transactions --------------------------------------------------------------------------------------------------
    def list_transactions(
        self, states: Iterable[str] = (), producer_ids: Iterable[int] = (), timeout_ms: float | None = None
    ) -> list[TransactionListing]:
        return transactions.list_transactions(self._cluster, states, producer_ids, self._deadline(timeout_ms))

    def describe_transaction(self, transactional_id: str, timeout_ms: float | None = None) -> TransactionInfo:
        return transactions.describe_transaction(self._cluster, transactional_id, self._deadline(timeout_ms))

    def abort_transaction(self, transactional_id: str, timeout_ms: float | None = None) -> tuple[int, int]:
        """Aborts what a transactional id has open and fences its owner; the new (producer id, epoch)."""
        return transactions.fence(self._cluster, transactional_id, self._deadline(timeout_ms))

    def abort_hanging_transaction(
        self, partition: tuple[str, int], start_offset: int, timeout_ms: float | None = None
    ) -> ProducerInfo:
        """Ends a transaction that its coordinator has forgotten, by a marker into the partition."""
        (checked,) = checked_partitions([partition])
        return transactions.abort_hanging(self._cluster, checked, start_offset, self._deadline(timeout_ms))

    def describe_producers(self, partition: tuple[str, int], timeout_ms: float | None = None) -> list[ProducerInfo]:
        (checked,) = checked_partitions([partition])
        return transactions.describe_producers(self._cluster, checked, self._deadline(timeout_ms))

    # -- the cluster ---------------------------------------------------------------------------------------------------
    def describe_cluster(self, timeout_ms: float | None = None) -> ClusterInfo:
        deadline = self._deadline(timeout_ms)
        metadata = self._cluster.retry(lambda: self._cluster.refresh([], deadline), "looking it up", deadline)
        brokers = [BrokerInfo(*broker) for _, broker in sorted(metadata.brokers.items())]
        capabilities = self._cluster.connect(AnyNode(), deadline).capabilities
        return ClusterInfo(metadata.cluster_id or "", metadata.controller_id, brokers, dict(capabilities.features))

    def close(self) -> None:
        self._cluster.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- small things --------------------------------------------------------------------------------------------------
    def _seconds(self, timeout_ms: float | None) -> float:
        return (self.settings.default_api_timeout_ms if timeout_ms is None else timeout_ms) / 1000

    def _deadline(self, timeout_ms: float | None) -> Deadline:
        return Deadline(self._seconds(timeout_ms))

    def _broker_timeout_ms(self, deadline: Deadline) -> int:
        """Less than the request may take, so that the broker's own timeout error arrives."""
        return max(1, int(0.8 * min(deadline.remaining_s() * 1000, self.settings.request_timeout_ms)))

    def _all_metadata(self, timeout_ms: float | None) -> dict[str, Any]:
        deadline = self._deadline(timeout_ms)
        metadata = self._cluster.retry(lambda: self._cluster.refresh(None, deadline), "listing topics", deadline)
        return dict(metadata.topics)

    def _offsets(
        self, partitions: Iterable[TopicPartition], where: int, isolation: int, deadline: Deadline
    ) -> dict[TopicPartition, FoundOffset]:
        wanted = dict.fromkeys(partitions, where)
        return list_offsets_retried(self._cluster, wanted, isolation, deadline) if wanted else {}

    def _await_leaders(self, topic: str, deadline: Deadline, at_least: int = 1) -> None:
        def attempt() -> None:
            self._cluster.forget(Leader(topic, 0))
            partitions = self._cluster.topic(topic, deadline).partitions
            if len(partitions) < at_least or any(part.leader < 0 for part in partitions.values()):
                raise error_of(ErrorCode.LEADER_NOT_AVAILABLE, f"topic {topic!r}")

        self._cluster.retry(attempt, f"waiting for the leaders of topic {topic!r}", deadline)


def _listed(names: Iterable[str] | str) -> list[str]:
    """One name may be given as it is: its letters are never meant."""
    return [names] if isinstance(names, str) else list(names)


def _resource(topic: str | None, broker: int | None) -> tuple[int, str, Target]:
    if (topic is None) == (broker is None):
        raise ConfigError("name either a topic or a broker")
    if topic is not None:
        return TOPIC_RESOURCE, topic, AnyNode()
    assert broker is not None
    return BROKER_RESOURCE, str(broker), NodeTarget(broker)


def _moved(results: Iterable[Any]) -> Iterable[int]:
    """The one error of the controller's responses that is retried; others are raised as they are."""
    return (result.error_code for result in results if result.error_code == ErrorCode.NOT_CONTROLLER)


def _raise_first(results: Iterable[Any], what: Any) -> None:
    for result in results:
        if result.error_code:
            raise error_of(result.error_code, what(result), getattr(result, "error_message", None))


__all__ = [
    "EARLIEST",
    "LATEST",
    "TO_THE_END",
    "Admin",
    "NewTopic",
]
