"""The broker: what it is made of, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from semel import faults
from semel.broker import features
from semel.broker.clock import Clock, system_clock
from semel.broker.coordinator_runtime import InternalTopic
from semel.broker.counters import Counters
from semel.broker.fetch_sessions import Fetches
from semel.broker.groups import GroupCoordinator
from semel.broker.quotas import Quotas
from semel.broker.settings import SettingError, Settings, parse_dynamic
from semel.broker.store import NEXT_PRODUCER_ID, Store
from semel.broker.topics import CONSUMER_OFFSETS, TRANSACTION_STATE, TopicPartition, Topics
from semel.broker.transactions import TransactionCoordinator
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.storage import DataDir, StorageError, SyncGroup

if TYPE_CHECKING:
    from semel.broker.dispatch import RequestContext

log = logging.getLogger(__name__)

INSPECTORS = 2  # threads: most of their work is done without the GIL
_ALTERED = "broker-config"
_ALTERED_FOR_CLUSTER = "cluster-config"


class BrokerNode:
    """One node. Making it locks the data folder, `start` brings the coordinators up, `stop` closes everything."""

    def __init__(self, settings: Settings, data: Path, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock or system_clock()
        self.node_id = settings.node_id
        self.counters = Counters()
        self.sync = SyncGroup(settings["fsync"])
        self.data_dir = DataDir.open(data, sync=self.sync, now_ms=self.clock.now_ms)
        self.store = Store(data, fsync=settings["fsync"] == "commit", files=self.data_dir.files)
        settings.finalize(self.store.get(features.LEVELS) or {})  # by earlier runs
        self.quotas = Quotas(self.store, self.clock.monotonic_s)
        self.settings.replace_altered(self.altered_settings())
        self.settings.replace_altered(self.altered_settings(for_cluster=True), for_cluster=True)
        self.topics = Topics(self.store, self.data_dir, settings)
        self.topics.on_deleted = lambda topics: self.groups.on_topics_deleted([topic.name for topic in topics])
        self.cluster_id = self._cluster_id()
        self.advertised: tuple[str, int] | None = None  # for clients; None: the address that they reached
        self.fetches = Fetches(settings["max.incremental.fetch.session.cache.slots"])
        self.inspectors = ThreadPoolExecutor(INSPECTORS, "inspect")  # look at large batches, off the event loop
        self.codec = ThreadPoolExecutor(1, "codec")  # large requests and responses; one: it needs the GIL
        self.groups: GroupCoordinator
        self.transactions: TransactionCoordinator

    async def start(self) -> None:
        """Loads the topics, then the coordinators replay their logs."""
        self.topics.load()
        self.groups = GroupCoordinator(
            self.settings,
            self.clock,
            self.topics,
            self.store,
            InternalTopic(CONSUMER_OFFSETS, self.topics, self.sync, self.clock),
        )
        self.transactions = TransactionCoordinator(
            self.settings,
            self.clock,
            InternalTopic(TRANSACTION_STATE, self.topics, self.sync, self.clock),
            self.reserve_producer_ids,
            self.write_markers,
            self.counters,
        )
        await self.groups.start()
        await self.transactions.start()

    async def stop(self) -> None:
        """A clean end: coordinators, then the last fsyncs, then the logs."""
        await self.transactions.stop()
        await self.groups.stop()
        self.inspectors.shutdown()
        self.codec.shutdown()
        await self.sync.close()
        self.store.close()
        self.data_dir.close()

    async def write_markers(
        self,
        partitions: Collection[TopicPartition],
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        transaction_version: int = 1,
    ) -> dict[TopicPartition, ErrorCode]:
        """Ends a transaction in its partitions. Durable on return; every partition has an entry, NONE or its error."""
        results: dict[TopicPartition, ErrorCode] = {}
        waits = []
        turns = Turns()
        for name, index in tuple(partitions):
            await turns.next()
            partition = self.topics.partition(name, index)
            if partition is None:
                results[name, index] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            if faults.armed:
                await faults.reach("marker.before")
            try:
                marker = partition.log.append_marker(
                    producer_id,
                    producer_epoch,
                    coordinator_epoch,
                    commit=commit,
                    now_ms=self.clock.now_ms(),
                    transaction_version=transaction_version,
                )
            except StorageError as error:
                results[name, index] = error.code
                continue
            if faults.armed:
                await faults.reach("marker.after")
            is_durable = partition.log.high_watermark > marker.last_offset
            waits.append(((name, index), None if is_durable else self.sync.wait(partition.log, marker.last_offset + 1)))
        for (name, index), durable in waits:
            code = results[name, index] = ErrorCode.NONE if durable is None else await _outcome(durable)
            if name == CONSUMER_OFFSETS and code is ErrorCode.NONE:
                self.groups.on_marker(index, producer_id, commit)
        return results

    def address_for(self, context: RequestContext) -> tuple[str, int]:
        """Host and port that a client shall connect to."""
        if self.advertised is not None:
            return self.advertised
        return context.connection.local_address if context.connection is not None else ("localhost", 9092)

    def alter_settings(self, texts: dict[str, str], *, for_cluster: bool = False) -> None:
        """Replaces the settings that were altered at run time. SettingError: nothing changed."""
        parse_dynamic(texts)
        self.store.put(_ALTERED_FOR_CLUSTER if for_cluster else _ALTERED, texts or None)
        try:
            self.store.commit()
        except OSError as error:
            raise SettingError(f"the data folder cannot be written: {error}") from error
        self.settings.replace_altered(texts, for_cluster=for_cluster)
        self.topics.on_settings_altered()

    def altered_settings(self, *, for_cluster: bool = False) -> dict[str, str]:
        """Those for the cluster are there from the start where a new Kafka cluster has them."""
        if not for_cluster:
            return dict(self.store.get(_ALTERED) or {})
        return {**self.settings.always_for_cluster(), **(self.store.get(_ALTERED_FOR_CLUSTER) or {})}

    def reserve_producer_ids(self, count: int) -> range:
        """Producer ids that were never given out: durable on return, so that no restart hands them out again.

        StorageError if the store cannot be written, with the code that Kafka has for it.
        """
        first: int = self.store.get(NEXT_PRODUCER_ID) or 0
        self.store.put(NEXT_PRODUCER_ID, first + count)
        try:
            self.store.commit()
        except OSError as error:
            message = f"no producer ids can be reserved, the data folder cannot be written: {error}"
            raise StorageError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, message) from error
        return range(first, first + count)

    def _cluster_id(self) -> str:
        """Written into meta.properties by the first start, as `kafka-storage format` does."""
        properties = self.data_dir.properties()
        if "cluster.id" in properties:
            return properties["cluster.id"]
        cluster_id = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
        directory_id = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
        self.data_dir.init_properties(
            {"version": "1", "cluster.id": cluster_id, "node.id": str(self.node_id), "directory.id": directory_id}
        )
        return cluster_id


async def _outcome(durable: asyncio.Future[None]) -> ErrorCode:
    try:
        await durable
    except StorageError as error:
        return error.code
    return ErrorCode.NONE
