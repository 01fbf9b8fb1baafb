"""The topics: names, ids, partitions, settings. Every change is in the store before it is acknowledged."""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from semel.broker import resource_settings
from semel.broker.partition_plan import PartitionPlan, find_folders, plan_partitions
from semel.broker.settings import SettingError, Settings
from semel.broker.store import NEXT_PRODUCER_ID, Store
from semel.broker.turns import at_once
from semel.protocol.errors import ErrorCode
from semel.storage import DataDir, LogConfig, PartitionLog, StorageError

if TYPE_CHECKING:
    from semel.broker.handlers.fetch import Fetch

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"

TopicPartition = tuple[str, int]


logger = logging.getLogger(__name__)

TOPIC_KEY = "topic/"
DELETED_KEY = "deleted/"  # ids of deleted topics, until their folders are gone
PRODUCER_ID_LIMIT = 1 << 62  # no counter reaches it; a client may write any id into a batch
EPOCHS_PER_START = 2  # as with Kafka: a leader is lost with the node, and elected when it comes back
MAX_NAME_LENGTH = 249
MAX_PARTITIONS_PER_TOPIC = 10_000  # as Kafka limits one request
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+\Z")

INTERNAL_TOPICS = (CONSUMER_OFFSETS, TRANSACTION_STATE)
# Name -> (setting with the number of partitions, setting with the segment size, other settings).
_INTERNAL: dict[str, tuple[str, str, dict[str, str]]] = {
    CONSUMER_OFFSETS: (
        "offsets.topic.num.partitions",
        "offsets.topic.segment.bytes",
        {"cleanup.policy": "compact", "compression.type": "producer"},
    ),
    TRANSACTION_STATE: (
        "transaction.state.log.num.partitions",
        "transaction.state.log.segment.bytes",
        {
            "cleanup.policy": "compact",
            "compression.type": "uncompressed",
            "min.insync.replicas": "1",
            "unclean.leader.election.enable": "false",
        },
    ),
}


class TopicError(Exception):
    """A refused change of topics, with the error code for the client."""

    def __init__(self, code: ErrorCode, message: str | None) -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message


class Partition:
    """A partition as the handlers see it: its log, and the fetches that wait for it."""

    __slots__ = ("index", "log", "topic", "waiters")

    def __init__(self, topic: Topic, index: int, log: PartitionLog) -> None:
        self.topic = topic
        self.index = index
        self.log = log
        self.waiters: dict[Fetch, None] = {}  # in the order of their requests: who waits longest is served first
        log.on_advance = self._on_advance

    def _on_advance(self, _log: PartitionLog) -> None:
        if self.waiters:
            self.wake_all()

    def wake_all(self) -> None:
        for waiter in tuple(self.waiters):
            waiter.wake(self)


class Topic:
    """A topic. `id` is as the wire has it: 16 bytes."""

    __slots__ = ("configs", "epoch_base", "id", "is_internal", "name", "partitions")

    def __init__(self, name: str, topic_id: bytes, configs: dict[str, str], epoch_base: int = 0) -> None:
        self.name = name
        self.id = topic_id
        self.configs = configs
        self.epoch_base = epoch_base  # what the leader epoch would have been before the first start
        self.is_internal = name in INTERNAL_TOPICS
        self.partitions: list[Partition] = []


class Topics:
    """The registry. Every change is durable when the method returns.

    The store is what makes it durable. Folders follow when their first records are synced: an entry without a folder
    gets an empty one at the next start, and a folder whose deletion is in the store goes then.
    """

    def __init__(self, store: Store, data_dir: DataDir, settings: Settings) -> None:
        self._store = store
        self._data_dir = data_dir
        self._settings = settings
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        self._by_plain_name: dict[str, str] = {}  # plain form of every name, also of those that are being changed
        self._changing: set[str] = set()  # names of topics that are being created or deleted, which takes several turns
        self.changes = asyncio.Lock()  # held by requests that change topics: one after the other
        self._base_config = resource_settings.base_config(settings)
        self.on_deleted: Callable[[list[Topic]], None] = lambda topics: None

    # -- finding -------------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Topic]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: bytes) -> Topic | None:
        return self._by_id.get(topic_id)

    def partition(self, name: str, index: int) -> Partition | None:
        topic = self._by_name.get(name)
        return topic.partitions[index] if topic is not None and 0 <= index < len(topic.partitions) else None

    def find_log(self, name: str, index: int) -> PartitionLog | None:
        partition = self.partition(name, index)
        return partition.log if partition is not None else None

    def is_changing(self, name: str) -> bool:
        """Whether a topic that does not exist is being created, or one that did is being deleted."""
        return name in self._changing

    # -- starting ------------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Brings store and data folder together (see partition_plan)."""
        stored = dict(self._store.items(TOPIC_KEY))
        deleted = {UUID(topic_id) for topic_id, _ in self._store.items(DELETED_KEY)}
        folders = find_folders(stored, deleted, self._data_dir)
        plan = plan_partitions(stored, deleted, folders, store_is_new=self._store.is_new)
        self._store_found(plan)
        for key in plan.delete:
            self._data_dir.delete(*key)
        for key in plan.move_aside:
            topic_id = self._data_dir.logs[key].topic_id
            self._data_dir.set_aside(*key, f"it holds records of the topic id {topic_id}, which no topic has")
        self._report(plan)
        for name, entry in plan.topics.items():
            topic = Topic(name, UUID(entry["id"]).bytes, entry["configs"], entry.get("epoch_base", 0))
            opened: list[Partition] = []
            at_once(self._open_partitions(topic, entry["partitions"], opened))
            topic.partitions = opened
            self._register(topic)
        self._data_dir.drop_stale_checkpoints()
        self._data_dir.sync_namespace()
        for topic_id in deleted:
            self._store.put(DELETED_KEY + topic_id.hex, None)
        self._store.commit()

    def _store_found(self, plan: PartitionPlan) -> None:
        """Stores what the folders have and the store has not: topics, partitions, producer ids."""
        for name in plan.changed:
            count = plan.topics[name]["partitions"]
            self._store.put(TOPIC_KEY + name, plan.topics[name])
            logger.warning("topic taken over from its folders", extra={"topic": name, "partitions": count})
        for name, index in plan.identify:
            self._data_dir.identify(name, index, UUID(plan.topics[name]["id"]), self._base_config)
        for key in (*plan.taken_over, *plan.identify):
            log = self._data_dir.logs[key]
            self._reserve_producer_ids(log, log.all_producer_ids)
        for log in self._data_dir.logs.values():
            if log.is_open:  # all of them after a crash, when the store may have lost its last changes
                self._reserve_producer_ids(log, log.states.producers.keys)
        self._store.commit()

    def _reserve_producer_ids(self, log: PartitionLog, find: Callable[[], Iterable[int]]) -> None:
        """Producer ids that are in a log are never used again: the first batch of a new producer with the same id would
        be taken for a retry of one that is there."""
        try:
            highest = max((found for found in find() if found < PRODUCER_ID_LIMIT), default=-1)
        except (StorageError, OSError) as error:
            logger.error("the producer ids of %s cannot be read, new ones may collide: %s", log, error)
            return
        if highest >= (self._store.get(NEXT_PRODUCER_ID) or 0):
            self._store.put(NEXT_PRODUCER_ID, highest + 1)

    def _report(self, plan: PartitionPlan) -> None:
        for name, index in plan.leave:
            logger.error(
                "a folder cannot be used: its partition.metadata cannot be read, and no topic has it; left alone",
                extra={"topic": name, "partition": index},
            )
        for name, index in plan.create:
            end_offset = self._data_dir.last_known_end(name, index)
            if end_offset:
                logger.error(
                    "the folder of a partition is missing, an empty one takes its place; stop and restore it",
                    extra={"topic": name, "partition": index, "had_records_up_to": end_offset},
                )

    def _open_partitions(self, topic: Topic, count: int, opened: list[Partition]) -> Generator[None, None, None]:
        """Opens a topic's partitions up to a number, from the folder where it has them. Yields after each."""
        config, topic_id = self.log_config(topic.configs), UUID(bytes=topic.id)
        leader_epoch = topic.epoch_base + EPOCHS_PER_START * self._store.starts
        for index in range(len(topic.partitions), count):
            log = self._data_dir.logs.get((topic.name, index))
            if log is not None and log.topic_id != topic_id:
                self._data_dir.set_aside(topic.name, index, f"it belongs to the topic id {log.topic_id}")
                log = None
            if log is None:
                log = self._data_dir.create(topic.name, index, topic_id, config)
            log.config = config
            log.leader_epoch = leader_epoch
            opened.append(Partition(topic, index, log))
            yield

    def _register(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.id] = topic
        self._by_plain_name[plain_name(topic.name)] = topic.name

    def _claim(self, name: str) -> None:
        self._changing.add(name)
        self._by_plain_name[plain_name(name)] = name

    def _release(self, name: str) -> None:
        self._changing.discard(name)
        if name not in self._by_name:
            self._by_plain_name.pop(plain_name(name), None)

    # -- changing ------------------------------------------------------------------------------------------------------
    def create(self, name: str, partition_count: int, configs: Mapping[str, str] | None = None) -> Topic:
        """A new topic. TopicError if it may not be."""
        return at_once(self.creation([(name, partition_count, dict(configs or {}))]))[0]

    def creation(self, wanted: list[tuple[str, int, dict[str, str]]]) -> Generator[None, None, list[Topic]]:
        """New topics, checked with `check_new`, for the price of one fsync. Nobody sees them before the last step."""
        created: list[tuple[Topic, list[Partition]]] = []
        claimed: list[str] = []
        try:
            for name, count, configs in wanted:
                self.check_new(name, count, configs)
                self._claim(name)
                claimed.append(name)
                topic = Topic(name, _new_id(), configs, -EPOCHS_PER_START * self._store.starts)
                created.append((topic, []))
                yield from self._open_partitions(topic, count, created[-1][1])
            for topic, partitions in created:
                topic.partitions = partitions
                self._put(topic)
            self._data_dir.drop_stale_checkpoints()
            self._store.commit()
            for topic, _ in created:
                self._register(topic)
        except BaseException as error:
            self._take_back(created)
            if isinstance(error, TopicError | StorageError | OSError):
                raise _refusal(error) from error
            raise
        finally:
            for name in claimed:
                self._release(name)
        return [topic for topic, _ in created]

    def _take_back(self, created: list[tuple[Topic, list[Partition]]]) -> None:
        """After a failure, as with a full disk: none of the topics of the request exists."""
        self._store.discard_changes()
        for topic, partitions in created:
            for partition in partitions:
                self._data_dir.delete(topic.name, partition.index)

    def check_new(self, name: str, partition_count: int, configs: Mapping[str, str]) -> None:
        """Raises TopicError unless a topic could be created like this."""
        check_name(name)
        if name in self._by_name or name in self._changing:
            raise TopicError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
        if (other := self._by_plain_name.get(plain_name(name))) is not None:
            check_collision(name, other)
        if partition_count < 1:
            raise TopicError(ErrorCode.INVALID_PARTITIONS, "Number of partitions must be larger than 0.")
        if partition_count > MAX_PARTITIONS_PER_TOPIC:
            raise TopicError(
                ErrorCode.POLICY_VIOLATION, f"Number of partitions may be {MAX_PARTITIONS_PER_TOPIC} at most."
            )
        check_configs(configs)

    def internal_partition_count(self, name: str) -> int:
        count: int = self._settings[_INTERNAL[name][0]]
        return count

    def internal(self, name: str) -> Topic:
        """An internal topic, created if it is not there yet."""
        topic = self._by_name.get(name)
        if topic is None:
            count, segment_bytes, configs = _INTERNAL[name]
            topic = self.create(
                name, self._settings[count], {**configs, "segment.bytes": str(self._settings[segment_bytes])}
            )
        return topic

    def deletion(self, topics: list[Topic]) -> Generator[None, None, None]:
        """Deletes topics; fetches that wait for them return. After the first step nobody sees the topics."""
        for topic in topics:
            self._store.put(TOPIC_KEY + topic.name, None)
            self._store.put(DELETED_KEY + topic.id.hex(), 1)
        try:
            self._store.commit()
        except OSError as error:
            raise _refusal(error) from error
        for topic in topics:
            del self._by_name[topic.name], self._by_id[topic.id]
            self._claim(topic.name)
            for partition in topic.partitions:
                partition.log.on_advance = None
        try:
            for topic in topics:
                for partition in topic.partitions:
                    self._data_dir.delete(topic.name, partition.index)
                    partition.wake_all()
                    yield
            self.on_deleted(topics)  # once: it goes through all committed offsets
        finally:
            for topic in topics:
                self._release(topic.name)

    def addition(self, topic: Topic, count: int) -> Generator[None, None, None]:
        """More partitions, up to a number. Nobody sees them before the last step."""
        before = len(topic.partitions)
        added: list[Partition] = []
        try:
            yield from self._open_partitions(topic, count, added)
            self._data_dir.drop_stale_checkpoints()
            topic.partitions += added
            self._put(topic)
            self._store.commit()
        except BaseException as error:
            del topic.partitions[before:]
            for partition in added:
                self._data_dir.delete(topic.name, partition.index)
            if isinstance(error, StorageError | OSError):
                raise _refusal(error) from error
            raise

    def set_configs(self, topic: Topic, configs: dict[str, str]) -> None:
        """Replaces a topic's own settings, which were checked with `check_configs`."""
        before, topic.configs = topic.configs, configs
        self._put(topic)
        try:
            self._store.commit()
        except OSError as error:
            topic.configs = before
            raise _refusal(error) from error
        self._apply_configs(topic)

    def on_settings_altered(self) -> None:
        """The broker's defaults changed."""
        self._base_config = resource_settings.base_config(self._settings)
        for topic in self:
            self._apply_configs(topic)

    def log_config(self, configs: Mapping[str, str]) -> LogConfig:
        return resource_settings.with_overrides(self._base_config, configs)

    def _apply_configs(self, topic: Topic) -> None:
        config = self.log_config(topic.configs)
        for partition in topic.partitions:
            partition.log.config = config

    def _put(self, topic: Topic) -> None:
        entry = {
            "id": topic.id.hex(),
            "partitions": len(topic.partitions),
            "configs": topic.configs,
            "epoch_base": topic.epoch_base,
        }
        self._store.put(TOPIC_KEY + topic.name, entry)


def check_name(name: str) -> None:
    """Raises TopicError unless Kafka allows a topic to be called so."""
    problem = name_problem(name)
    if problem:
        raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {problem}")


def plain_name(name: str) -> str:
    """A topic's name as Kafka's metrics write it."""
    return name.replace(".", "_")


def check_collision(name: str, other: str) -> None:
    """Kafka's metrics write '.' as '_', so names that differ only there are refused."""
    if ("." in name or "_" in name) and plain_name(other) == plain_name(name):
        raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic '{name}' collides with existing topic: {other}")


def name_problem(name: str) -> str | None:
    if not name:
        return "the empty string is not allowed"
    if name in (".", ".."):
        return f"'{name}' is not allowed"
    if len(name) > MAX_NAME_LENGTH:
        return f"the length of '{name}' is longer than the max allowed length {MAX_NAME_LENGTH}"
    if not _LEGAL_NAME.match(name):
        return f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    return None


def check_configs(configs: Mapping[str, str]) -> None:
    """Raises TopicError unless these can be a topic's settings."""
    try:
        resource_settings.validate(configs)
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None


def _refusal(error: TopicError | StorageError | OSError) -> TopicError:
    if isinstance(error, TopicError):
        return error
    if isinstance(error, StorageError):
        return TopicError(error.code, error.message)
    return TopicError(ErrorCode.KAFKA_STORAGE_ERROR, f"the data folder cannot be written: {error}")


def _new_id() -> bytes:
    """A random id. As Kafka's, its text never starts with a dash, which a command line would take for an option."""
    while True:
        topic_id = uuid4().bytes
        if not urlsafe_b64encode(topic_id).startswith(b"-"):
            return topic_id
