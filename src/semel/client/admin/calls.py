"""The calls of the admin client, over the connections of any driver: topics, configurations, offsets, the cluster.

Every call takes `timeout_ms` (default.api.timeout.ms) and raises a `KafkaError` that says what to do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from semel.client.admin.base import admin_settings, listed
from semel.client.admin.groups import GroupCalls
from semel.client.admin.observation import ObservationCalls
from semel.client.admin.transactions import TransactionAdminCalls
from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode, ClusterCalls, Controller, Leader, NodeTarget, Target
from semel.client.errors import ConfigError, FatalError, KafkaError, error_of
from semel.client.group.offset_calls import list_offsets_retried
from semel.client.group.offset_requests import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED, FoundOffset
from semel.client.immediate import Closing, blocking
from semel.client.metadata import BrokerAddress
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.client.types import OffsetAndTimestamp, TopicPartition, checked_partitions, timestamp_ms
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import configs as config_messages
from semel.protocol.messages import records as record_messages
from semel.protocol.messages import topics as topic_messages

TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
SET, DELETE = 0, 1
_DEFAULT_SOURCES = (5, -1)  # the broker's built-in default, or unknown
TO_THE_END = -1


class NewTopic(msgspec.Struct, frozen=True):
    """A topic to create; -1 leaves a number to the broker's defaults."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    configs: dict[str, str] = {}


class ClusterInfo(msgspec.Struct, frozen=True):
    cluster_id: str
    controller_id: int
    brokers: list[BrokerAddress]
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


class AdminCalls(GroupCalls, TransactionAdminCalls, ObservationCalls):
    """Everything that the admin client can do."""

    def __init__(self, settings: ClientSettings, cluster: ClusterCalls[Any]) -> None:
        self.settings = settings
        self.cluster = cluster

    # -- topics --------------------------------------------------------------------------------------------------------
    async def create_topics(
        self, topics: Iterable[NewTopic], timeout_ms: float | None = None, validate_only: bool = False
    ) -> None:
        """Creates topics and waits until each partition has a leader. The first topic that fails is raised."""
        deadline, wanted = self._deadline(timeout_ms), list(topics)
        request = topic_messages.CreateTopicsRequest(
            [
                topic_messages.CreatableTopic(
                    topic.name,
                    topic.partitions,
                    topic.replication_factor,
                    configs=[
                        topic_messages.CreatableTopicConfig(name, str(value)) for name, value in topic.configs.items()
                    ],
                )
                for topic in wanted
            ],
            timeout_ms=self._broker_timeout_ms(deadline),
            validate_only=validate_only,
        )
        response = await self.cluster.call(
            Controller(),
            topic_messages.CREATE_TOPICS,
            request,
            timeout_s=deadline.remaining_s(),
            errors=lambda response: _moved(response.topics),
            at_least=4,
        )
        _raise_first(response.topics, lambda result: f"creating topic {result.name!r}")
        if not validate_only:
            for topic in wanted:
                await self._await_leaders(topic.name, deadline)

    async def create_topic(
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
            await self.create_topics([NewTopic(name, partitions, replication_factor, dict(configs or {}))], timeout_ms)
        except KafkaError as error:
            if if_not_exists and error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                return False
            raise
        return True

    async def delete_topics(self, names: Iterable[str] | str, timeout_ms: float | None = None) -> None:
        deadline, wanted, controller = self._deadline(timeout_ms), listed(names), Controller()
        connection = await self.cluster.retry(
            lambda: self.cluster.connect(controller, deadline), "looking for the controller", deadline, controller
        )
        limit_ms = self._broker_timeout_ms(deadline)
        if connection.capabilities.version_of(topic_messages.DELETE_TOPICS) >= 6:
            request = topic_messages.DeleteTopicsRequest(
                topics=[topic_messages.DeleteTopicState(name) for name in wanted], timeout_ms=limit_ms
            )
        else:
            request = topic_messages.DeleteTopicsRequest(topic_names=wanted, timeout_ms=limit_ms)
        response = await self._call(
            controller, topic_messages.DELETE_TOPICS, request, deadline, lambda response: _moved(response.responses)
        )
        for name in wanted:
            self.cluster.forget(Leader(name, 0))
        _raise_first(response.responses, lambda result: f"deleting topic {result.name!r}")

    async def list_topics(self, include_internal: bool = False, timeout_ms: float | None = None) -> list[str]:
        metadata = await self._all_metadata(timeout_ms)
        return sorted(name for name, topic in metadata.items() if include_internal or not topic.is_internal)

    async def describe_topics(
        self, names: Iterable[str] | str | None = None, offsets: bool = False, timeout_ms: float | None = None
    ) -> list[TopicInfo]:
        """Partitions, leaders, replicas (None: of all topics); with `offsets` also where each log starts and ends."""
        deadline = self._deadline(timeout_ms)
        wanted = None if names is None else listed(names)
        known = await self._all_metadata(timeout_ms)
        missing = [name for name in wanted or () if name not in known]
        if missing:
            raise FatalError(
                f"there is no topic {missing[0]!r}; `semel topic list` shows what there is",
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            )
        chosen = sorted(known) if wanted is None else wanted
        looked_up = [
            TopicPartition(name, part.number)
            for name in chosen
            for part in known[name].partitions.values()
            if offsets and part.leader >= 0  # nobody responds for the others: -1
        ]
        first, last = [await self._offsets(looked_up, where, deadline) for where in (EARLIEST, LATEST)]
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

    async def create_partitions(self, topic: str, total: int, timeout_ms: float | None = None) -> None:
        """Raises a topic's number of partitions to `total`."""
        deadline = self._deadline(timeout_ms)
        request = topic_messages.CreatePartitionsRequest(
            [topic_messages.CreatePartitionsTopic(topic, total, None)], timeout_ms=self._broker_timeout_ms(deadline)
        )
        response = await self._call(
            Controller(), topic_messages.CREATE_PARTITIONS, request, deadline, lambda response: _moved(response.results)
        )
        _raise_first(response.results, lambda result: f"adding partitions to topic {result.name!r}")
        await self._await_leaders(topic, deadline, at_least=total)

    async def delete_records(
        self, before: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """Deletes what stands before an offset (TO_THE_END: everything); returns where each log starts now."""
        deadline = self._deadline(timeout_ms)
        starts: dict[TopicPartition, int] = {}
        for partition, offset in zip(checked_partitions(before), before.values(), strict=True):
            topic = record_messages.DeleteRecordsTopic(
                partition.topic, [record_messages.DeleteRecordsPartition(partition.partition, offset)]
            )
            response = await self._call(
                Leader(*partition),
                record_messages.DELETE_RECORDS,
                record_messages.DeleteRecordsRequest([topic], self._broker_timeout_ms(deadline)),
                deadline,
                errors=lambda response: (part.error_code for topic in response.topics for part in topic.partitions),
            )
            starts[partition] = response.topics[0].partitions[0].low_watermark
        return starts

    # -- configurations ------------------------------------------------------------------------------------------------
    async def describe_configs(
        self, *, topic: str | None = None, broker: int | None = None, timeout_ms: float | None = None
    ) -> dict[str, ConfigEntry]:
        """The configuration of a topic or of a broker."""
        kind, name, target = _resource(topic, broker)
        request = config_messages.DescribeConfigsRequest([config_messages.DescribeConfigsResource(kind, name, None)])
        response = await self._call(target, config_messages.DESCRIBE_CONFIGS, request, self._deadline(timeout_ms), None)
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

    async def alter_configs(
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
            config_messages.IncrementalConfig(
                option, DELETE if value is None else SET, None if value is None else str(value)
            )
            for option, value in changes.items()
        ]
        request = config_messages.IncrementalAlterConfigsRequest(
            [config_messages.IncrementalConfigsResource(kind, name, entries)]
        )
        response = await self._call(
            target, config_messages.INCREMENTAL_ALTER_CONFIGS, request, self._deadline(timeout_ms), None
        )
        _raise_first(response.responses, lambda result: f"changing the configuration of {result.resource_name!r}")

    # -- offsets -------------------------------------------------------------------------------------------------------
    async def list_offsets(
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
        found = await list_offsets_retried(self.cluster, wanted, isolation, self._deadline(timeout_ms))
        return {partition: OffsetAndTimestamp(at.offset, at.timestamp) for partition, at in found.items()}

    # -- the cluster ---------------------------------------------------------------------------------------------------
    async def describe_cluster(self, timeout_ms: float | None = None) -> ClusterInfo:
        deadline = self._deadline(timeout_ms)
        what = "describing the cluster"
        metadata = await self.cluster.retry(lambda: self.cluster.refresh([], deadline), what, deadline)
        brokers = sorted(metadata.brokers.values())
        capabilities = (await self.cluster.connect(AnyNode(), deadline)).capabilities
        return ClusterInfo(metadata.cluster_id or "", metadata.controller_id, brokers, dict(capabilities.features))

    # -- small things --------------------------------------------------------------------------------------------------
    def _broker_timeout_ms(self, deadline: Deadline) -> int:
        """Less than the request may take, so that the broker's own timeout error arrives."""
        return max(1, int(0.8 * min(deadline.remaining_s() * 1000, self.settings.request_timeout_ms)))

    async def _all_metadata(self, timeout_ms: float | None) -> dict[str, Any]:
        deadline = self._deadline(timeout_ms)
        metadata = await self.cluster.retry(lambda: self.cluster.refresh(None, deadline), "listing topics", deadline)
        return dict(metadata.topics)

    async def _offsets(
        self, partitions: list[TopicPartition], where: int, deadline: Deadline
    ) -> dict[TopicPartition, FoundOffset]:
        wanted = dict.fromkeys(partitions, where)
        return await list_offsets_retried(self.cluster, wanted, READ_UNCOMMITTED, deadline) if wanted else {}

    async def _await_leaders(self, topic: str, deadline: Deadline, at_least: int = 1) -> None:
        async def attempt() -> None:
            self.cluster.forget(Leader(topic, 0))
            partitions = (await self.cluster.topic(topic, deadline)).partitions
            if len(partitions) < at_least or any(part.leader < 0 for part in partitions.values()):
                raise error_of(ErrorCode.LEADER_NOT_AVAILABLE, f"topic {topic!r}")

        await self.cluster.retry(attempt, f"waiting for the leaders of topic {topic!r}", deadline)


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


# --- The admin client: topics, configurations, offsets, groups, transactions, the cluster ---
#
#     with Admin(bootstrap_servers="localhost:9092") as admin:
#         admin.create_topic("orders", partitions=6)
#         for group in admin.list_groups():
#             print(group.group_id, group.state)
#
# Every call takes `timeout_ms` (default.api.timeout.ms) and raises a `KafkaError` that says what to do. What the
# calls do is in `calls.py`, `groups.py`, `transactions.py` and `observation.py`.


class Admin(Closing):
    def __init__(self, options: Mapping[str, Any] | ClientSettings | None = None, /, **keywords: Any) -> None:
        """Options by Kafka's names: `{"bootstrap.servers": "..."}` or `bootstrap_servers="..."`."""
        self.settings = admin_settings(options, keywords)
        self._cluster = Cluster(self.settings)
        self.calls = AdminCalls(self.settings, self._cluster.calls)

    def close(self) -> None:
        self._cluster.close()

    create_topics = blocking(AdminCalls.create_topics)
    create_topic = blocking(AdminCalls.create_topic)
    delete_topics = blocking(AdminCalls.delete_topics)
    list_topics = blocking(AdminCalls.list_topics)
    describe_topics = blocking(AdminCalls.describe_topics)
    create_partitions = blocking(AdminCalls.create_partitions)
    delete_records = blocking(AdminCalls.delete_records)

    describe_configs = blocking(AdminCalls.describe_configs)
    alter_configs = blocking(AdminCalls.alter_configs)

    list_offsets = blocking(AdminCalls.list_offsets)
    describe_cluster = blocking(AdminCalls.describe_cluster)

    list_groups = blocking(AdminCalls.list_groups)
    describe_group = blocking(AdminCalls.describe_group)
    group_lag = blocking(AdminCalls.group_lag)
    group_offsets = blocking(AdminCalls.group_offsets)
    alter_group_offsets = blocking(AdminCalls.alter_group_offsets)
    delete_group_offsets = blocking(AdminCalls.delete_group_offsets)
    delete_groups = blocking(AdminCalls.delete_groups)

    list_transactions = blocking(AdminCalls.list_transactions)
    describe_transaction = blocking(AdminCalls.describe_transaction)
    abort_transaction = blocking(AdminCalls.abort_transaction)
    describe_producers = blocking(AdminCalls.describe_producers)
    abort_hanging_transaction = blocking(AdminCalls.abort_hanging_transaction)

    describe_transactions = blocking(AdminCalls.describe_transactions)
    producers_of = blocking(AdminCalls.producers_of)
    await_markers = blocking(AdminCalls.await_markers)
    offsets_of_existing = blocking(AdminCalls.offsets_of_existing)
    committed_of_all = blocking(AdminCalls.committed_of_all)
    transaction_events = blocking(AdminCalls.transaction_events)
