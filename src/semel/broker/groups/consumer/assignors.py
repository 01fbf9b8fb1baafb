"""Who shall have which partitions. Pure; the names are Kafka's.

`uniform` gives every member the same number, give or take one, and moves as little as it can. `range` gives every
member neighbouring partitions of each topic, the same ones in topics with the same number of partitions.
"""

from __future__ import annotations

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
    shares = {member: set(share) for member, share in kept.items()}
    taken = {part for share in shares.values() for part in share}
    readers = {topic: [member for member, wish in wishes.items() if topic in wish.topics] for topic in counts}
    for topic in sorted(counts, key=lambda topic: (len(readers[topic]), topic)):
        for index in range(counts[topic]):
            if (topic, index) not in taken and readers[topic]:
                shares[min(readers[topic], key=lambda member: (len(shares[member]), member))].add((topic, index))
    while _move_one(readers, shares):
        pass
    return shares


def _move_one(readers: Mapping[bytes, list[str]], shares: Shares) -> bool:
    """Moves one partition from a member to one that has at least two fewer. Every move lowers the sum of squares."""
    for giver in sorted(shares, key=lambda member: (-len(shares[member]), member)):
        for part in sorted(shares[giver]):
            taker = min(readers[part[0]], key=lambda member: (len(shares[member]), member))
            if len(shares[taker]) <= len(shares[giver]) - 2:
                shares[giver].remove(part)
                shares[taker].add(part)
                return True
    return False


ASSIGNORS: dict[str, Assignor] = {"uniform": assign_uniform, "range": assign_range}
