"""What a consumer decides: how its group, its commits and its fetching act on each other. No I/O, no clock.

It holds the cores of fetching and commits and the subscription; a driver (`engine.py`) runs them in turns:

    await core.follow_group()        # takes on what happened to the membership; False while a commit must end first
    core.topics_due_s()              # when to look whether topics came, went or grew; then `topics_found`
    await core.is_ready_to_join()    # partitions were given back as far as needed: the member may join
    core.is_delivering               # whether records may be handed out

The two that are awaited call the program's listener, which may wait; they wait for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from semel.client.consumer.assigned_partitions import AssignedPartitions
from semel.client.consumer.commits import CommitsCore, PendingCommit
from semel.client.consumer.fetching import FetchingCore, RetryBudget
from semel.client.consumer.rebalance import RebalanceListener, Rebalancer
from semel.client.errors import error_of
from semel.client.group.membership import Membership
from semel.client.metadata import Metadata, TopicMetadata
from semel.client.pauses import Pauses
from semel.client.settings import ConsumerSettings
from semel.client.types import GroupMetadata
from semel.protocol.errors import ErrorCode

MISSING_TOPIC_REFRESH_S = 1.0


class TopicSubscription:
    """The topics that a group consumer wants: by name, or all that match a pattern."""

    def __init__(self, topics: Iterable[str] = (), pattern: re.Pattern[str] | None = None) -> None:
        self.names = frozenset(topics)
        self.pattern = pattern
        self.topics = self.names
        self.refreshed_at_s = 0.0

    @property
    def wanted(self) -> list[str] | None:
        """What to look up; None: all topics."""
        return None if self.pattern is not None else sorted(self.names)

    def match(self, known: Iterable[str]) -> bool:
        """Takes the names of all topics there are; whether the wanted ones changed."""
        if self.pattern is None:
            return False
        before, self.topics = self.topics, frozenset(name for name in known if self.pattern.fullmatch(name))
        return before != self.topics


class ConsumerCore:
    """`start_commit` begins the commit that partitions wait for before they are given back; None: there is none."""

    def __init__(
        self,
        settings: ConsumerSettings,
        metadata: Metadata,
        random: Callable[[], float],
        start_commit: Callable[[], PendingCommit | None],
    ) -> None:
        self.assigned = AssignedPartitions()
        self.retry_budget = RetryBudget(settings.default_api_timeout_ms / 1000)
        self.fetching = FetchingCore(settings, self.assigned, metadata, self.retry_budget, self._reader)
        self.commits = CommitsCore(
            lambda: Pauses(settings.retry_backoff_ms, settings.retry_backoff_max_ms, random), self._renewed
        )
        self.subscription = TopicSubscription()
        self.member: Membership | None = None
        self._settings = settings
        self._metadata = metadata
        self._start_commit = start_commit
        self._rebalancer: Rebalancer | None = None

    # --- the group ---

    def _reader(self) -> GroupMetadata | None:
        return self.member.reader() if self.member is not None else None

    def _renewed(self, identity: GroupMetadata) -> GroupMetadata | None:
        return self.member.renewed(identity) if self.member is not None else None

    def subscribe(self, member: Membership, subscription: TopicSubscription, listener: RebalanceListener) -> None:
        """Takes part in the group as this member, from now on for these topics."""
        if self.member is None:
            self.assigned.assign([])
        else:
            member.rejoin("the subscription changed")
        self.member = member
        self.subscription = subscription
        self._rebalancer = Rebalancer(member, self.assigned, listener, self._start_commit)

    async def follow_group(self) -> bool:
        """Takes on what happened to the membership since the last call, and raises what the program must know. False
        while partitions that are given back wait for a commit, or for the listener."""
        member, rebalancer = self.member, self._rebalancer
        assert member is not None
        assert rebalancer is not None
        if rebalancer.is_calling:
            return False
        change = member.take_change()
        if change.assignment is not None:
            self.retry_budget.succeeded()
        try:
            await rebalancer.apply_change(change.lost, change.assignment)
            if change.error is not None:
                raise change.error
            if member.is_fenced:
                raise error_of(ErrorCode.FENCED_INSTANCE_ID, f"group {member.group_id!r}")
            return await rebalancer.adopt()
        except Exception:
            raise
        except BaseException:  # Ctrl-C: whether the partitions are where they belong is not known
            member.rejoin("a call was interrupted")
            raise

    async def is_ready_to_join(self) -> bool:
        """Whether the member should join, and what it must give back first has been given back."""
        assert self._rebalancer is not None
        return self._wants_to_join and await self._rebalancer.prepare(self.subscription.topics)

    @property
    def _wants_to_join(self) -> bool:
        """A member whose last topic is gone joins once more, to give its partitions back."""
        assert self.member is not None
        return self.member.wants_to_join and bool(self.subscription.topics or len(self.assigned))

    def group_due_s(self, looking_up: bool, connecting: bool, now_s: float) -> float:
        """When the group has something to do without an event, given what the driver waits for already."""
        assert self.member is not None
        assert self._rebalancer is not None
        if self._rebalancer.is_revoking or self._rebalancer.is_calling:
            return float("inf")  # the commit's end is an event
        due_s = float("inf") if looking_up else self.topics_due_s()
        if self._wants_to_join and not connecting:
            due_s = min(due_s, max(self.member.retry_at_s, now_s))
        return due_s

    async def leave(self) -> None:
        """Gives everything back, with the listener. The caller has committed; the member leaves afterwards."""
        member, rebalancer = self.member, self._rebalancer
        self.subscription = TopicSubscription()
        try:
            if member is not None and rebalancer is not None and not member.is_fenced:
                await rebalancer.give_back()  # a commit of the listener still carries the member's identity
        finally:
            self.member = self._rebalancer = None
            self.assigned.assign([])

    # --- topics ---

    def topics_due_s(self) -> float:
        """When to look up the topics of the subscription."""
        subscription = self.subscription
        missing = any(name not in self._metadata.topics for name in subscription.topics)
        missing = missing or (self.member is not None and self.member.has_unknown_topics)
        quick = missing or (subscription.pattern is not None and not subscription.topics)
        age_s = MISSING_TOPIC_REFRESH_S if quick else self._settings.metadata_max_age_ms / 1000
        return subscription.refreshed_at_s + age_s if subscription.refreshed_at_s else 0.0

    def topics_found(self, subscription: TopicSubscription, topics: Mapping[str, TopicMetadata]) -> None:
        """Starts a rebalance if topics came or went, or if this member shared out and their partitions grew."""
        member = self.member
        if subscription is not self.subscription or member is None:
            return
        if subscription.match(name for name, topic in topics.items() if not topic.is_internal):
            member.rejoin("the topics that match the pattern changed")
            return
        counts = {name: len(topics[name].partitions) if name in topics else 0 for name in subscription.topics}
        if member.needs_other_counts(counts):
            member.rejoin("the number of partitions changed")

    # --- reading ---

    @property
    def is_delivering(self) -> bool:
        """Whether records may be handed out: those of partitions that are about to be given back may not."""
        if self.member is None or self._rebalancer is None:
            return True
        if self._rebalancer.is_revoking or self._rebalancer.is_calling:
            return False
        return not self.member.wants_to_join or self.member.is_cooperative
