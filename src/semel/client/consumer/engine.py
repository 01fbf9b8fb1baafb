"""The engine of a consumer: one turn of its loop, waiting, and handing out what was fetched."""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from semel.client.aside import Aside, TaskOutcome, Waker
from semel.client.cluster import Cluster
from semel.client.consumer.assigned_partitions import AssignedPartitions
from semel.client.consumer.commits import CommitQueue, PendingCommit
from semel.client.consumer.fetching import LOOKUP_LANE, Fetching, RetryBudget, wait_ready
from semel.client.consumer.rebalance import RebalanceListener, Rebalancer
from semel.client.errors import ClosedError, IllegalStateError, KafkaError, error_of
from semel.client.group.member import GROUP_LANE, GroupMember
from semel.client.group.states import MembershipState
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import ErrorCode, Recovery

log = logging.getLogger("semel.client.consumer")

MISSING_TOPIC_REFRESH_S = 1.0


class TopicSubscription:
    """The topics that a group consumer wants: by name, or all that match a pattern."""

    def __init__(self, topics: Iterable[str] = (), pattern: re.Pattern[str] | None = None) -> None:
        self.names = frozenset(topics)
        self.pattern = pattern
        self.topics = self.names
        self.refreshed_at_s = 0.0

    def match(self, known: Iterable[str]) -> bool:
        """Takes the names of all topics there are; whether the wanted ones changed."""
        if self.pattern is None:
            return False
        before, self.topics = self.topics, frozenset(name for name in known if self.pattern.fullmatch(name))
        return before != self.topics


class ConsumerEngine:
    def __init__(
        self,
        settings: ConsumerSettings,
        commit_before_revoke: Callable[[], PendingCommit | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.cluster = Cluster(settings)
        self.assigned = AssignedPartitions()
        self.retry_budget = RetryBudget(settings.default_api_timeout_ms / 1000, lambda: self.cluster.was_reached, clock)
        self.waker = Waker()
        self.aside = Aside(self.waker.wake)
        self.fetching = Fetching(self.cluster, settings, self.assigned, self.retry_budget, self.aside, clock)
        self.commits = CommitQueue(self.cluster, self.aside, self.waker, self._on_commit_error)
        self.member: GroupMember | None = None
        self.subscription = TopicSubscription()
        self.closed = False
        self._commit_before_revoke = commit_before_revoke
        self._rebalancer: Rebalancer | None = None
        self._clock = clock
        self._close_waker = weakref.finalize(self, self.waker.close)
        self._owner_pid = os.getpid()

    # -- a turn --------------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Does everything that can be done now; never waits. Group, commits, responses, offsets, requests."""
        self._collect()
        if self.member is not None:
            self._turn_group(self.member)
        self.commits.turn()
        self.fetching.receive()
        self.fetching.resolve()
        self.fetching.send()

    def _collect(self) -> None:
        """Takes what was done aside."""
        while True:
            try:
                self.aside.collect()
                return
            except KafkaError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self.retry_budget.failed(error)

    def wait(self, deadline: Deadline) -> None:
        """Waits for the network, for what is done aside, for the heartbeat thread, or for a retry."""
        until_s = min(self._clock() + deadline.remaining_s(), self.fetching.next_retry_s(), self.commits.due_at_s())
        connections = [*self.fetching.connections(), *self.commits.connections()]
        if self.member is not None:
            until_s = min(until_s, self._group_due_s(self.member))
            connections += self.member.connections()
        until_s = min([until_s, *(connection.next_deadline_s() for connection in connections)])
        ready = wait_ready(connections, until_s - self._clock(), self.waker.fd)
        while self.fetching.read_on(ready):
            ready = wait_ready(connections, until_s - self._clock(), self.waker.fd)
        if self.waker.fd in ready:
            self.waker.drain()

    def wake(self) -> None:
        """Ends a wait; any thread may call it."""
        self.waker.wake()

    def run_until(self, done: Callable[[], bool], deadline: Deadline) -> bool:
        """Turns until `done` or the deadline; whether it is done."""
        while True:
            self.turn()
            if done():
                return True
            self.retry_budget.check(poll_ends=deadline.expired)
            if deadline.expired:
                return False
            self.wait(deadline)

    # -- the group -----------------------------------------------------------------------------------------------------
    def _turn_group(self, member: GroupMember) -> None:
        assert self._rebalancer is not None
        member.polled()
        member.service()
        change = member.take_change()
        if change.assignment is not None:
            self.retry_budget.succeeded()
        self._rebalancer.apply_change(change.lost, change.assignment)
        if change.error is not None:
            raise change.error
        if member.state is MembershipState.FENCED:
            raise error_of(ErrorCode.FENCED_INSTANCE_ID, f"group {member.group_id!r}")
        if not self._rebalancer.adopt():
            return
        self._follow_topics(member)
        if self._wants_to_join(member) and self._rebalancer.prepare(self.subscription.topics):
            member.join(self.subscription.topics, self.assigned.partitions, self.aside)

    def _wants_to_join(self, member: GroupMember) -> bool:
        """A member whose last topic is gone joins once more, to give its partitions back."""
        return member.state is MembershipState.UNJOINED and bool(self.subscription.topics or len(self.assigned))

    def _follow_topics(self, member: GroupMember) -> None:
        """Looks now and then whether topics came, went or grew, and starts a rebalance if so."""
        subscription, now_s = self.subscription, self._clock()
        if now_s < self._topics_due_s():
            return
        wanted = None if subscription.pattern is not None else sorted(subscription.names)
        if self.fetching.look_up(
            lambda: self.cluster.refresh(wanted, self.fetching.look_up_deadline(), LOOKUP_LANE),
            lambda outcome: self._on_topics(member, subscription, outcome),
        ):
            subscription.refreshed_at_s = now_s

    def _on_topics(self, member: GroupMember, subscription: TopicSubscription, outcome: TaskOutcome[Metadata]) -> None:
        try:
            topics = dict(outcome.result().topics)
        except KafkaError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            self.retry_budget.failed(error, outcome.started_s)
            return
        if subscription is not self.subscription or member is not self.member:
            return
        if subscription.match(name for name, topic in topics.items() if not topic.is_internal):
            member.rejoin("the topics that match the pattern changed")
        elif member.is_leader and member.state is MembershipState.STABLE:
            known = member.shared_counts
            counts = {name: len(topics[name].partitions) if name in topics else 0 for name in subscription.topics}
            if any(count != known.get(name, 0) for name, count in counts.items()):
                member.rejoin("the number of partitions changed")

    def _topics_due_s(self) -> float:
        subscription = self.subscription
        missing = any(name not in self.cluster.metadata.topics for name in subscription.topics)
        quick = missing or (subscription.pattern is not None and not subscription.topics)
        age_s = MISSING_TOPIC_REFRESH_S if quick else self.settings.metadata_max_age_ms / 1000
        return subscription.refreshed_at_s + age_s if subscription.refreshed_at_s else 0.0

    def _group_due_s(self, member: GroupMember) -> float:
        """When the group has something to do without an event."""
        assert self._rebalancer is not None
        if self._rebalancer.is_revoking:
            return float("inf")  # the commit's end is an event
        due_s = float("inf") if self.aside.is_busy(LOOKUP_LANE) else self._topics_due_s()
        if self._wants_to_join(member) and not self.aside.is_busy(GROUP_LANE):
            due_s = min(due_s, max(member.retry_at_s, self._clock()))
        return due_s

    def subscribe(self, subscription: TopicSubscription, listener: RebalanceListener) -> None:
        if self.member is None:
            self.assigned.assign([])
            self.member = GroupMember(self.cluster, self.settings, self.waker.wake, self._clock)
        else:
            self.member.rejoin("the subscription changed")
        self.subscription = subscription
        # A pattern names no topic: looking up one that was deleted must not create it again.
        by_name = self.settings.allow_auto_create_topics and subscription.pattern is None
        self.cluster.settings = self.settings.replace(allow_auto_create_topics=by_name)
        self._rebalancer = Rebalancer(self.member, self.assigned, listener, self._commit_before_revoke)

    def leave_group(self, reason: str, deadline: Deadline) -> None:
        """Gives partitions back, calls the listener and leaves. The caller has committed."""
        member, rebalancer = self.member, self._rebalancer
        self.member = self._rebalancer = None
        self.subscription = TopicSubscription()
        self.cluster.settings = self.settings
        if member is None or rebalancer is None:
            return
        try:
            if member.state is not MembershipState.FENCED:
                self.member = member  # so that a commit of the listener still carries its identity
                rebalancer.give_back()
        finally:
            self.member = None
            self.assigned.assign([])
            member.leave(reason, deadline)

    def _on_commit_error(self, code: Any, identity: Any) -> None:
        if self.member is not None:
            self.member.report(code, identity)

    # -- state ---------------------------------------------------------------------------------------------------------
    def check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this consumer is closed; make a new one")
        if os.getpid() != self._owner_pid:
            raise IllegalStateError(
                "this consumer was made before a fork; its connections and its place in the group belong to the parent "
                "process: make a consumer in each process"
            )

    @property
    def is_delivering(self) -> bool:
        """Whether records may be handed out: those of partitions that are about to be given back may not."""
        if self.member is None or self._rebalancer is None:
            return True
        if self._rebalancer.is_revoking:
            return False
        return self.member.state is not MembershipState.UNJOINED or self.member.is_cooperative

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.assigned.assign([])  # an iteration that is under way ends
        if os.getpid() == self._owner_pid:
            self.cluster.close()
        self._close_waker()


def checked_partitions(partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """Pairs as TopicPartition; says what is wrong with anything else."""
    checked = []
    for entry in partitions:
        try:
            topic, partition = entry
        except (TypeError, ValueError):
            raise IllegalStateError(f"expected (topic, partition) pairs, got {entry!r}") from None
        if not isinstance(topic, str) or not isinstance(partition, int) or partition < 0:
            raise IllegalStateError(f"expected a topic name and a partition number from 0 up, got {entry!r}")
        checked.append(TopicPartition(topic, partition))
    return checked
