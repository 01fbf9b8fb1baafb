"""The group coordinator of a broker: its parts put together, and what administrators request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Coroutine

from semel.broker import resource_settings
from semel.broker.clock import Alarm, Clock, LoopTimers, Timers
from semel.broker.coordinator_runtime import CoordinatorRuntime, InternalTopic
from semel.broker.groups.classic_group import Act, Group, GroupError, GroupEvent, GroupState
from semel.broker.groups.commits import Commits
from semel.broker.groups.consumer.heartbeats import ConsumerGroups
from semel.broker.groups.consumer.model import ConsumerGroup, ConsumerGroupState
from semel.broker.groups.membership import ClassicMembership, MixedMembership
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.records import CommittedOffset, GroupRecord, GroupsRecord, OffsetKey, OffsetRecord
from semel.broker.groups.state import Core, GroupsState, expired_slots
from semel.broker.settings import MINUTE_MS, Settings
from semel.broker.store import Store
from semel.broker.topics import Topics
from semel.protocol.errors import ErrorCode

logger = logging.getLogger(__name__)


class GroupCoordinator:
    """All groups. `membership` (classic), `consumers` (KIP-848) and `commits` serve the requests of clients.

    The methods here serve operators and the rest of the broker. Everything runs on the broker's event loop.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        topics: Topics,
        store: Store,
        topic: InternalTopic,
        *,
        timers: Timers | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._settings = settings
        self._store = store
        self._timers = timers or LoopTimers()
        state = GroupsState(clock)
        self._core = core = Core(
            settings,
            clock,
            self._timers,
            state.groups,
            state.consumer_groups,
            state.offsets,
            CoordinatorRuntime(topic, state),
            new_id,
        )
        self._rebalance = Rebalance(core)
        self.consumers = ConsumerGroups(core, self._rebalance, topics, settings, self._timing_of)
        mixed = MixedMembership(core, self.consumers, topics)
        self.membership = ClassicMembership(core, self._rebalance, self.consumers, mixed)
        self.commits = Commits(core, self._rebalance)
        self._expiry = Alarm(self._timers, self._expire)
        self._running: set[asyncio.Task[ErrorCode]] = set()

    def _timing_of(self, group_id: str) -> resource_settings.GroupTiming:
        own = resource_settings.own_settings(self._store, resource_settings.GROUP, group_id)
        return resource_settings.group_timing(self._settings, own)

    # -- life ----------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Replays the log. Members of its groups have one session time to come back."""
        core = self._core
        core.runtime.load()
        for group in list(core.groups.values()):
            self._rebalance.resume(group)
        for consumer_group in core.consumer_groups.values():
            self.consumers.resume(consumer_group)
        self._expiry.set(self._settings["offsets.retention.check.interval.ms"])
        number = len(core.groups) + len(core.consumer_groups)
        logger.info("%d groups with %d offsets", number, len(core.offsets))

    async def stop(self) -> None:
        self._expiry.cancel()
        self._rebalance.stop()
        await self.consumers.stop()
        if self._running:
            await asyncio.wait(self._running)
        await self._core.runtime.finish_writes()
        await self._core.runtime.stop()

    # -- transactions --------------------------------------------------------------------------------------------------
    def partition_for(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that keeps a group: the one that a transaction has to register."""
        return self._core.partition_of(group_id)

    def on_marker(self, partition: int, producer_id: int, commit: bool) -> None:
        """A transaction that wrote offsets into this partition of `__consumer_offsets` ended."""
        self._core.runtime.end_transaction(partition, producer_id, commit)

    # -- topics --------------------------------------------------------------------------------------------------------
    def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Topics are gone, and their offsets with them."""
        by_group: dict[str, list[OffsetKey]] = {}
        for slot in self._core.offsets.slots_of_topics(topics):
            by_group.setdefault(slot.group, []).append(slot)
        for group_id, slots in by_group.items():
            self._run(self.commits.write_tombstones(group_id, slots))

    # -- administration ------------------------------------------------------------------------------------------------
    def groups(self) -> list[Group]:
        return list(self._core.groups.values())

    def find(self, group_id: str) -> Group | None:
        return self._core.groups.get(group_id)

    def consumer_groups(self) -> list[ConsumerGroup]:
        return list(self._core.consumer_groups.values())

    def find_consumer_group(self, group_id: str) -> ConsumerGroup | None:
        return self._core.consumer_groups.get(group_id)

    def all_offsets(self) -> list[tuple[OffsetKey, CommittedOffset]]:
        """Every committed offset, for metrics. May be called from another thread."""
        return list(self._core.offsets)

    async def delete(self, group_id: str) -> ErrorCode:
        """Deletes a group that has no members, and its offsets."""
        group = self._core.groups.get(group_id)
        try:
            if group is not None:
                return await self._delete(group, GroupEvent.DELETE)
            await self.consumers.delete(group_id)
            return ErrorCode.NONE
        except GroupError as error:
            return error.code

    async def _delete(self, group: Group, event: GroupEvent) -> ErrorCode:
        """Dead from the decision on, so that nobody joins what is about to go; empty again if the write fails."""
        if group.decide(event).act is not Act.WRITE_TOMBSTONES:
            return ErrorCode.NONE
        since_ms = group.state_time_ms
        group.enter(GroupState.DEAD, self._core.clock.now_ms())
        await self.commits.settled(group.group_id)  # of the offsets on their way to the log none is left behind
        slots = self._core.offsets.slots_of(group.group_id)
        if slots and event is GroupEvent.EXPIRE:  # it is used again
            group.enter(GroupState.EMPTY, since_ms)
            return ErrorCode.NONE
        records: list[GroupsRecord] = [
            *(OffsetRecord(slot, None) for slot in slots),
            GroupRecord(group.group_id, None),
        ]
        code = await self._core.runtime.commit(self._core.partition_of(group.group_id), records)
        if code is not ErrorCode.NONE:
            group.enter(GroupState.EMPTY, since_ms)
        return code

    # -- expiry --------------------------------------------------------------------------------------------------------
    def _expire(self) -> None:
        self._expiry.set(self._settings["offsets.retention.check.interval.ms"])
        self._run(self.expire_now())

    async def expire_now(self) -> ErrorCode:
        """Deletes offsets that were unused for the retention time, and groups without members and offsets."""
        now_ms = self._core.clock.now_ms()
        retention_ms = self._settings["offsets.retention.minutes"] * MINUTE_MS
        for group in self.groups():
            if self.commits.is_writing(group.group_id):
                continue  # in use: what is on its way must not go with what it replaces
            slots = expired_slots(group, self._core.offsets, now_ms, retention_ms)
            if slots:
                await self.commits.write_tombstones(group.group_id, slots)
            if not self._core.offsets.slots_of(group.group_id) and not group.pending:
                await self._delete(group, GroupEvent.EXPIRE)
        for consumers in self.consumer_groups():
            if self.commits.is_writing(consumers.group_id):
                continue
            slots = expired_slots(consumers, self._core.offsets, now_ms, retention_ms)
            await self.commits.write_tombstones(consumers.group_id, slots)
            is_empty = consumers.state is ConsumerGroupState.EMPTY
            if is_empty and not self._core.offsets.slots_of(consumers.group_id):
                with contextlib.suppress(GroupError):  # it is gone, or somebody joined
                    await self.consumers.delete(consumers.group_id, unless_used=True)
        return ErrorCode.NONE

    def _run(self, work: Coroutine[object, object, ErrorCode]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
