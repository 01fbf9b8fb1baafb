"""The engine of a consumer: one turn of its loop, waiting, and handing out what was fetched."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from semel.client.cluster import Cluster
from semel.client.consumer_commits import AsyncCommits
from semel.client.consumer_fetching import Fetching, wait_ready
from semel.client.consumer_patience import Patience
from semel.client.consumer_positions import Positions
from semel.client.consumer_rebalance import RebalanceListener, Rebalancer
from semel.client.consumer_settings import ConsumerSettings
from semel.client.consumer_types import TopicPartition
from semel.client.errors import ClosedError, IllegalStateError, KafkaError, error_of
from semel.client.group import GROUP_LANE, GroupMember
from semel.client.group_states import State
from semel.client.timing import Deadline
from semel.protocol.errors import ErrorCode, Recovery

log = logging.getLogger("semel.client.consumer")

MISSING_TOPIC_REFRESH_S = 1.0


class Subscription:
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


class ConsumerCore:
    def __init__(
        self,
        settings: ConsumerSettings,
        commit_before_revoke: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.cluster = Cluster(settings)
        self.positions = Positions()
        self.patience = Patience(settings.default_api_timeout_ms / 1000, settings.request_timeout_ms / 1000, clock)
        self.fetching = Fetching(self.cluster, settings, self.positions, self.patience, clock)
        self.commits = AsyncCommits(self.cluster, self._on_commit_error)
        self.member: GroupMember | None = None
        self.subscription = Subscription()
        self.closed = False
        self._commit_before_revoke = commit_before_revoke
        self._rebalancer: Rebalancer | None = None
        self._clock = clock
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._close_pipe = weakref.finalize(self, _close_all, self._wake_read, self._wake_write)
        self._owner_pid = os.getpid()

    # -- a turn --------------------------------------------------------------------------------------------------------
    def turn(self, deadline: Deadline) -> None:
        """Does everything that can be done now without waiting for a fetch: group, positions, answers, requests."""
        if self.member is not None:
            self._turn_group(self.member, deadline)
        self.commits.receive()
        self.fetching.receive()
        self.fetching.resolve(deadline)
        self.fetching.send(deadline)

    def wait(self, deadline: Deadline) -> None:
        """Waits for the network, for the heartbeat thread's news, or for a retry that is due."""
        until_s = min(self._clock() + deadline.remaining_s(), self.fetching.next_retry_s())
        connections = [*self.fetching.connections(), *self.commits.connections()]
        if self.member is not None:
            until_s = min(until_s, self._group_due_s(self.member))
            connections += self.cluster.connections(GROUP_LANE)
        until_s = min([until_s, *(connection.next_deadline_s() for connection in connections)])
        ready = wait_ready(connections, until_s - self._clock(), self._wake_read)
        while self.fetching.read_on(ready):
            ready = wait_ready(connections, until_s - self._clock(), self._wake_read)
        if self._wake_read in ready:
            self._drain_wakeups()

    def wake(self) -> None:
        """Ends a wait; any thread may call it."""
        with contextlib.suppress(OSError):  # full: a wake-up is under way already; closed: nobody waits
            os.write(self._wake_write, b"\0")

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def run_until(self, done: Callable[[], bool], deadline: Deadline) -> bool:
        """Turns until `done` or the deadline; whether it is done."""
        while True:
            self.turn(deadline)
            if done():
                return True
            self.patience.check(poll_ends=deadline.expired)
            if deadline.expired:
                return False
            self.wait(deadline)

    # -- the group -----------------------------------------------------------------------------------------------------
    def _turn_group(self, member: GroupMember, deadline: Deadline) -> None:
        assert self._rebalancer is not None
        member.polled()
        member.service()
        news = member.take_news()
        if news.lost:
            self._rebalancer.lose()
        if news.error is not None:
            raise news.error
        if member.state is State.FENCED:
            raise error_of(ErrorCode.FENCED_INSTANCE_ID, f"group {member.group_id!r}")
        if news.assignment is not None:
            self._rebalancer.adopt(news.assignment)
            self.patience.succeeded()
        try:
            self._follow_topics(member, self.patience.step(deadline))
            if member.state is State.UNJOINED and self.subscription.topics:
                self._rebalancer.prepare(self.subscription.topics)
                member.join(self.subscription.topics, self.positions.partitions, self.patience.step(deadline))
        except KafkaError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            self.patience.failed(error)

    def _follow_topics(self, member: GroupMember, deadline: Deadline) -> None:
        """Looks now and then whether topics came, went or grew, and asks for a rebalance if so."""
        subscription, now_s = self.subscription, self._clock()
        if now_s < self._topics_due_s():
            return
        subscription.refreshed_at_s = now_s
        wanted = None if subscription.pattern is not None else sorted(subscription.names)
        metadata = self.cluster.refresh(wanted, deadline)
        if subscription.match(name for name, topic in metadata.topics.items() if not topic.is_internal):
            member.rejoin("the topics that match the pattern changed")
        elif member.is_leader and member.state is State.STABLE:
            counts = {name: len(metadata.topics[name].partitions) for name in metadata.topics}
            known = member.shared_counts
            if any(counts.get(name, 0) != known.get(name, 0) for name in subscription.topics):
                member.rejoin("the number of partitions changed")

    def _topics_due_s(self) -> float:
        subscription = self.subscription
        missing = any(name not in self.cluster.metadata.topics for name in subscription.topics)
        quick = missing or (subscription.pattern is not None and not subscription.topics)
        age_s = MISSING_TOPIC_REFRESH_S if quick else self.settings.metadata_max_age_ms / 1000
        return subscription.refreshed_at_s + age_s if subscription.refreshed_at_s else 0.0

    def _group_due_s(self, member: GroupMember) -> float:
        due_s = self._topics_due_s()
        if member.state is State.UNJOINED and self.subscription.topics:
            due_s = min(due_s, max(member.retry_at_s, self._clock()))
        return due_s

    def subscribe(self, subscription: Subscription, listener: RebalanceListener) -> None:
        if self.member is None:
            self.positions.assign([])
            self.member = GroupMember(self.cluster, self.settings, self.wake, self._clock)
        else:
            self.member.rejoin("the subscription changed")
        self.subscription = subscription
        self._rebalancer = Rebalancer(self.member, self.positions, listener, self._commit_before_revoke)

    def leave_group(self, reason: str) -> None:
        """Gives partitions back and leaves; the listener is told."""
        member, rebalancer = self.member, self._rebalancer
        self.member = self._rebalancer = None
        self.subscription = Subscription()
        if member is None or rebalancer is None:
            return
        try:
            if member.state is not State.FENCED:
                self.member = member  # so that the commit still carries its identity
                rebalancer.give_back()
        finally:
            self.member = None
            self.positions.assign([])
            member.leave(reason)

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
        return self.member is None or self.member.state is not State.UNJOINED or self.member.is_cooperative

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.positions.assign([])  # an iteration that is under way ends
        if os.getpid() == self._owner_pid:
            self.cluster.close()
        self._close_pipe()


def _close_all(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)


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
