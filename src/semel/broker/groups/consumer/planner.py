"""What a heartbeat must be like, and what it changes, worked out on a draft of the group: nothing is decided yet.

A member that joins, leaves or wants something else raises the group's epoch, and so do topics that come, go or grow. A
new epoch needs a new target assignment. And every heartbeat moves its member one step towards its target.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from semel.broker.clock import Clock
from semel.broker.expressions import ExpressionError
from semel.broker.groups.classic_group import GroupError
from semel.broker.groups.consumer.assignors import ASSIGNORS, AssignableMember
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
        """Whether the member told everything about itself, as it does when it joins or is not sure what we know."""
        request = self.request
        named = request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None
        told = request.rebalance_timeout_ms != -1 and request.topic_partitions is not None
        return request.member_epoch == JOINS or (named and told)


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
        return f"MemberEpoch is {epoch}, but must be greater than or equal to -2."
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
            f"Static member {member_id} with instance id {instance_id} was fenced by {known}.",
        )


def check_epoch(current: Current, beat: Beat) -> None:
    """The epoch must be the member's; the one before it passes where the answer with the new one may have been lost."""
    epoch, owned = beat.request.member_epoch, beat.owned
    if epoch == current.epoch or epoch == JOINS:
        return
    lost_answer = epoch == current.previous_epoch and owned is not None and owned <= current.assigned
    if epoch > current.epoch or not lost_answer:
        raise GroupError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The member has epoch {epoch}, the coordinator knows it at {current.epoch}. "
            "The member must abandon all its partitions and rejoin.",
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
        told = beat.is_full or after.assigned != current.assigned
        return HeartbeatResult(member_id, after.epoch, after.assigned if told else None)

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
                raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {request.member_id} is not a member.")
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
                    f"instance {instance_id} is used by member {known}, which has not left",
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
        """The member's subscription with what the heartbeat told, and (topics, expression) as they were before."""
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
        """The one that most members ask for; the first of the broker's if none does."""
        votes = Counter(each.assignor for each in group.subscriptions.values() if each.assignor is not None)
        return votes.most_common(1)[0][0] if votes else self.assignors[0]

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
            raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} is not a member.")
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
