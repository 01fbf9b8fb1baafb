"""ConsumerGroupHeartbeat: the one request by which members of a consumer group join, follow and leave.

A heartbeat is worked out on a draft of the group. The draft's changes are written to the log, and when they are
durable they are replayed and the response is sent. One heartbeat of a group at a time: those that change nothing, and
that is nearly all, do not wait for anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from semel.broker.clock import Alarm, cancel_all
from semel.broker.coordinator_runtime import client_error
from semel.broker.groups.classic_group import GroupError, GroupState
from semel.broker.groups.consumer.model import ConsumerGroup, ConsumerGroupState, Current, MemberState
from semel.broker.groups.consumer.planner import JOINS, Beat, Draft, HeartbeatResult, Planner, deletion_of
from semel.broker.groups.migration import DOWNGRADE, UPGRADE, downgrade, upgrade
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.records import GroupRecord, GroupsRecord, OffsetRecord
from semel.broker.groups.state import Core
from semel.broker.resource_settings import GroupTiming
from semel.broker.settings import Settings
from semel.broker.topics import Topics
from semel.protocol.errors import ErrorCode
from semel.storage import StorageError

logger = logging.getLogger(__name__)

REMOVED_AGAIN_MS = 1_000  # after the log did not take it


class ConsumerGroups:
    """Heartbeats, sessions and assignments of all consumer groups."""

    def __init__(
        self,
        core: Core,
        rebalance: Rebalance,
        topics: Topics,
        settings: Settings,
        timing_of: Callable[[str], GroupTiming],
    ) -> None:
        self._core = core
        self._rebalance = rebalance
        self._topics = topics
        self._settings = settings
        self.timing_of = timing_of
        self.planner = Planner(topics, settings, core.clock, core.new_id)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sessions: dict[tuple[str, str], Alarm] = {}
        self._revocations: dict[tuple[str, str], Alarm] = {}
        self._joins: dict[tuple[str, str], Alarm] = {}  # of classic members that have to join again
        self._running: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def resume(self, group: ConsumerGroup) -> None:
        """Takes up a group that was read from the log."""
        for member_id in group.subscriptions:
            self.watch(group, member_id)

    async def stop(self) -> None:
        self._is_stopped = True
        cancel_all(*self._sessions.values(), *self._revocations.values(), *self._joins.values())
        if self._running:
            await asyncio.wait(self._running)

    def is_busy(self, group_id: str) -> bool:
        """Whether a heartbeat of this group is being written."""
        lock = self._locks.get(group_id)
        return lock is not None and lock.locked()

    # -- requests ------------------------------------------------------------------------------------------------------
    async def heartbeat(self, beat: Beat) -> HeartbeatResult:
        """GroupError where it is refused."""
        request = beat.request
        async with self._locks.setdefault(request.group_id, asyncio.Lock()):
            await self.planner.look_at_topics(self._core.consumer_groups.get(request.group_id), beat)
            draft = self._find_or_draft(beat)
            before = draft.group
            if request.member_epoch < 0:
                response = self.planner.leave(draft, request)
            else:
                response = self.planner.follow(draft, beat)
                cancel_all(self._joins.pop((request.group_id, response.member_id), None))
            if not draft.changes:
                self.watch(draft.group, response.member_id)
            elif request.member_epoch < 0:
                await self._store_without(before, draft)
            else:
                await self._store(draft)
            return response

    async def remove(self, group_id: str, member_ids: Iterable[str], reason: str) -> None:
        """Takes members out: they timed out, or an operator said so."""
        async with self._locks.setdefault(group_id, asyncio.Lock()):
            group = self._core.consumer_groups.get(group_id)
            if group is None:
                return
            await self.planner.look_at_topics(group)
            draft = Draft(group)
            for member_id in member_ids:
                if member_id in group.subscriptions:
                    logger.info("group %s: %s is out: %s", group_id, member_id, reason)
                    self.planner.drop(draft, member_id)
            if draft.changes:
                await self._store_without(group, draft)

    async def delete(self, group_id: str, *, unless_used: bool = False) -> None:
        """Deletes a group without members, and its offsets; `unless_used`: if it has none. GroupError: it has members,
        or could not be written."""
        async with self._locks.setdefault(group_id, asyncio.Lock()):
            group = self._core.consumer_groups.get(group_id)
            if group is None or group.state is not ConsumerGroupState.EMPTY:
                raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND if group is None else ErrorCode.NON_EMPTY_GROUP)
            await self._core.runtime.settled(self._core.partition_of(group_id))  # offsets on their way go with it
            slots = self._core.offsets.slots_of(group_id)
            if slots and unless_used:
                return
            await self._write(group_id, [*(OffsetRecord(slot, None) for slot in slots), *deletion_of(group_id)])

    def _find_or_draft(self, beat: Beat) -> Draft:
        """The group as it is, a new one, or what a classic group becomes with its first member of this protocol."""
        request = beat.request
        group, classic = self._core.consumer_groups.get(request.group_id), self._core.groups.get(request.group_id)
        if group is not None and classic is None:
            return Draft(group)
        if beat.classic is not None:  # the group became a classic one while the request waited
            raise GroupError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        is_in_use = classic is not None and classic.state is not GroupState.EMPTY
        may_upgrade = self._settings["group.consumer.migration.policy"] in UPGRADE
        if request.member_epoch != JOINS or (is_in_use and not may_upgrade):
            unknown = f"Consumer group {request.group_id} not found."
            other = f"Group {request.group_id} is not a consumer group."
            raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND, unknown if classic is None else other)
        draft = Draft(ConsumerGroup(request.group_id))
        if classic is not None and is_in_use:
            most = self._settings["group.consumer.max.size"]
            for change in upgrade(classic, self._topics, most, self._core.clock.now_ms()):
                draft.change(change)
        return draft

    # -- when time passes ----------------------------------------------------------------------------------------------
    def watch(self, group: ConsumerGroup, member_id: str) -> None:
        """Sets the member's alarms by what it is now. It is alive."""
        key = (group.group_id, member_id)
        if member_id not in group.subscriptions:
            self._forget(key)
            return
        classic = group.subscriptions[member_id].classic
        of_group_ms = self.timing_of(group.group_id).session_timeout_ms
        self._watch_session(key, of_group_ms if classic is None else classic.session_timeout_ms)
        current = group.current.get(member_id, Current())
        if current.state is not MemberState.UNREVOKED:
            cancel_all(self._revocations.pop(key, None))
        elif key not in self._revocations:
            self._watch_revocation(key, current.epoch, group.subscriptions[member_id].rebalance_timeout_ms)

    def _forget(self, key: tuple[str, str]) -> None:
        cancel_all(self._sessions.pop(key, None), self._revocations.pop(key, None), self._joins.pop(key, None))

    def await_join(self, group: ConsumerGroup, member_id: str) -> None:
        """A classic member was sent REBALANCE_IN_PROGRESS: it has its rebalance timeout for that."""
        key = (group.group_id, member_id)
        if key not in self._joins:
            self._watch_join(key, group.subscriptions[member_id].rebalance_timeout_ms)

    def _watch_join(self, key: tuple[str, str], timeout_ms: int) -> None:
        self._joins[key] = Alarm(self._core.timers, lambda: self._join_over(key))
        self._joins[key].set(timeout_ms)

    def _join_over(self, key: tuple[str, str]) -> None:
        self._joins.pop(key, None)
        group = self._core.consumer_groups.get(key[0])
        if group is not None and key[1] in group.subscriptions and group.must_join(key[1]):
            self._run_remove(key, "it did not join again in time", lambda: self._watch_join(key, REMOVED_AGAIN_MS))

    def _watch_session(self, key: tuple[str, str], timeout_ms: int) -> None:
        if key not in self._sessions:
            self._sessions[key] = Alarm(self._core.timers, lambda: self._session_over(key))
        self._sessions[key].set(timeout_ms)

    def _session_over(self, key: tuple[str, str]) -> None:
        self._run_remove(key, "its session ended", lambda: self._watch_session(key, REMOVED_AGAIN_MS))

    def _watch_revocation(self, key: tuple[str, str], epoch: int, timeout_ms: int) -> None:
        self._revocations[key] = Alarm(self._core.timers, lambda: self._revocation_over(key, epoch))
        self._revocations[key].set(timeout_ms)

    def _revocation_over(self, key: tuple[str, str], epoch: int) -> None:
        self._revocations.pop(key, None)
        group = self._core.consumer_groups.get(key[0])
        if group is not None and group.current.get(key[1], Current()).epoch == epoch:
            self._run_remove(
                key,
                "it did not give its partitions back in time",
                lambda: self._watch_revocation(key, epoch, REMOVED_AGAIN_MS),
            )

    def _run_remove(self, key: tuple[str, str], reason: str, watch_again: Callable[[], None]) -> None:
        """Removes a member; where the log did not take that, it is watched again and removed a moment later, unless it
        has done by then what it is removed for."""

        async def work() -> None:
            try:
                await self.remove(key[0], [key[1]], reason)
            except GroupError as error:
                logger.error("group %s: %s could not be removed: %s", *key, error)
                group = self._core.consumer_groups.get(key[0])
                if group is not None and key[1] in group.subscriptions and not self._is_stopped:
                    watch_again()

        task = asyncio.get_running_loop().create_task(work())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # -- steps ---------------------------------------------------------------------------------------------------------
    async def _store(self, draft: Draft) -> None:
        """Writes the draft's changes; then the group is as the draft. GroupError: nothing changed."""
        group_id = draft.group.group_id
        classic = self._core.groups.get(group_id)  # one that this group takes the place of
        if classic is None:
            await self._write(group_id, draft.changes, lambda: self._watch_all(group_id, draft.members))
            return
        before = (classic.state, classic.previous_state, classic.state_time_ms)
        classic.enter(GroupState.DEAD, classic.state_time_ms)  # nobody joins what is about to go

        def stored() -> None:
            self._rebalance.dismiss(classic)
            self._watch_all(group_id, draft.members)

        try:
            await self._write(group_id, [GroupRecord(group_id, None), *draft.changes], stored)
        except GroupError:
            classic.state, classic.previous_state, classic.state_time_ms = before
            raise

    async def _store_without(self, before: ConsumerGroup, draft: Draft) -> None:
        """The same after members went. If only classic members are left, they are a classic group again."""
        if not draft.group.is_all_classic or self._settings["group.consumer.migration.policy"] not in DOWNGRADE:
            await self._store(draft)
            return
        group_id = before.group_id
        records, protocols = downgrade(before, draft.group, self._topics, self._core.clock.now_ms(), deletion_of)

        def stored() -> None:
            for member_id in before.subscriptions:
                self._forget((group_id, member_id))
            self._rebalance.take_over(self._core.groups[group_id], protocols)

        await self._write(group_id, records, stored)

    def _watch_all(self, group_id: str, member_ids: Iterable[str]) -> None:
        group = self._core.consumer_groups[group_id]
        for member_id in member_ids:
            self.watch(group, member_id)

    async def _write(
        self, group_id: str, records: Sequence[GroupsRecord], stored: Callable[[], None] = lambda: None
    ) -> None:
        """Returns when it is replayed, also where the client is gone: the group's lock must be held until then."""
        try:
            written = self._core.runtime.write(
                self._core.partition_of(group_id), records, on_end=lambda error: stored() if error is None else None
            )
        except StorageError as error:
            raise GroupError(client_error(error)) from error
        if written is None:
            return
        try:
            failure = await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])
            raise
        if failure is not None:
            raise GroupError(client_error(failure)) from failure
