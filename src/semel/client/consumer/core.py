"""What a consumer decides: how its group, its commits and its fetching act on each other. No I/O, no clock.

It holds the cores of fetching and commits and the subscription; a driver (`engine.py`) runs them in turns:

    await core.follow_group()        # takes on what happened to the membership; False while a commit must end first
    core.topics_due_s()              # when to look whether topics came, went or grew; then `topics_found`
    await core.is_ready_to_join()    # partitions were given back as far as needed: the member may join
    core.is_delivering               # whether records may be handed out

The two that are awaited call the program's listener, which may wait; they wait for nothing else.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

from semel.client.consumer.assigned_partitions import AssignedPartitions
from semel.client.consumer.commits import CommitsCore, PendingCommit
from semel.client.consumer.fetching import FetchingCore, RetryBudget
from semel.client.errors import error_of
from semel.client.group.membership import Membership
from semel.client.metadata import Metadata, TopicMetadata
from semel.client.pauses import Pauses
from semel.client.settings import ConsumerSettings
from semel.client.types import GroupMetadata, TopicPartition
from semel.protocol.errors import ErrorCode

# --- What a rebalance does to a consumer's partitions, in which order, and which listener it calls ---


log = logging.getLogger(__name__)


class RebalanceListener:
    """Override what you need. Called inside poll() and close(), in the thread that calls them; an `AsyncConsumer`
    awaits methods that are coroutines."""

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These are new. Called before the first record of them is read: seek here if offsets are kept elsewhere."""
        return None

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These will be given back when this returns: the last chance to finish and commit work on them."""
        return None

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These are gone already, others may work on them: drop unfinished work. Calls on_partitions_revoked unless
        overridden."""
        return self.on_partitions_revoked(partitions)


class Rebalancer:
    """Takes partitions on and off. `start_commit` is called before partitions are given back, and its commit waited
    for; None: there is nothing to commit. A listener that raises changes nothing about the assignment: the error is
    raised when the partitions are where they belong."""

    def __init__(
        self,
        member: Membership,
        assigned: AssignedPartitions,
        listener: RebalanceListener,
        start_commit: Callable[[], PendingCommit | None],
    ) -> None:
        self._member = member
        self._assigned = assigned
        self._listener = listener
        self._start_commit = start_commit
        self._commit: PendingCommit | None = None  # before a revocation, on its way
        self._assignment: set[TopicPartition] | None = None  # not adopted yet
        self._prepared = False
        self._is_calling = False
        self._revoking: set[TopicPartition] = set()  # which the listener is called for
        self._is_over = False  # the member leaves, perhaps in a call of the listener

    @property
    def is_revoking(self) -> bool:
        """Whether partitions wait for a commit before they are given back: no record of theirs may be handed out."""
        return self._commit is not None

    @property
    def is_calling(self) -> bool:
        """Whether the listener is called, from which a turn of the consumer may be run (by position(), say): what it is
        called for ends before anything else happens to the partitions."""
        return self._is_calling

    async def _call(
        self, method: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> None:
        is_within = self._is_calling
        try:
            self._is_calling = True
            waiting = method(partitions)
            if inspect.isawaitable(waiting):
                await waiting
        finally:
            self._is_calling = is_within

    async def apply_change(self, lost: bool, assignment: Iterable[TopicPartition] | None) -> None:
        """What happened to the membership. Lost: it ended without us; no commit, it would be refused."""
        gone = sorted(self._assigned.partitions) if lost else []
        if lost:
            self._commit = self._assignment = None
            self._assigned.assign([])
        if assignment is not None:
            self._assignment = set(assignment)
        if gone:
            log.warning("group %s: lost %s", self._member.group_id, ", ".join(map(str, gone)))
            await self._call(self._listener.on_partitions_lost, gone)

    async def prepare(self, topics: frozenset[str]) -> bool:
        """Before joining, once per rebalance: eager members give everything back, cooperative ones what is unwanted.
        False while a commit must be waited for."""
        if self._prepared:
            return True
        owned = self._assigned.partitions
        keep = {part for part in owned if part.topic in topics} if self._member.is_cooperative else set()
        if not self._is_committed(owned - keep):
            return False
        await self._revoke(owned - keep, keep)
        self._prepared = True
        return not self._is_over

    async def adopt(self) -> bool:
        """The new assignment. What a cooperative member lost is given back now, and shared out in another round.
        False while a commit must be waited for."""
        if self._assignment is None or self._is_over:
            return not self._is_over
        target, owned = self._assignment, self._assigned.partitions
        revoked, added = owned - target, target - owned
        if not self._is_committed(revoked):
            return False
        self._assignment, self._prepared = None, False
        try:
            await self._revoke(revoked, target)
        finally:
            if not self._is_over:
                await self._take_on(target, added, bool(revoked))
        return not self._is_over

    async def _take_on(self, target: set[TopicPartition], added: set[TopicPartition], gave_back: bool) -> None:
        log.info("group %s: has %s", self._member.group_id, ", ".join(map(str, sorted(target))) or "no partitions")
        self._member.adopted(target, gave_back)
        new = sorted(added if self._member.is_cooperative else target)
        await self._call(self._listener.on_partitions_assigned, new)

    async def give_back(self) -> None:
        """Everything, before leaving; the caller has committed. What calls the listener now has called it for what it
        gives back, and does nothing more."""
        self._commit = None
        self._is_over = True
        await self._revoke(self._assigned.partitions - self._revoking, set())

    def _is_committed(self, revoked: set[TopicPartition]) -> bool:
        """Starts the commit; whether it has ended, with or without success."""
        if not revoked:
            return True
        if self._commit is None:
            self._commit = self._start_commit()
        if self._commit is not None and not self._commit.is_done:
            return False
        self._commit = None
        return True

    async def _revoke(self, revoked: set[TopicPartition], kept: set[TopicPartition]) -> None:
        try:
            if revoked:
                self._revoking |= revoked
                await self._call(self._listener.on_partitions_revoked, sorted(revoked))
        finally:
            self._revoking -= revoked
            self._assigned.assign(set() if self._is_over else kept)


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
        while partitions that are given back wait for a commit or for the listener, and once that has left."""
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
