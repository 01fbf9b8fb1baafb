"""Committed positions of all groups, and those that wait for the end of a transaction. Memory only, no I/O.

Every position knows the offset of its record. Whatever the order in which things are applied, the later record wins;
so a transaction that ends late does not undo a plain commit that came after its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from semel.broker.groups.records import Position, Slot

TopicPositions = dict[str, dict[int, Position]]
Transaction = tuple[int, int]  # partition of the log, producer id: each partition gets a marker of its own
Key = TypeVar("Key")


class Positions:
    """What `__consumer_offsets` says."""

    def __init__(self) -> None:
        self._committed: dict[str, TopicPositions] = {}  # group: topic: partition: position
        self._pending: dict[Transaction, dict[Slot, Position]] = {}
        self._open: dict[Slot, set[Transaction]] = {}  # transactions that hold a position for a slot
        self._open_groups: dict[str, set[Transaction]] = {}  # transactions that hold positions of a group
        self._groups_of: dict[Transaction, set[str]] = {}  # the same, the other way round

    # -- reading -------------------------------------------------------------------------------------------------------
    def get(self, slot: Slot) -> Position | None:
        return self._committed.get(slot.group, {}).get(slot.topic, {}).get(slot.partition)

    def of_group(self, group: str) -> TopicPositions:
        return self._committed.get(group, {})

    def groups(self) -> set[str]:
        return self._committed.keys() | self._open_groups.keys()

    def is_pending(self, slot: Slot) -> bool:
        return slot in self._open

    def has_open_transaction(self, group: str) -> bool:
        return group in self._open_groups

    def slots_of(self, group: str) -> list[Slot]:
        """Committed and pending ones."""
        committed = [
            Slot(group, topic, partition)
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

    def slots_of_topics(self, topics: Iterable[str]) -> Iterator[Slot]:
        wanted = set(topics)
        for group in self.groups():
            yield from (slot for slot in self.slots_of(group) if slot.topic in wanted)

    def __iter__(self) -> Iterator[tuple[Slot, Position]]:
        """All committed positions. Works on copies: another thread may count them meanwhile."""
        for group, topics in list(self._committed.items()):
            for topic, partitions in list(topics.items()):
                for partition, position in list(partitions.items()):
                    yield Slot(group, topic, partition), position

    def __len__(self) -> int:
        return sum(len(partitions) for topics in self._committed.values() for partitions in topics.values())

    # -- writing -------------------------------------------------------------------------------------------------------
    def commit(self, slot: Slot, position: Position) -> bool:
        """Takes a position unless a later record already spoke. Returns whether it did."""
        partitions = self._committed.setdefault(slot.group, {}).setdefault(slot.topic, {})
        existing = partitions.get(slot.partition)
        if existing is not None and existing.record_offset > position.record_offset:
            return False
        partitions[slot.partition] = position
        return True

    def add_pending(self, transaction: Transaction, slot: Slot, position: Position) -> None:
        self._pending.setdefault(transaction, {})[slot] = position
        self._open.setdefault(slot, set()).add(transaction)
        self._open_groups.setdefault(slot.group, set()).add(transaction)
        self._groups_of.setdefault(transaction, set()).add(slot.group)

    def delete(self, slot: Slot) -> None:
        """A tombstone: the position goes, and so do those that transactions hold for it."""
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

    def end_transaction(self, transaction: Transaction, *, commit: bool) -> list[Slot]:
        """Applies or drops what a transaction held. Returns the slots whose position changed."""
        ended = self._pending.pop(transaction, {})
        for group in self._groups_of.pop(transaction, ()):
            _discard(self._open_groups, group, transaction)
        for slot in ended:
            _discard(self._open, slot, transaction)
        if not commit:
            return []
        return [slot for slot, position in ended.items() if self.commit(slot, position)]


def _discard(index: dict[Key, set[Transaction]], key: Key, transaction: Transaction) -> None:
    transactions = index.get(key)
    if transactions is not None:
        transactions.discard(transaction)
        if not transactions:
            del index[key]
