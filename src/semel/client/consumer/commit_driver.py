"""The driver of a consumer's commits: the connection to the coordinator, waits, callbacks. See `commits.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic

from semel.client.aside import TaskOutcome
from semel.client.cluster_calls import group_coordinator
from semel.client.consumer.commits import WHAT, Callback, CommitsCore, Offsets, PendingCommit
from semel.client.errors import KafkaError, error_of
from semel.client.group.offset_requests import LAST_VERSION_WITH_NAMES, offset_commit_error, offset_commit_request
from semel.client.network import Connection, Network
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.offsets import OFFSET_COMMIT

log = logging.getLogger(__name__)

COMMIT_LANE = "commit"


class CommitDriver(Generic[Connection]):
    """`on_error` gets the error code of a response to a commit, and who committed."""

    def __init__(
        self,
        core: CommitsCore,
        network: Network[Connection],
        on_error: Callable[[ErrorCode, GroupMetadata], None],
    ) -> None:
        self._core = core
        self._network = network
        self._calls = network.calls
        self._aside = network.aside
        self._on_error = on_error
        self._connection: Connection | None = None
        self._is_in_doubt = False  # whether the connection leads to the coordinator
        self._requests: dict[PendingCommit, Pending] = {}

    def __len__(self) -> int:
        return len(self._core)

    def connections(self) -> list[Connection]:
        """The one in use, while there is a commit for it."""
        connection = self._connection
        return [connection] if len(self._core) and connection is not None and not connection.closed else []

    # -- the calls -----------------------------------------------------------------------------------------------------
    def send(
        self,
        member: GroupMetadata,
        offsets: Offsets,
        callback: Callback | None,
        timeout_s: float,
        retried: bool = False,
    ) -> PendingCommit:
        """Sends it as soon as those before it allow, and never waits. A later `turn` calls back."""
        commit = self._core.add(member, offsets, callback, timeout_s, time.monotonic(), retried)
        self.turn()
        return commit

    async def commit(self, member: GroupMetadata, offsets: Offsets, deadline: Deadline) -> None:
        """Waits for the commits before it and for its own; raises if the group does not have the offsets."""
        commit = self.send(member, offsets, _ignored, deadline.remaining_s(), retried=True)
        await self.wait(lambda: commit.is_done, deadline)
        if not commit.is_done:
            self._core.withdraw(commit)
        if commit.error is not None:
            raise commit.error

    async def wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Until `done` or the deadline."""
        while True:
            self.turn()
            if done() or deadline.expired:
                return
            until_s = min(time.monotonic() + deadline.remaining_s(), self.due_at_s())
            await self._network.wait(self.connections(), until_s)

    # -- a turn --------------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Takes responses and sends what may be sent now; never waits, but calls back."""
        if len(self._core):
            self._core.not_sent_but(self._requests)
            self._aside.collect(COMMIT_LANE)
            self._network.receive(self.connections())
            self._receive()
            self._core.expire(time.monotonic())
            self._send_next()
        self._call_back()

    def due_at_s(self) -> float:
        """On time.monotonic(): when `turn` has something to do without an event."""
        if not len(self._core):
            return float("inf")
        is_connecting = self._aside.is_busy(COMMIT_LANE)
        due_s = self._core.next_event_s(connecting=is_connecting)
        return min(due_s, self._network.next_deadline_s(self.connections()))

    def _receive(self) -> None:
        for commit, pending in [(c, p) for c, p in self._requests.items() if p.done]:
            del self._requests[commit]
            try:
                error = offset_commit_error(pending.result(), commit.member.group_id)
            except DecodeError as problem:
                error = error_of(ErrorCode.NETWORK_EXCEPTION, WHAT, str(problem))
            except KafkaError as problem:
                error = problem
            if error is not None and error.code is not None:
                self._on_error(error.code, commit.member)
            self._ended(commit, error)

    def _ended(self, commit: PendingCommit, error: KafkaError | None) -> None:
        self._core.responded(commit, error, time.monotonic())
        self._forget_if_in_doubt(commit.member.group_id)

    def _forget_if_in_doubt(self, group_id: str) -> None:
        if self._core.take_doubt():
            self._calls.forget(group_coordinator(group_id))
            self._is_in_doubt = True

    def _call_back(self) -> None:
        while (commit := self._core.take_finished()) is not None:
            if commit.callback is not None:
                commit.callback(commit.offsets, commit.error)
            elif commit.error is not None:
                log.warning("offsets were not committed; the next commit covers them: %s", commit.error)

    # -- sending -------------------------------------------------------------------------------------------------------
    def _send_next(self) -> None:
        while (commit := self._core.next_to_send(time.monotonic())) is not None:
            connection = self._connection_for(commit)
            if connection is None:
                return
            try:
                self._send(commit, connection)
            except KafkaError as error:  # the broker is too old for it
                self._ended(commit, error)

    def _send(self, commit: PendingCommit, connection: Connection) -> None:
        version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        request = offset_commit_request(commit.member, commit.offsets)
        limit_s = min(commit.deadline_s - time.monotonic(), self._calls.settings.request_timeout_ms / 1000)
        self._requests[commit] = self._network.send(
            connection, OFFSET_COMMIT, request, version=version, timeout_s=max(0.0, limit_s)
        )
        self._core.sent(commit)

    def _connection_for(self, commit: PendingCommit) -> Connection | None:
        """The one that the commits before it are on; a new one only when none is on its way."""
        if self._core.in_flight:
            return next(iter(self.connections()), None)
        if self._is_in_doubt or any(connection.retiring for connection in self.connections()):
            self._connection, self._is_in_doubt = None, False
        if not self.connections():
            group_id = commit.member.group_id
            limit_s = self._calls.settings.request_timeout_ms / 1000
            self._connection = None
            self._aside.start(
                COMMIT_LANE,
                lambda: self._calls.connect(group_coordinator(group_id), Deadline(limit_s), COMMIT_LANE),
                lambda outcome: self._connected(group_id, outcome),
            )
        return self._connection

    def _connected(self, group_id: str, outcome: TaskOutcome[Connection]) -> None:
        try:
            self._connection = outcome.result()
        except KafkaError as error:
            self._core.unreachable(error, time.monotonic())
            self._forget_if_in_doubt(group_id)


def _ignored(offsets: Offsets, error: KafkaError | None) -> None:
    """The caller of `commit` gets the error."""
