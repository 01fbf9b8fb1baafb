"""How a group gets from one generation to the next: the acts of the table, and what happens when time passes.

Everything here runs to its end without an await: no request sees a group half changed. What must survive a crash is
written to the log, and what follows from it happens when it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from semel.broker.clock import Alarm, cancel_all
from semel.broker.coordinator_runtime import client_error
from semel.broker.groups.classic_group import Act, Cell, ClassicMember, Group, GroupEvent, GroupState, Protocols
from semel.broker.groups.records import GroupRecord
from semel.broker.groups.state import Core
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import JoinGroupResponse, JoinGroupResponseMember, SyncGroupResponse
from semel.storage import StorageError


def join_error(code: ErrorCode, member_id: str) -> JoinGroupResponse:
    return JoinGroupResponse(error_code=code, member_id=member_id, protocol_name=None)


def current_generation(group: Group, member_id: str, *, skip_assignment: bool = False) -> JoinGroupResponse:
    """The generation as a member sees it: the leader gets the metadata of all members."""
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol,
        leader=group.leader or "",
        skip_assignment=skip_assignment,
        member_id=member_id,
        members=_metadata_of_all(group) if member_id == group.leader else [],
    )


def _metadata_of_all(group: Group) -> list[JoinGroupResponseMember]:
    protocol = group.protocol or ""
    return [
        JoinGroupResponseMember(member.member_id, member.group_instance_id, member.protocols[protocol])
        for member in group.members.values()
    ]


def same_generation(group: Group, member_id: str, old_leader: str | None, *, may_skip: bool) -> JoinGroupResponse:
    """The response to a static member that came back and changed nothing: the generation goes on.

    A leader must not assign anew. From version 9 on the response can say so; before that it names another leader:
    the member id that it had.
    """
    response = current_generation(group, member_id, skip_assignment=may_skip and member_id == group.leader)
    if not may_skip:
        response.leader, response.members = old_leader or "", []
    return response


def sync_error(code: ErrorCode) -> SyncGroupResponse:
    return SyncGroupResponse(error_code=code)


def assignment_of(group: Group, member: ClassicMember) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=member.assignment
    )


logger = logging.getLogger(__name__)

NO_MEMBER_ID = ""


class Rebalance:
    """Carries out what the table decides about groups as a whole."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._acts: dict[Act, Callable[[Group], None]] = {
            Act.IGNORE: lambda group: None,
            Act.PREPARE: self._prepare,
            Act.TRY_COMPLETE: self._try_complete,
            Act.COMPLETE_IF_ALL: self._complete_if_all,
            Act.START_GENERATION: self._start_generation,
            Act.BECOME_EMPTY: self._become_empty,
            Act.WAIT_LONGER: self._wait_longer,
        }

    def resume(self, group: Group) -> None:
        """Takes up a group that was read from the log: its members get a session time to come back."""
        for member in group.members.values():
            self.watch(group, member, member.session_timeout_ms)
        if len(group.members) > self._core.settings["group.max.size"]:
            self._prepare(group)

    def carry_out(self, group: Group, cell: Cell, reason: str = "") -> None:
        if cell.act is Act.PREPARE:
            logger.info("group %s rebalances after generation %d: %s", group.group_id, group.generation, reason)
        self._acts[cell.act](group)

    # -- the join phase ------------------------------------------------------------------------------------------------
    def _prepare(self, group: Group) -> None:
        if group.state is GroupState.COMPLETING:
            self._withdraw_assignment(group, ErrorCode.REBALANCE_IN_PROGRESS)
        group.not_synced.clear()
        cancel_all(group.sync_alarm)
        is_initial = group.state is GroupState.EMPTY
        group.enter(GroupState.PREPARING, self._core.clock.now_ms())
        if is_initial:
            group.grew = False
            delay_ms = self._core.settings["group.initial.rebalance.delay.ms"]
            self._await_members(group, delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
        elif group.all_joined:
            self._complete(group)
        else:
            self._wait_longer(group)

    def _await_members(self, group: Group, delay_ms: int, left_ms: int) -> None:
        """The initial delay: a group that just started is likely to get more members. Each one extends it."""

        def over() -> None:
            if group.grew and left_ms > 0 and delay_ms > 0:
                group.grew = False
                self._await_members(group, min(delay_ms, left_ms), max(left_ms - delay_ms, 0))
            else:
                self._complete(group)

        self._set_join_alarm(group, delay_ms, over)

    def _wait_longer(self, group: Group) -> None:
        self._set_join_alarm(group, group.rebalance_timeout_ms, lambda: self._complete(group))

    def _set_join_alarm(self, group: Group, delay_ms: int, action: Callable[[], None]) -> None:
        cancel_all(group.join_alarm)
        group.join_alarm = Alarm(self._core.timers, action)
        group.join_alarm.set(delay_ms)

    def _try_complete(self, group: Group) -> None:
        if group.previous_state is not GroupState.EMPTY:
            self._complete_if_all(group)

    def _complete_if_all(self, group: Group) -> None:
        if group.all_joined:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        """The join phase ends: who did not come back is out, unless it is static and its session still runs."""
        if group.state is not GroupState.PREPARING:
            return
        cancel_all(group.join_alarm)
        for member in group.absent():
            if not member.is_static:
                self.drop(group, member.member_id)
        if group.elect_leader():
            event = GroupEvent.JOIN_DONE
        else:
            event = GroupEvent.JOIN_DONE_NOBODY_WAITS if group.members else GroupEvent.JOIN_DONE_NOBODY
        self.carry_out(group, group.decide(event))

    def _start_generation(self, group: Group) -> None:
        group.next_generation()
        group.enter(GroupState.COMPLETING, self._core.clock.now_ms())
        logger.info("group %s: generation %d with %d members", group.group_id, group.generation, len(group.members))
        for member in group.members.values():
            member.respond_to_join(current_generation(group, member.member_id))
            self.alive(member)
            member.is_new = False
            group.not_synced.add(member.member_id)
        generation = group.generation
        group.sync_alarm = Alarm(self._core.timers, lambda: self._sync_overdue(group, generation))
        group.sync_alarm.set(group.rebalance_timeout_ms)

    def _become_empty(self, group: Group) -> None:
        group.next_generation()
        group.enter(GroupState.EMPTY, self._core.clock.now_ms())
        logger.info("group %s: generation %d, empty", group.group_id, group.generation)
        # Should the write fail, the last generation comes back after a restart and times out: nothing is lost.
        self.store(group, lambda: None, lambda code: None)

    # -- the assignment ------------------------------------------------------------------------------------------------
    def store_assignment(self, group: Group, given: dict[str, bytes]) -> None:
        """Writes what the leader handed in, then responds with it. Members that it forgot get an empty assignment."""
        generation = group.generation
        assignment = {member_id: given.get(member_id, b"") for member_id in group.members}

        def stored() -> None:
            if group.generation == generation and group.state is GroupState.STABLE:
                self._hand_out(group)

        def failed(code: ErrorCode) -> None:
            if group.generation == generation and group.decide(GroupEvent.ASSIGNMENT_LOST).act is Act.PREPARE:
                self._withdraw_assignment(group, code)
                self.carry_out(group, group.decide(GroupEvent.ASSIGNMENT_LOST), f"assignment not stored: {code.name}")

        self.store(group, stored, failed, assignment)

    def _hand_out(self, group: Group) -> None:
        for member in group.members.values():
            if member.respond_to_sync(assignment_of(group, member)):
                self.alive(member)

    def _withdraw_assignment(self, group: Group, code: ErrorCode) -> None:
        for member in group.members.values():
            member.assignment = b""
            if member.respond_to_sync(sync_error(code)):
                self.alive(member)

    def synced(self, group: Group, member: ClassicMember) -> None:
        """A member requests its assignment."""
        group.not_synced.discard(member.member_id)
        if not group.not_synced:
            cancel_all(group.sync_alarm)

    # -- when time passes ----------------------------------------------------------------------------------------------
    def watch(self, group: Group, member: ClassicMember, timeout_ms: int) -> None:
        """Starts a member's session."""
        member.session = Alarm(self._core.timers, lambda: self._session_over(group, member))
        member.session.set(timeout_ms)

    def alive(self, member: ClassicMember) -> None:
        """A sign of life: the session starts anew."""
        if member.session is not None:
            member.session.set(member.session_timeout_ms)

    def hand_out_id(self, group: Group, member_id: str, timeout_ms: int) -> None:
        """A member will join with this id; a rebalance waits for it for a while."""
        group.pending[member_id] = Alarm(self._core.timers, lambda: self._pending_over(group, member_id))
        group.pending[member_id].set(timeout_ms)

    def _session_over(self, group: Group, member: ClassicMember) -> None:
        if group.members.get(member.member_id) is not member or member.needs_no_heartbeat:
            return
        self.drop(group, member.member_id)
        reason = f"{member.member_id} gave no sign of life for {member.session_timeout_ms} ms"
        self.carry_out(group, group.decide(GroupEvent.MEMBER_EXPIRED), reason)

    def _pending_over(self, group: Group, member_id: str) -> None:
        group.forget_pending(member_id)
        self.carry_out(group, group.decide(GroupEvent.PENDING_EXPIRED))

    def _sync_overdue(self, group: Group, generation: int) -> None:
        if group.generation != generation or not group.not_synced:
            return
        cell = group.decide(GroupEvent.SYNC_OVERDUE)
        if cell.act is Act.IGNORE:
            return
        late = sorted(group.not_synced)
        for member_id in late:
            self.drop(group, member_id)
        self.carry_out(group, cell, f"no SyncGroup from {', '.join(late)}")

    # -- steps ---------------------------------------------------------------------------------------------------------
    def drop(self, group: Group, member_id: str) -> None:
        """Takes a member out. A request of it that waits gets UNKNOWN_MEMBER_ID."""
        member = group.remove(member_id)
        if member is None:
            return
        cancel_all(member.session)
        member.respond_to_join(join_error(ErrorCode.UNKNOWN_MEMBER_ID, NO_MEMBER_ID))
        member.respond_to_sync(sync_error(ErrorCode.UNKNOWN_MEMBER_ID))

    def discard(self, group: Group) -> None:
        """A new group could not be stored: its members start over."""
        for member_id in list(group.members):
            self.drop(group, member_id)
        for member_id in list(group.pending):
            group.forget_pending(member_id)
        cancel_all(group.join_alarm, group.sync_alarm)
        if self._core.groups.get(group.group_id) is group:
            del self._core.groups[group.group_id]

    def dismiss(self, group: Group) -> None:
        """A consumer group took its place: requests that wait are to be sent again, to that one."""
        for member in group.members.values():
            cancel_all(member.session)
            member.respond_to_join(join_error(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
            member.respond_to_sync(sync_error(ErrorCode.REBALANCE_IN_PROGRESS))
        for member_id in list(group.pending):
            group.forget_pending(member_id)
        cancel_all(group.join_alarm, group.sync_alarm)

    def take_over(self, group: Group, protocols: Mapping[str, Protocols]) -> None:
        """What is left of a consumer group: its members, with all the protocols that they support, join anew."""
        for member in group.members.values():
            timeouts_ms = (member.rebalance_timeout_ms, member.session_timeout_ms)
            group.update(member, protocols[member.member_id], *timeouts_ms)
        self.resume(group)
        if group.state is GroupState.STABLE:
            cell = group.decide(GroupEvent.MEMBERS_LEFT)
            self.carry_out(group, cell, "the last member of the consumer protocol left")

    def store(
        self,
        group: Group,
        stored: Callable[[], None],
        failed: Callable[[ErrorCode], None],
        assignment: dict[str, bytes] | None = None,
    ) -> None:
        """Writes the group as it is; then either `stored` is called, or `failed` with the error for clients."""

        def ended(error: StorageError | None) -> None:
            if error is None:
                stored()
            else:
                failed(client_error(error))

        record = GroupRecord(group.group_id, group.to_record(assignment))
        try:
            self._core.runtime.write(self._core.partition_of(group.group_id), (record,), on_end=ended)
        except StorageError as error:
            failed(client_error(error))

    def stop(self) -> None:
        """Ends timers; requests that wait get NOT_COORDINATOR."""
        for group in self._core.groups.values():
            cancel_all(group.join_alarm, group.sync_alarm, *group.pending.values())
            for member in group.members.values():
                cancel_all(member.session)
                member.respond_to_join(join_error(ErrorCode.NOT_COORDINATOR, member.member_id))
                member.respond_to_sync(sync_error(ErrorCode.NOT_COORDINATOR))
