"""The engine of a consumer: the driver of its core. One turn of its loop, and waiting."""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from semel.client.aside import Aside, TaskOutcome, Waker
from semel.client.cluster import Cluster
from semel.client.consumer.commit_driver import CommitDriver
from semel.client.consumer.commits import PendingCommit
from semel.client.consumer.core import ConsumerCore, TopicSubscription
from semel.client.consumer.fetch_driver import LOOKUP_LANE, FetchDriver, wait_ready
from semel.client.consumer.rebalance import RebalanceListener
from semel.client.errors import ClosedError, IllegalStateError, KafkaError
from semel.client.group.member import GROUP_LANE, GroupMember
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import Recovery

log = logging.getLogger("semel.client.consumer")


class ConsumerEngine:
    def __init__(
        self,
        settings: ConsumerSettings,
        commit_before_revoke: Callable[[], PendingCommit | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.cluster = Cluster(settings)
        self.core = ConsumerCore(settings, self.cluster.metadata, random.random, commit_before_revoke)
        self.assigned = self.core.assigned
        self.fetcher = self.core.fetching.fetcher
        self.waker = Waker()
        self.aside = Aside(self.waker.wake)
        self.fetching = FetchDriver(self.core.fetching, self.cluster, settings, self.aside, clock)
        self.commits = CommitDriver(self.core.commits, self.cluster, self.aside, self.waker, self._on_commit_error)
        self.member: GroupMember | None = None
        self.closed = False
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
                self.core.retry_budget.failed(error, self._clock())

    def wait(self, deadline: Deadline) -> None:
        """Waits for the network, for what is done aside, for the heartbeat thread, or for a retry."""
        until_s = min(
            self._clock() + deadline.remaining_s(), self.core.fetching.next_retry_s(), self.commits.due_at_s()
        )
        connections = [*self.fetching.connections(), *self.commits.connections()]
        if self.member is not None:
            until_s = min(until_s, self._group_due_s())
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
            self.core.retry_budget.check(self._clock(), deadline.expired, self.cluster.was_reached)
            if deadline.expired:
                return False
            self.wait(deadline)

    # -- the group -----------------------------------------------------------------------------------------------------
    def _turn_group(self, member: GroupMember) -> None:
        member.polled()
        member.service()
        if not self.core.follow_group():
            return
        if self._clock() >= self.core.topics_due_s():
            self._look_up_topics()
        if self.core.is_ready_to_join():
            member.join(self.core.subscription.topics, self.assigned.partitions, self.aside)

    def _look_up_topics(self) -> None:
        subscription, wanted = self.core.subscription, self.core.subscription.wanted
        if self.fetching.look_up(
            lambda: self.cluster.refresh(wanted, self.fetching.look_up_deadline(), LOOKUP_LANE),
            lambda outcome: self._on_topics(subscription, outcome),
        ):
            subscription.refreshed_at_s = self._clock()

    def _on_topics(self, subscription: TopicSubscription, outcome: TaskOutcome[Metadata]) -> None:
        try:
            topics = dict(outcome.result().topics)
        except KafkaError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            self.core.retry_budget.failed(error, outcome.started_s)
        else:
            self.core.topics_found(subscription, topics)

    def _group_due_s(self) -> float:
        """When the group has something to do without an event."""
        looking_up, connecting = self.aside.is_busy(LOOKUP_LANE), self.aside.is_busy(GROUP_LANE)
        return self.core.group_due_s(looking_up, connecting, self._clock())

    def subscribe(self, subscription: TopicSubscription, listener: RebalanceListener) -> None:
        if self.member is None:
            self.member = GroupMember(self.cluster, self.settings, self.waker.wake, self._clock)
        # A pattern names no topic: looking up one that was deleted must not create it again.
        by_name = self.settings.allow_auto_create_topics and subscription.pattern is None
        self.cluster.settings = self.settings.replace(allow_auto_create_topics=by_name)
        self.core.subscribe(self.member, subscription, listener)

    def leave_group(self, reason: str, deadline: Deadline) -> None:
        """Gives partitions back, calls the listener and leaves. The caller has committed."""
        self.cluster.settings = self.settings
        try:
            self.core.leave()
        finally:
            member, self.member = self.member, None
            if member is not None:
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
