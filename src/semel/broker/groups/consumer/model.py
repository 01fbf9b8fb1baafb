"""A group of the consumer protocol (KIP-848) as its records have it. Pure: a group is what its changes made of it.

The broker assigns partitions. The group has an epoch, raised with every change of members, subscriptions or topics; a
target assignment, made for an epoch; and for each member its current assignment, which moves towards the target in
steps: what has to be revoked is revoked first, and what others still hold is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from semel.broker.expressions import compile_expression

MATCHED_AT_ONCE = 64  # names; more are matched by a thread
FORGOTTEN_ABOVE = 2  # times as many names as there are topics


class TopicPattern:
    """An expression and the topic names that it was held against."""

    def __init__(self, text: str) -> None:
        self._describes = compile_expression(text)
        self._verdicts: dict[str, bool] = {}

    def matches(self, name: str) -> bool:
        verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = self._verdicts[name] = self._describes(name)
        return verdict

    async def look_at(self, names: Collection[str]) -> None:
        """Matches the names that are new, off the event loop where they are many."""
        if len(self._verdicts) > FORGOTTEN_ABOVE * len(names) + MATCHED_AT_ONCE:
            self._verdicts.clear()  # of topics that were deleted
        new = [name for name in names if name not in self._verdicts]
        if len(new) > MATCHED_AT_ONCE:
            self._verdicts.update(await asyncio.to_thread(lambda: {name: self._describes(name) for name in new}))


@lru_cache(maxsize=64)
def compile_pattern(text: str) -> TopicPattern:
    """ExpressionError: it cannot be used."""
    return TopicPattern(text)


async def look_at(patterns: Iterable[str], names: Collection[str]) -> None:
    """Prepares `matches` of these patterns for these topics."""
    for pattern in patterns:
        await compile_pattern(pattern).look_at(names)


Partitions = frozenset[tuple[bytes, int]]  # (topic id, partition)
NOTHING: Partitions = frozenset()
AssignmentEpochs = Mapping[tuple[bytes, int], int]  # of each partition
LEFT_FOR_A_WHILE = -2  # epoch of a static member that closed and may come back


class MemberState(IntEnum):
    """How far a member is on its way to the target; the numbers are those of the records."""

    STABLE = 0
    UNREVOKED = 1  # it has to give partitions back first
    UNRELEASED = 2  # it has what is free and waits for partitions that others hold


class ConsumerGroupState(Enum):
    """A state, by the name that Kafka's tools show."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class ClassicMetadata(NamedTuple):
    """What a member that speaks the classic protocol said when it joined."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]  # name and metadata, in the order that the member prefers


class Subscription(NamedTuple):
    """Who a member is and what it wants."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    regex: str | None = None
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicMetadata | None = None  # None: a member of the consumer protocol

    def wants(self, topic: str) -> bool:
        """By name or by expression."""
        return topic in self.topics or (self.regex is not None and compile_pattern(self.regex).matches(topic))


class Current(NamedTuple):
    """What a member has, and what it still has to give back."""

    epoch: int = 0
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: Partitions = NOTHING
    revoking: Partitions = NOTHING
    since: AssignmentEpochs = MappingProxyType({})  # at which the member got what is assigned or revoked

    def at_epoch(self, epoch: int) -> Current:
        """The same at an epoch; the last one before it is remembered, in case the response gets lost."""
        return self._replace(previous_epoch=self.epoch, epoch=epoch)


# -- changes: each is one record; None stands for a tombstone ----------------------------------------------------------
class SubscriptionSet(NamedTuple):
    group_id: str
    member_id: str
    value: Subscription | None


class EpochSet(NamedTuple):
    group_id: str
    epoch: int | None
    topics_hash: int = 0


class TargetSet(NamedTuple):
    group_id: str
    member_id: str
    value: Partitions | None


class TargetEpochSet(NamedTuple):
    group_id: str
    epoch: int | None
    time_ms: int = 0


class CurrentSet(NamedTuple):
    group_id: str
    member_id: str
    value: Current | None


Change = SubscriptionSet | EpochSet | TargetSet | TargetEpochSet | CurrentSet


class ConsumerGroup:
    """The sum of its changes."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 1  # as in Kafka: the first member raises it to 2
        self.topics_hash = 0
        self.target_epoch = 0
        self.subscriptions: dict[str, Subscription] = {}
        self.current: dict[str, Current] = {}
        self.target: dict[str, Partitions] = {}
        self.static_ids: dict[str, str] = {}  # instance id: member id
        self._holders: dict[tuple[bytes, int], str] = {}  # partition: the member that has it or gives it back

    def copy(self) -> ConsumerGroup:
        """A draft to try changes on."""
        other = ConsumerGroup(self.group_id)
        other.epoch, other.topics_hash, other.target_epoch = self.epoch, self.topics_hash, self.target_epoch
        other.subscriptions, other.current = self.subscriptions.copy(), self.current.copy()
        other.target, other.static_ids = self.target.copy(), self.static_ids.copy()
        other._holders = self._holders.copy()
        return other

    def apply(self, change: Change) -> None:
        if isinstance(change, SubscriptionSet):
            self._set_subscription(change.member_id, change.value)
        elif isinstance(change, EpochSet):
            self.epoch, self.topics_hash = change.epoch or 0, change.topics_hash
        elif isinstance(change, TargetEpochSet):
            self.target_epoch = change.epoch or 0
        elif isinstance(change, TargetSet):
            if change.value is None:
                self.target.pop(change.member_id, None)
            else:
                self.target[change.member_id] = change.value
        else:
            self._set_current(change.member_id, change.value)

    def _set_subscription(self, member_id: str, value: Subscription | None) -> None:
        old = self.subscriptions.pop(member_id, None)
        if old is not None and old.instance_id is not None and self.static_ids.get(old.instance_id) == member_id:
            del self.static_ids[old.instance_id]
        if value is None:
            return
        self.subscriptions[member_id] = value
        if value.instance_id is not None:
            self.static_ids[value.instance_id] = member_id

    def _set_current(self, member_id: str, value: Current | None) -> None:
        old = self.current.pop(member_id, None)
        for partition in (old.assigned | old.revoking) if old is not None else ():
            if self._holders.get(partition) == member_id:
                del self._holders[partition]
        if value is not None:
            self.current[member_id] = value
            self._holders.update(dict.fromkeys(value.assigned | value.revoking, member_id))

    # -- what is seen --------------------------------------------------------------------------------------------------
    @property
    def state(self) -> ConsumerGroupState:
        if not self.subscriptions:
            return ConsumerGroupState.EMPTY
        if self.epoch > self.target_epoch:
            return ConsumerGroupState.ASSIGNING
        if all(self.is_reconciled(member_id) for member_id in self.subscriptions):
            return ConsumerGroupState.STABLE
        return ConsumerGroupState.RECONCILING

    @property
    def is_all_classic(self) -> bool:
        """Whether members are left, and none of them speaks the consumer protocol."""
        return bool(self.subscriptions) and all(each.classic is not None for each in self.subscriptions.values())

    def must_join(self, member_id: str) -> bool:
        """Whether a classic member has to join again to get what it is assigned."""
        current = self.current.get(member_id, Current())
        if current.epoch < self.epoch or current.state is MemberState.UNREVOKED:
            return True
        missing = self.target.get(member_id, NOTHING) - current.assigned
        return current.state is MemberState.UNRELEASED and any(map(self.is_free, missing))

    def is_reconciled(self, member_id: str) -> bool:
        current = self.current.get(member_id, Current())
        return current.state is MemberState.STABLE and current.epoch == self.target_epoch

    def is_free(self, partition: tuple[bytes, int]) -> bool:
        return partition not in self._holders

    def subscribes(self, topic: str) -> bool:
        return any(each.wants(topic) for each in self.subscriptions.values())

    def subscribed_names(self) -> set[str]:
        return {topic for subscription in self.subscriptions.values() for topic in subscription.topics}


def reconcile(
    current: Current,
    target_epoch: int,
    target: Partitions,
    owned: Partitions | None,
    is_free: Callable[[tuple[bytes, int]], bool],
) -> Current:
    """What the member has next. `owned` is what it says it has; None: it did not say."""
    if current.state is MemberState.STABLE:
        return current if current.epoch == target_epoch else _next(current, target_epoch, target, owned, is_free)
    if current.state is MemberState.UNREVOKED:
        if _still_owns(owned, current.revoking):
            return current
        return _next(current, target_epoch, target, owned, is_free, epoch=current.epoch + 1)
    return _next(current, target_epoch, target, owned, is_free)


def _next(
    current: Current,
    target_epoch: int,
    target: Partitions,
    owned: Partitions | None,
    is_free: Callable[[tuple[bytes, int]], bool],
    epoch: int | None = None,
) -> Current:
    kept = current.assigned & target
    revoking = current.assigned - target
    if revoking and _still_owns(owned, revoking):
        stays = current.at_epoch(current.epoch if epoch is None else epoch)
        since = {part: current.since.get(part, current.epoch) for part in current.assigned}
        return stays._replace(state=MemberState.UNREVOKED, assigned=kept, revoking=revoking, since=since)
    wanted = target - kept
    free = frozenset(filter(is_free, wanted))
    state = MemberState.STABLE if free == wanted else MemberState.UNRELEASED
    since = {part: current.since.get(part, current.epoch) for part in kept} | dict.fromkeys(free, target_epoch)
    return current.at_epoch(target_epoch)._replace(state=state, assigned=kept | free, revoking=NOTHING, since=since)


def _still_owns(owned: Partitions | None, revoking: Partitions) -> bool:
    return owned is None or bool(owned & revoking)
