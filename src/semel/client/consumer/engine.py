"""The engine of a consumer: the driver of its core. One turn of its loop, and waiting."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic

from semel.client.aside import TaskOutcome
from semel.client.consumer.commit_driver import CommitDriver
from semel.client.consumer.commits import PendingCommit
from semel.client.consumer.core import ConsumerCore, TopicSubscription
from semel.client.consumer.fetch_driver import LOOKUP_LANE, FetchDriver
from semel.client.consumer.rebalance import RebalanceListener
from semel.client.errors import ClosedError, IllegalStateError, KafkaError
from semel.client.group.member import GROUP_LANE, GroupMember
from semel.client.metadata import Metadata
from semel.client.network import Connection, Network
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import Recovery

log = logging.getLogger("semel.client.consumer")


class ConsumerEngine(Generic[Connection]):
    def __init__(
        self,
        settings: ConsumerSettings,
        network: Network[Connection],
        commit_before_revoke: Callable[[], PendingCommit | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.network = network
        self.calls = network.calls
        self.core = ConsumerCore(settings, self.calls.metadata, random.random, commit_before_revoke)
        self.assigned = self.core.assigned
        self.fetcher = self.core.fetching.fetcher
        self.aside = network.aside
        self.fetching = FetchDriver(self.core.fetching, network, settings, clock)
        self.commits = CommitDriver(self.core.commits, network, self._on_commit_error)
        self.member: GroupMember[Connection] | None = None
        self.closed = False
        self._clock = clock

    # -- a turn --------------------------------------------------------------------------------------------------------
    async def turn(self) -> None:
        """Does everything that can be done now; waits for nothing but the program's listener. Group, commits,
        responses, offsets, requests."""
        self._collect()
        if self.member is not None:
            await self._turn_group(self.member)
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

    async def wait(self, deadline: Deadline) -> None:
        """Waits for the network, for what is done aside, for the heartbeats, or for a retry."""
        until_s = min(
            self._clock() + deadline.remaining_s(), self.core.fetching.next_retry_s(), self.commits.due_at_s()
        )
        connections = [*self.fetching.connections(), *self.commits.connections()]
        if self.member is not None:
            until_s = min(until_s, self._group_due_s())
            connections += self.member.connections()
        until_s = min(until_s, self.network.next_deadline_s(connections))
        await self.network.wait(connections, until_s, self.fetching)

    def wake(self) -> None:
        """Ends a wait; any thread may call it."""
        self.network.wake()

    async def run_until(self, done: Callable[[], bool], deadline: Deadline) -> bool:
        """Turns until `done` or the deadline; whether it is done."""
        while True:
            await self.turn()
            if done():
                return True
            self.core.retry_budget.check(self._clock(), deadline.expired, self.calls.was_reached)
            if deadline.expired:
                return False
            await self.wait(deadline)
            if self.closed:  # by a signal handler, say
                self.check_usable()

    # -- the group -----------------------------------------------------------------------------------------------------
    async def _turn_group(self, member: GroupMember[Connection]) -> None:
        member.polled()
        member.service()
        if not await self.core.follow_group():
            return
        if self._clock() >= self.core.topics_due_s():
            self._look_up_topics()
        if await self.core.is_ready_to_join():
            member.join(self.core.subscription.topics, self.assigned.partitions)

    def _look_up_topics(self) -> None:
        subscription, wanted = self.core.subscription, self.core.subscription.wanted
        if self.fetching.look_up(
            lambda: self.calls.refresh(wanted, self.fetching.look_up_deadline(), LOOKUP_LANE),
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
            self.member = GroupMember(self.network, self.settings, self._clock)
        # A pattern names no topic: looking up one that was deleted must not create it again.
        by_name = self.settings.allow_auto_create_topics and subscription.pattern is None
        self.calls.settings = self.settings.replace(allow_auto_create_topics=by_name)
        self.core.subscribe(self.member, subscription, listener)

    async def leave_group(self, reason: str, deadline: Deadline) -> None:
        """Gives partitions back, calls the listener and leaves. The caller has committed."""
        self.calls.settings = self.settings
        try:
            await self.core.leave()
        finally:
            member, self.member = self.member, None
            if member is not None:
                await member.leave(reason, deadline)

    def _on_commit_error(self, code: Any, identity: Any) -> None:
        if self.member is not None:
            self.member.report(code, identity)

    # -- state ---------------------------------------------------------------------------------------------------------
    def check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this consumer is closed; make a new one")
        self.network.check_owner()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.assigned.assign([])  # an iteration that is under way ends
        self.network.close()


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
