"""Who shall have which partitions. Pure; the names are Kafka's.

`uniform` gives every member the same number, give or take one, and moves as little as it can. `range` gives every
member neighbouring partitions of each topic, the same ones in topics with the same number of partitions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from semel.broker.groups.consumer.model import Partitions


class AssignableMember(NamedTuple):
    """What a member can be given: ids of topics that exist."""

    topics: frozenset[bytes]
    instance_id: str | None = None


AssignableMembers = Mapping[str, AssignableMember]  # by member id
Counts = Mapping[bytes, int]  # partitions of each topic
Targets = dict[str, Partitions]
Assignor = Callable[[AssignableMembers, Counts, Mapping[str, Partitions]], Targets]


def assign_range(wishes: AssignableMembers, counts: Counts, before: Mapping[str, Partitions]) -> Targets:
    order = sorted(wishes, key=lambda member: (wishes[member].instance_id is None, wishes[member].instance_id, member))
    shares: dict[str, set[tuple[bytes, int]]] = {member: set() for member in wishes}
    for topic, count in counts.items():
        readers = [member for member in order if topic in wishes[member].topics]
        start = 0
        for number, member in enumerate(readers):
            size = count // len(readers) + (number < count % len(readers))
            shares[member].update((topic, partition) for partition in range(start, start + size))
            start += size
    return {member: frozenset(share) for member, share in shares.items()}


def assign_uniform(wishes: AssignableMembers, counts: Counts, before: Mapping[str, Partitions]) -> Targets:
    kept = {
        member: {part for part in before.get(member, ()) if part[0] in wish.topics and part[1] < counts.get(part[0], 0)}
        for member, wish in wishes.items()
    }
    kinds = {wish.topics for wish in wishes.values()}
    if len(kinds) == 1:
        shares = _share_alike({topic: counts[topic] for topic in kinds.pop() & counts.keys()}, kept)
    else:
        shares = _share_among_readers(wishes, counts, kept)
    return {member: frozenset(share) for member, share in shares.items()}


Shares = dict[str, set[tuple[bytes, int]]]


def _share_alike(counts: Counts, kept: Shares) -> Shares:
    """All members want the same: those with most partitions keep the odd ones, so that the least has to move."""
    everything = [(topic, index) for topic in sorted(counts) for index in range(counts[topic])]
    fair, odd = divmod(len(everything), len(kept))
    order = sorted(kept, key=lambda member: (-len(kept[member]), member))
    quotas = {member: fair + (number < odd) for number, member in enumerate(order)}
    shares = {member: set(sorted(kept[member])[: quotas[member]]) for member in order}
    taken = {part for share in shares.values() for part in share}
    left = iter([part for part in everything if part not in taken])
    for member in order:
        shares[member].update(part for _, part in zip(range(quotas[member] - len(shares[member])), left, strict=False))
    return shares


def _share_among_readers(wishes: AssignableMembers, counts: Counts, kept: Shares) -> Shares:
    """Members want different topics: each partition goes to the reader with the least, then loads are evened out."""
    balance = _Balance(wishes, counts, kept)
    taken = {part for share in kept.values() for part in share}
    for topic in balance.topics:
        for index in range(counts[topic]):
            if (topic, index) not in taken:
                balance.give((topic, index))
    while balance.move_one():
        pass
    return balance.shares()


class _Kind:
    """Topics with the same readers: the partitions that each reader has of them, and the reader with the least load."""

    def __init__(self, readers: tuple[str, ...]) -> None:
        self.readers = readers
        self.parts: dict[str, list[tuple[bytes, int]]] = {member: [] for member in readers}  # heaps
        self._lightest = [(0, member) for member in readers]  # a heap; a member's lowest entry is not above its load

    def lightest(self, loads: Mapping[str, int]) -> str:
        while self._lightest[0][0] != loads[self._lightest[0][1]]:
            member = self._lightest[0][1]
            heapq.heapreplace(self._lightest, (loads[member], member))
        return self._lightest[0][1]

    def is_lighter(self, member: str, load: int) -> None:
        heapq.heappush(self._lightest, (load, member))


class _Balance:
    """Who has how much. A step looks at each kind of topics, never at each partition: there are thousands of those,
    and the broker serves nobody else meanwhile."""

    def __init__(self, wishes: AssignableMembers, counts: Counts, kept: Shares) -> None:
        kinds: dict[tuple[str, ...], _Kind] = {}
        self._kind_of: dict[bytes, _Kind] = {}
        order = sorted(wishes)
        for topic in counts:
            readers = tuple(member for member in order if topic in wishes[member].topics)
            if readers and readers not in kinds:
                kinds[readers] = _Kind(readers)
            if readers:
                self._kind_of[topic] = kinds[readers]
        self.topics = sorted(self._kind_of, key=lambda topic: (len(self._kind_of[topic].readers), topic))
        self._loads = {member: len(share) for member, share in kept.items()}
        self._kinds: dict[str, list[_Kind]] = {member: [] for member in kept}  # that a member reads
        self._all = tuple(kinds.values())
        for kind in self._all:
            for member in kind.readers:
                self._kinds[member].append(kind)
        for member, share in kept.items():
            for part in sorted(share):  # a sorted list is a heap
                self._kind_of[part[0]].parts[member].append(part)

    def give(self, part: tuple[bytes, int]) -> None:
        """To the reader with the least."""
        kind = self._kind_of[part[0]]
        taker = kind.lightest(self._loads)
        heapq.heappush(kind.parts[taker], part)
        self._loads[taker] += 1

    def move_one(self) -> bool:
        """Moves one partition from a member to one with at least two fewer. Every move lowers the sum of squares."""
        least = min(self._loads.values(), default=0)
        for giver in sorted(self._loads, key=lambda member: (-self._loads[member], member)):
            load = self._loads[giver]
            if load < least + 2:
                return False
            able = [
                kind
                for kind in self._kinds[giver]
                if kind.parts[giver] and self._loads[kind.lightest(self._loads)] <= load - 2
            ]
            if able:
                part = heapq.heappop(min(able, key=lambda kind: kind.parts[giver][0]).parts[giver])
                self._loads[giver] = load - 1
                for kind in self._kinds[giver]:
                    kind.is_lighter(giver, load - 1)
                self.give(part)
                return True
        return False

    def shares(self) -> Shares:
        shares: Shares = {member: set() for member in self._loads}
        for kind in self._all:
            for member, parts in kind.parts.items():
                shares[member].update(parts)
        return shares


ASSIGNORS: dict[str, Assignor] = {"uniform": assign_uniform, "range": assign_range}
