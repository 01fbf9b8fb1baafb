"""Which positions of a group are too old to keep. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from semel.broker.groups.consumer.model import ConsumerGroup
from semel.broker.groups.group import CONSUMER, Group
from semel.broker.groups.positions import Positions
from semel.broker.groups.records import NO_TIME, Position, Slot
from semel.broker.groups.states import GroupState


def expired_slots(group: Group, positions: Positions, now_ms: int, retention_ms: int) -> list[Slot]:
    """Positions that nobody needs: not subscribed to, not in a transaction, and unused for the retention time."""
    since_ms = _unused_since(group)
    if since_ms is None:
        return []
    return [
        slot
        for slot, position in _unread(group.group_id, group.subscribes, positions)
        if _is_over(position, since_ms(position), now_ms, retention_ms)
    ]


def expired_consumer_slots(group: ConsumerGroup, positions: Positions, now_ms: int, retention_ms: int) -> list[Slot]:
    """The same for a group of the consumer protocol."""
    return [
        slot
        for slot, position in _unread(group.group_id, group.subscribes, positions)
        if _is_over(position, position.commit_time_ms, now_ms, retention_ms)
    ]


def _unread(group_id: str, subscribes: Callable[[str], bool], positions: Positions) -> Iterator[tuple[Slot, Position]]:
    """Positions of topics that nobody in the group reads, without those that a transaction may change."""
    for topic, partitions in positions.of_group(group_id).items():
        if not subscribes(topic):
            for partition, position in partitions.items():
                slot = Slot(group_id, topic, partition)
                if not positions.is_pending(slot):
                    yield slot, position


def _unused_since(group: Group) -> Callable[[Position], int] | None:
    """From when a group's positions count as unused; None: all of them are in use."""
    if group.protocol_type is None:  # somebody who does not use group management
        return lambda position: position.commit_time_ms
    if group.state is GroupState.EMPTY:
        emptied_ms = group.emptied_ms
        return lambda position: position.commit_time_ms if emptied_ms is None else emptied_ms
    if group.protocol_type == CONSUMER and group.topics is not None and group.state is GroupState.STABLE:
        return lambda position: position.commit_time_ms
    return None


def _is_over(position: Position, since_ms: int, now_ms: int, retention_ms: int) -> bool:
    if position.expire_time_ms != NO_TIME:  # the client said so itself (OffsetCommit 2-4)
        return now_ms >= position.expire_time_ms
    return now_ms - since_ms >= retention_ms
