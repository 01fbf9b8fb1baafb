"""What `__consumer_offsets` says: groups and their offsets. `GroupsState.replay` alone changes what is persistent.

Of a classic group its members and the rebalance under way live in memory alone, as in Kafka; its record says which
generation has which assignment.

Every committed offset knows the offset of its record. Whatever the order in which things are applied, the later record
wins; so a transaction that ends late does not undo a plain commit that came after its own.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from semel.broker.clock import Clock, Timers
from semel.broker.coordinator_runtime import CoordinatorRuntime, KeyValue
from semel.broker.groups.classic_group import CONSUMER, Group, GroupState
from semel.broker.groups.consumer.model import Change, ConsumerGroup, EpochSet
from semel.broker.groups.records import (
    NO_TIME,
    CommittedOffset,
    GroupRecord,
    GroupsRecord,
    OffsetKey,
    OffsetRecord,
    encode_group,
    encode_offset,
    read_record,
    record_of,
)
from semel.broker.settings import Settings
from semel.protocol.errors import DecodeError, UnsupportedVersionError

TopicOffsets = dict[str, dict[int, CommittedOffset]]
Transaction = tuple[int, int]  # partition of the log, producer id: each partition gets a marker of its own
Key = TypeVar("Key")


class GroupOffsets:
    def __init__(self) -> None:
        self._committed: dict[str, TopicOffsets] = {}  # group: topic: partition: offset
        self._pending: dict[Transaction, dict[OffsetKey, CommittedOffset]] = {}
        self._open: dict[OffsetKey, set[Transaction]] = {}  # transactions that hold an offset for a slot
        self._open_groups: dict[str, set[Transaction]] = {}  # transactions that hold offsets of a group
        self._groups_of: dict[Transaction, set[str]] = {}  # the same, the other way round

    # -- reading -------------------------------------------------------------------------------------------------------
    def get(self, slot: OffsetKey) -> CommittedOffset | None:
        return self._committed.get(slot.group, {}).get(slot.topic, {}).get(slot.partition)

    def of_group(self, group: str) -> TopicOffsets:
        return self._committed.get(group, {})

    def groups(self) -> set[str]:
        return self._committed.keys() | self._open_groups.keys()

    def is_pending(self, slot: OffsetKey) -> bool:
        return slot in self._open

    def has_open_transaction(self, group: str) -> bool:
        return group in self._open_groups

    def slots_of(self, group: str) -> list[OffsetKey]:
        """Committed and pending ones."""
        committed = [
            OffsetKey(group, topic, partition)
            for topic, partitions in self._committed.get(group, {}).items()
            for partition in partitions
        ]
        known = set(committed)
        pending = {
            slot: None
            for transaction in self._open_groups.get(group, ())
            for slot in self._pending[transaction]
            if slot.group == group and slot not in known
        }
        return [*committed, *pending]

    def slots_of_topics(self, topics: Iterable[str]) -> Iterator[OffsetKey]:
        wanted = set(topics)
        for group in self.groups():
            yield from (slot for slot in self.slots_of(group) if slot.topic in wanted)

    def __iter__(self) -> Iterator[tuple[OffsetKey, CommittedOffset]]:
        """All committed offsets. Works on copies: another thread may count them meanwhile."""
        for group, topics in list(self._committed.items()):
            for topic, partitions in list(topics.items()):
                for partition, committed in list(partitions.items()):
                    yield OffsetKey(group, topic, partition), committed

    def __len__(self) -> int:
        return sum(len(partitions) for topics in self._committed.values() for partitions in topics.values())

    # -- writing -------------------------------------------------------------------------------------------------------
    def commit(self, slot: OffsetKey, committed: CommittedOffset) -> bool:
        """Takes an offset unless a later record already spoke. Returns whether it did."""
        partitions = self._committed.setdefault(slot.group, {}).setdefault(slot.topic, {})
        existing = partitions.get(slot.partition)
        if existing is not None and existing.record_offset > committed.record_offset:
            return False
        partitions[slot.partition] = committed
        return True

    def add_pending(self, transaction: Transaction, slot: OffsetKey, committed: CommittedOffset) -> None:
        self._pending.setdefault(transaction, {})[slot] = committed
        self._open.setdefault(slot, set()).add(transaction)
        self._open_groups.setdefault(slot.group, set()).add(transaction)
        self._groups_of.setdefault(transaction, set()).add(slot.group)

    def delete(self, slot: OffsetKey) -> None:
        """A tombstone: the offset goes, and so do those that transactions hold for it."""
        topics = self._committed.get(slot.group, {})
        partitions = topics.get(slot.topic, {})
        partitions.pop(slot.partition, None)
        if slot.topic in topics and not partitions:
            del topics[slot.topic]
        if slot.group in self._committed and not topics:
            del self._committed[slot.group]
        for transaction in self._open.pop(slot, ()):
            self._pending[transaction].pop(slot, None)

    def clear(self, partition: int, has: Callable[[str], bool]) -> None:
        """Forgets the groups of one partition of the log."""
        for group in [group for group in self._committed if has(group)]:
            del self._committed[group]
        for transaction in [transaction for transaction in self._pending if transaction[0] == partition]:
            self.end_transaction(transaction, commit=False)

    def end_transaction(self, transaction: Transaction, *, commit: bool) -> list[OffsetKey]:
        """Applies or drops what a transaction held. Returns the slots whose offset changed."""
        ended = self._pending.pop(transaction, {})
        for group in self._groups_of.pop(transaction, ()):
            _discard(self._open_groups, group, transaction)
        for slot in ended:
            _discard(self._open, slot, transaction)
        if not commit:
            return []
        return [slot for slot, committed in ended.items() if self.commit(slot, committed)]


def _discard(index: dict[Key, set[Transaction]], key: Key, transaction: Transaction) -> None:
    transactions = index.get(key)
    if transactions is not None:
        transactions.discard(transaction)
        if not transactions:
            del index[key]


logger = logging.getLogger(__name__)


class GroupsState:
    """The state of the group coordinator (`CoordinatorState`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.groups: dict[str, Group] = {}  # classic ones
        self.consumer_groups: dict[str, ConsumerGroup] = {}  # a group id is in one of the two
        self.offsets = GroupOffsets()

    def encode(self, record: GroupsRecord) -> KeyValue:
        if isinstance(record, OffsetRecord):
            return encode_offset(*record)
        return encode_group(*record) if isinstance(record, GroupRecord) else record_of(record)

    def decode(self, offset: int, key: bytes, value: bytes | None) -> GroupsRecord | None:
        try:
            return read_record(key, value)
        except (DecodeError, UnsupportedVersionError, struct.error, ValueError) as error:
            logger.error("the record at offset %d of __consumer_offsets is skipped: %s", offset, error)
            return None

    def replay(self, partition: int, offset: int, record: GroupsRecord, producer_id: int | None) -> None:
        if isinstance(record, OffsetRecord):
            self._replay_offset(partition, offset, record, producer_id)
        elif isinstance(record, GroupRecord):
            self._replay_group(record)
        else:
            self._replay_change(record)

    def _replay_offset(self, partition: int, offset: int, record: OffsetRecord, producer_id: int | None) -> None:
        slot, committed = record
        if committed is None:
            self.offsets.delete(slot)
            return
        committed = committed._replace(record_offset=offset)
        if producer_id is None:
            self.offsets.commit(slot, committed)
        else:
            self.offsets.add_pending((partition, producer_id), slot, committed)
        if slot.group not in self.groups and slot.group not in self.consumer_groups:  # no group management
            self.groups[slot.group] = Group(slot.group, self._clock.now_ms())

    def _replay_group(self, record: GroupRecord) -> None:
        if record.value is None:
            self.groups.pop(record.group, None)
            return
        group = self.groups.get(record.group)
        if group is None or group.is_blank:
            self.groups[record.group] = Group.from_record(record.group, record.value)
        else:
            group.replay(record.value)

    def _replay_change(self, change: Change) -> None:
        if isinstance(change, EpochSet) and change.epoch is None:
            self.consumer_groups.pop(change.group_id, None)
            return
        group = self.consumer_groups.get(change.group_id)
        if group is None:
            group = self.consumer_groups[change.group_id] = ConsumerGroup(change.group_id)
            self.groups.pop(change.group_id, None)  # one that had offsets and no members
        group.apply(change)

    def end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        self.offsets.end_transaction((partition, producer_id), commit=commit)

    def clear(self, partition: int, has: Callable[[str], bool]) -> None:
        """Members of classic groups stay: the log does not know them."""
        self.offsets.clear(partition, has)
        for group_id in [group_id for group_id in self.consumer_groups if has(group_id)]:
            del self.consumer_groups[group_id]


@dataclass(slots=True)
class Core:
    """Shared by membership, commits and administration; there is one for a broker."""

    settings: Settings
    clock: Clock
    timers: Timers
    groups: dict[str, Group]  # classic ones
    consumer_groups: dict[str, ConsumerGroup]
    offsets: GroupOffsets
    runtime: CoordinatorRuntime[GroupsRecord]
    new_id: Callable[[], str]  # a random UUID, the end of a member id

    def partition_of(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that keeps a group."""
        return self.runtime.partition_for(group_id)


def expired_slots(
    group: Group | ConsumerGroup, offsets: GroupOffsets, now_ms: int, retention_ms: int
) -> list[OffsetKey]:
    """Offsets that are not needed: not subscribed to, not in a transaction, and unused for the retention time."""
    since_ms = _unused_since(group)
    if since_ms is None:
        return []
    return [
        slot
        for slot, committed in _unread(group.group_id, group.subscribes, offsets)
        if _is_over(committed, since_ms(committed), now_ms, retention_ms)
    ]


def _unread(
    group_id: str, subscribes: Callable[[str], bool], offsets: GroupOffsets
) -> Iterator[tuple[OffsetKey, CommittedOffset]]:
    """Offsets of topics that no member subscribes to, without those that a transaction may change."""
    for topic, partitions in offsets.of_group(group_id).items():
        if not subscribes(topic):
            for partition, committed in partitions.items():
                slot = OffsetKey(group_id, topic, partition)
                if not offsets.is_pending(slot):
                    yield slot, committed


def _unused_since(group: Group | ConsumerGroup) -> Callable[[CommittedOffset], int] | None:
    """From when a group's offsets count as unused; None: all of them are in use."""
    if isinstance(group, ConsumerGroup) or group.protocol_type is None:  # the latter: no group management
        return lambda committed: committed.commit_time_ms
    if group.state is GroupState.EMPTY:
        emptied_ms = group.emptied_ms
        return lambda committed: committed.commit_time_ms if emptied_ms is None else emptied_ms
    if group.protocol_type == CONSUMER and group.topics is not None and group.state is GroupState.STABLE:
        return lambda committed: committed.commit_time_ms
    return None


def _is_over(committed: CommittedOffset, since_ms: int, now_ms: int, retention_ms: int) -> bool:
    if committed.expire_time_ms != NO_TIME:  # the client said so itself (OffsetCommit 2-4)
        return now_ms >= committed.expire_time_ms
    return now_ms - since_ms >= retention_ms
