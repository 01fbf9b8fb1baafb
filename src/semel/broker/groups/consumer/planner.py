"""What a heartbeat must be like, and what it changes, worked out on a draft of the group: nothing is decided yet.

A member that joins, leaves or wants something else raises the group's epoch, and so do topics that come, go or grow. A
new epoch needs a new target assignment. And every heartbeat moves its member one step towards its target.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from semel.broker.clock import Clock
from semel.broker.expressions import ExpressionError
from semel.broker.groups.classic_group import GroupError
from semel.broker.groups.consumer.model import (
    LEFT_FOR_A_WHILE,
    NOTHING,
    Change,
    ClassicMetadata,
    ConsumerGroup,
    Current,
    CurrentSet,
    EpochSet,
    Partitions,
    Subscription,
    SubscriptionSet,
    TargetEpochSet,
    TargetSet,
    compile_pattern,
    look_at,
    reconcile,
)
from semel.broker.settings import Settings
from semel.broker.topics import Topic, Topics
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import ConsumerGroupHeartbeatRequest

# --- Who shall have which partitions. Pure; the names are Kafka's ---
#
# `uniform` gives every member the same number, give or take one, and moves as little as it can. `range` gives every
# member neighbouring partitions of each topic, the same ones in topics with the same number of partitions.


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


JOINS = 0  # the member epoch of a heartbeat that joins


class Beat(NamedTuple):
    """A heartbeat and who sent it."""

    request: ConsumerGroupHeartbeatRequest
    client_id: str
    client_host: str
    classic: ClassicMetadata | None = None  # set: a JoinGroup of the classic protocol in the form of a heartbeat

    @property
    def owned(self) -> Partitions | None:
        """What the member says that it has; None: it did not say."""
        topics = self.request.topic_partitions
        return None if topics is None else frozenset((t.topic_id, index) for t in topics for index in t.partitions)

    @property
    def is_full(self) -> bool:
        """Whether the member sent everything about itself, as it does when it joins or is not sure what we know."""
        request = self.request
        named = request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None
        is_reported = request.rebalance_timeout_ms != -1 and request.topic_partitions is not None
        return request.member_epoch == JOINS or (named and is_reported)


def check_request(request: ConsumerGroupHeartbeatRequest, version: int, assignors: Iterable[str]) -> None:
    """Raises GroupError unless the request makes sense by itself."""
    problem = _problem(request, version)
    if problem is not None:
        raise GroupError(ErrorCode.INVALID_REQUEST, problem)
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise GroupError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )
    if request.subscribed_topic_regex:
        try:
            compile_pattern(request.subscribed_topic_regex)
        except ExpressionError as error:
            raise GroupError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"SubscribedTopicRegex `{request.subscribed_topic_regex}` is not a valid regular expression: {error}.",
            ) from error


def _problem(request: ConsumerGroupHeartbeatRequest, version: int) -> str | None:
    epoch = request.member_epoch
    for name, value in (
        ("GroupId", request.group_id),
        ("InstanceId", request.instance_id),
        ("RackId", request.rack_id),
    ):
        if value is not None and not value.strip():
            return f"{name} can't be empty."
    if not request.member_id and (epoch != JOINS or version >= 1):
        return "MemberId can't be empty."
    if epoch == LEFT_FOR_A_WHILE and request.instance_id is None:
        return "InstanceId can't be null."
    if epoch < LEFT_FOR_A_WHILE:
        return "MemberEpoch is invalid."
    return _problem_with_joining(request) if epoch == JOINS else None


def _problem_with_joining(request: ConsumerGroupHeartbeatRequest) -> str | None:
    if request.rebalance_timeout_ms == -1:
        return "RebalanceTimeoutMs must be provided in first request."
    if request.topic_partitions is None or request.topic_partitions:
        return "TopicPartitions must be empty when (re-)joining."
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        return "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
    return None


def check_instance(known: str | None, member_id: str, instance_id: str) -> None:
    if known is None:
        raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {instance_id} is unknown.")
    if known != member_id:
        raise GroupError(
            ErrorCode.FENCED_INSTANCE_ID,
            f"Static member {member_id} with instance id {instance_id} was fenced by member {known}.",
        )


def check_epoch(current: Current, beat: Beat) -> None:
    """The epoch must be the member's; the one before it passes where the response with the new one may be lost."""
    epoch, owned = beat.request.member_epoch, beat.owned
    if epoch == current.epoch or epoch == JOINS:
        return
    lost_response = epoch == current.previous_epoch and owned is not None and owned <= current.assigned
    if epoch > current.epoch or not lost_response:
        compared = "greater" if epoch > current.epoch else "smaller"
        raise GroupError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The consumer group member has a {compared} member epoch ({epoch}) than the one known by the group "
            f"coordinator ({current.epoch}). The member must abandon all its partitions and rejoin.",
        )


class HeartbeatResult(NamedTuple):
    """The response to a member. `assigned` is None where there is nothing new."""

    member_id: str
    epoch: int
    assigned: Partitions | None = None


class Draft:
    """A group with changes that are not decided yet. As long as there are none it is the group itself."""

    def __init__(self, group: ConsumerGroup) -> None:
        self.group = group
        self.changes: list[Change] = []

    def change(self, change: Change) -> None:
        if not self.changes:
            self.group = self.group.copy()
        self.group.apply(change)
        self.changes.append(change)

    @property
    def members(self) -> set[str]:
        """Whom the changes are about."""
        return {each.member_id for each in self.changes if not isinstance(each, EpochSet | TargetEpochSet)}


class Planner:
    """Works out heartbeats."""

    def __init__(self, topics: Topics, settings: Settings, clock: Clock, new_id: Callable[[], str]) -> None:
        self._topics = topics
        self._max_size: int = settings["group.consumer.max.size"]
        self.assignors: tuple[str, ...] = tuple(settings["group.consumer.assignors"])
        self._clock = clock
        self._new_id = new_id

    # -- joining and following -----------------------------------------------------------------------------------------
    def follow(self, draft: Draft, beat: Beat) -> HeartbeatResult:
        member_id = self._admit(draft, beat)
        subscription, before = self._update(draft, member_id, beat)
        current = draft.group.current.get(member_id, Current())
        topics = self._topics_of(draft.group)
        topics_hash = _hash(topics)
        if before is None or before[:2] != (subscription.topics, subscription.regex):
            changed = True
        else:
            changed = topics_hash != draft.group.topics_hash
        if changed:
            draft.change(EpochSet(draft.group.group_id, draft.group.epoch + 1, topics_hash))
        if draft.group.epoch > draft.group.target_epoch:
            self._assign(draft, topics)
        target = draft.group.target.get(member_id, NOTHING)
        after = reconcile(current, draft.group.target_epoch, target, beat.owned, draft.group.is_free)
        if after != current or member_id not in draft.group.current:
            draft.change(CurrentSet(draft.group.group_id, member_id, after))
        is_reported = beat.is_full or after.assigned != current.assigned
        return HeartbeatResult(member_id, after.epoch, after.assigned if is_reported else None)

    def _admit(self, draft: Draft, beat: Beat) -> str:
        """The member's id, once it is clear that the heartbeat may speak for it."""
        request, group = beat.request, draft.group
        is_new = request.member_id not in group.subscriptions
        if request.member_epoch == JOINS and is_new and len(group.subscriptions) >= self._max_size:
            raise GroupError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"group {group.group_id} has {self._max_size} members")
        if request.instance_id is not None:
            return self._admit_static(draft, beat, request.instance_id)
        if is_new:
            if request.member_epoch != JOINS:
                raise GroupError(
                    ErrorCode.UNKNOWN_MEMBER_ID,
                    f"Member {request.member_id} is not a member of group {group.group_id}.",
                )
            return request.member_id or self._new_id()
        check_epoch(group.current.get(request.member_id, Current()), beat)
        return request.member_id

    def _admit_static(self, draft: Draft, beat: Beat, instance_id: str) -> str:
        request, group = beat.request, draft.group
        known = group.static_ids.get(instance_id)
        if request.member_epoch != JOINS:
            check_instance(known, request.member_id, instance_id)
            check_epoch(group.current.get(request.member_id, Current()), beat)
            return request.member_id
        member_id = request.member_id or self._new_id()
        if known is not None and known != member_id:
            if beat.classic is None and group.current.get(known, Current()).epoch != LEFT_FOR_A_WHILE:
                raise GroupError(
                    ErrorCode.UNRELEASED_INSTANCE_ID,
                    f"Static member {member_id} with instance id {instance_id} cannot join the group because the "
                    f"instance id is owned by {known} member.",
                )
            self._replace(draft, known, member_id)
        return member_id

    def _replace(self, draft: Draft, old_id: str, new_id: str) -> None:
        """A static member came back under a new id: it takes over what it had."""
        group = draft.group
        subscription, current = group.subscriptions[old_id], group.current.get(old_id, Current())
        target = group.target.get(old_id, NOTHING)
        for change in _removal_of(group.group_id, old_id):
            draft.change(change)
        draft.change(SubscriptionSet(group.group_id, new_id, subscription))
        draft.change(TargetSet(group.group_id, new_id, target))
        draft.change(CurrentSet(group.group_id, new_id, current._replace(epoch=0, previous_epoch=0)))

    def _update(
        self, draft: Draft, member_id: str, beat: Beat
    ) -> tuple[Subscription, tuple[tuple[str, ...], str | None] | None]:
        """The member's subscription with what the heartbeat says, and (topics, expression) as they were before."""
        request = beat.request
        old = draft.group.subscriptions.get(member_id)
        base = old or Subscription()
        names, regex = request.subscribed_topic_names, request.subscribed_topic_regex
        new = base._replace(
            instance_id=base.instance_id if request.instance_id is None else request.instance_id,
            rack_id=base.rack_id if request.rack_id is None else request.rack_id,
            client_id=beat.client_id,
            client_host=beat.client_host,
            topics=base.topics if names is None else tuple(sorted(set(names))),
            regex=base.regex if regex is None else (regex or None),
            rebalance_timeout_ms=(
                base.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms
            ),
            assignor=base.assignor if request.server_assignor is None else request.server_assignor,
            classic=beat.classic,
        )
        if new != old:
            draft.change(SubscriptionSet(draft.group.group_id, member_id, new))
        return new, None if old is None else (old.topics, old.regex)

    def _assign(self, draft: Draft, topics: Mapping[str, Topic]) -> None:
        """A new target for all members, for the group's epoch."""
        group = draft.group
        wishes = {
            member_id: AssignableMember(
                frozenset(topic.id for topic in topics.values() if subscription.wants(topic.name)),
                subscription.instance_id,
            )
            for member_id, subscription in group.subscriptions.items()
        }
        counts = {topic.id: len(topic.partitions) for topic in topics.values()}
        targets = ASSIGNORS[self.assignor_of(group)](wishes, counts, group.target)
        for member_id, target in targets.items():
            if group.target.get(member_id) != target:
                draft.change(TargetSet(group.group_id, member_id, target))
        draft.change(TargetEpochSet(group.group_id, group.epoch, self._clock.now_ms()))

    def assignor_of(self, group: ConsumerGroup) -> str:
        """The one that most members ask for; of several, and if none does, the first in the broker's order."""
        votes = Counter(each.assignor for each in group.subscriptions.values() if each.assignor is not None)
        return max(self.assignors, key=lambda name: votes[name])

    def _topics_of(self, group: ConsumerGroup) -> dict[str, Topic]:
        """The topics that exist and that a member of the group subscribes to."""
        found = {name: topic for name in group.subscribed_names() if (topic := self._topics.get(name)) is not None}
        patterns = [compile_pattern(pattern) for pattern in _patterns_of(group)]
        for topic in self._topics if patterns else ():
            if any(pattern.matches(topic.name) for pattern in patterns):
                found[topic.name] = topic
        return found

    async def look_at_topics(self, group: ConsumerGroup | None, beat: Beat | None = None) -> None:
        """Prepares `_topics_of`: expressions that meet many new topics are matched off the event loop."""
        patterns = set() if group is None else _patterns_of(group)
        if beat is not None and beat.request.subscribed_topic_regex:
            patterns.add(beat.request.subscribed_topic_regex)
        if patterns:
            await look_at(patterns, [topic.name for topic in self._topics])

    # -- leaving -------------------------------------------------------------------------------------------------------
    def leave(self, draft: Draft, request: ConsumerGroupHeartbeatRequest) -> HeartbeatResult:
        group, member_id = draft.group, request.member_id
        if request.instance_id is not None:
            check_instance(group.static_ids.get(request.instance_id), member_id, request.instance_id)
        elif member_id not in group.subscriptions:
            raise GroupError(
                ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} is not a member of group {group.group_id}."
            )
        if request.member_epoch == LEFT_FOR_A_WHILE:
            current = group.current.get(member_id, Current())
            away = current._replace(epoch=LEFT_FOR_A_WHILE, revoking=NOTHING)
            draft.change(CurrentSet(group.group_id, member_id, away))
        else:
            self.drop(draft, member_id)
        return HeartbeatResult(member_id, request.member_epoch)

    def drop(self, draft: Draft, member_id: str) -> None:
        for change in _removal_of(draft.group.group_id, member_id):
            draft.change(change)
        topics_hash = _hash(self._topics_of(draft.group))
        draft.change(EpochSet(draft.group.group_id, draft.group.epoch + 1, topics_hash))


def _patterns_of(group: ConsumerGroup) -> set[str]:
    return {each.regex for each in group.subscriptions.values() if each.regex is not None}


# -- changes that belong together --------------------------------------------------------------------------------------
def _removal_of(group_id: str, member_id: str) -> list[Change]:
    return [
        CurrentSet(group_id, member_id, None),
        TargetSet(group_id, member_id, None),
        SubscriptionSet(group_id, member_id, None),
    ]


def deletion_of(group_id: str) -> list[Change]:
    """What deletes a group without members."""
    return [TargetEpochSet(group_id, None), EpochSet(group_id, None)]


def _hash(topics: Mapping[str, Topic]) -> int:
    """A number that changes with the topics that a group reads: their ids and partition counts."""
    if not topics:
        return 0
    parts = sorted((topic.name, topic.id.hex(), len(topic.partitions)) for topic in topics.values())
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big", signed=True)
