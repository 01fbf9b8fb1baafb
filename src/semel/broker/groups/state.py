"""What `__consumer_offsets` says: groups and their positions. `GroupsState.replay` alone changes what is persistent.

Of a classic group its members and the rebalance under way live in memory alone, as in Kafka; its record says which
generation has which assignment.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

from semel.broker.clock import Clock
from semel.broker.coordinator_runtime import KeyValue
from semel.broker.groups.consumer.model import Change, ConsumerGroup, EpochSet
from semel.broker.groups.consumer.records import KINDS, change_of, record_of
from semel.broker.groups.group import Group
from semel.broker.groups.positions import Positions
from semel.broker.groups.records import GroupRecord, PositionRecord, encode_group, encode_position, read_record
from semel.protocol.errors import DecodeError, UnsupportedVersionError

logger = logging.getLogger(__name__)

_KIND = struct.Struct(">h")

GroupsRecord = PositionRecord | GroupRecord | Change


class GroupsState:
    """The state of the group coordinator (`CoordinatorState`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.groups: dict[str, Group] = {}  # classic ones
        self.consumer_groups: dict[str, ConsumerGroup] = {}  # a group id is in one of the two
        self.positions = Positions()

    def encode(self, record: GroupsRecord) -> KeyValue:
        if isinstance(record, PositionRecord):
            return encode_position(*record)
        return encode_group(*record) if isinstance(record, GroupRecord) else record_of(record)

    def decode(self, offset: int, key: bytes, value: bytes | None) -> GroupsRecord | None:
        try:
            (kind,) = _KIND.unpack_from(key)
            return change_of(kind, key, value) if kind in KINDS else read_record(key, value)
        except (DecodeError, UnsupportedVersionError, struct.error, ValueError) as error:
            logger.error("the record at offset %d of __consumer_offsets is skipped: %s", offset, error)
            return None

    def replay(self, partition: int, offset: int, record: GroupsRecord, producer_id: int | None) -> None:
        if isinstance(record, PositionRecord):
            self._replay_position(partition, offset, record, producer_id)
        elif isinstance(record, GroupRecord):
            self._replay_group(record)
        else:
            self._replay_change(record)

    def _replay_position(self, partition: int, offset: int, record: PositionRecord, producer_id: int | None) -> None:
        slot, position = record
        if position is None:
            self.positions.delete(slot)
            return
        position = position._replace(record_offset=offset)
        if producer_id is None:
            self.positions.commit(slot, position)
        else:
            self.positions.add_pending((partition, producer_id), slot, position)
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
            self.groups.pop(change.group_id, None)  # one that had positions and no members
        group.apply(change)

    def end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        self.positions.end_transaction((partition, producer_id), commit=commit)

    def clear(self, partition: int, has: Callable[[str], bool]) -> None:
        """Members of classic groups stay: the log does not know them."""
        self.positions.clear(partition, has)
        for group_id in [group_id for group_id in self.consumer_groups if has(group_id)]:
            del self.consumer_groups[group_id]
