"""The commits of one consumer, in one order: the offsets that stay are those of the last call.

All go through one queue. Requests that are not waited for follow each other on one connection, which the broker works
through in order; a commit that is tried again is alone on its way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from semel.client.aside import Aside, TaskOutcome, Waker
from semel.client.cluster import Cluster, CoordinatorTarget, group_coordinator
from semel.client.connection import BrokerConnection
from semel.client.consumer.fetching import wait_ready
from semel.client.errors import KafkaError, TimedOutError, error_of
from semel.client.group.offsets import (
    LAST_VERSION_WITH_NAMES,
    offset_commit_error,
    offset_commit_request,
)
from semel.client.timing import Backoff, Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages.offsets import OFFSET_COMMIT

log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Offsets, KafkaError | None], None]
COMMIT_LANE = "commit"
WHAT = "committing offsets"


class PendingCommit:
    """One commit on its way: `is_done` with or without an `error`."""

    def __init__(
        self,
        member: GroupMetadata,
        offsets: Offsets,
        callback: Callback | None,
        deadline: Deadline,
        retries: Backoff | None,
    ) -> None:
        self.member = member
        self.offsets = offsets
        self.callback = callback
        self.deadline = deadline
        self.is_retried = retries is not None
        self.is_done = False
        self.error: KafkaError | None = None
        self.first_error: KafkaError | None = None
        self.pending: Pending | None = None
        self.retry_at_s = 0.0  # on time.monotonic()
        self._backoff = retries

    def failed(self, error: KafkaError) -> bool:
        """Takes the error of one attempt; whether that was the last one."""
        self.first_error = self.first_error or error
        if self._backoff is None or error.recovery is not Recovery.RETRY:
            self.error = error
            return True
        wait_s = self._backoff.next_s()
        if self.deadline.remaining_s() <= wait_s:
            self.error = self._timed_out(error)
            return True
        self.retry_at_s = time.monotonic() + wait_s
        return False

    def expired(self) -> None:
        self.error = self._timed_out(self.first_error)

    def _timed_out(self, last: KafkaError | None) -> TimedOutError:
        cause = f"the last try: {last}" if last is not None else "the coordinator did not respond"
        if self.first_error is not None and str(self.first_error) != str(last):
            cause += f"; the first try: {self.first_error}"
        code = last.code if last is not None else ErrorCode.REQUEST_TIMED_OUT
        return TimedOutError(f"{WHAT} did not succeed within {self.deadline.total_s:.3g} s; {cause}", code)


class CommitQueue:
    def __init__(
        self, cluster: Cluster, aside: Aside, waker: Waker, on_error: Callable[[ErrorCode, GroupMetadata], None]
    ) -> None:
        self._cluster = cluster
        self._aside = aside
        self._waker = waker
        self._on_error = on_error
        self._queue: deque[PendingCommit] = deque()  # those without `pending` have not been sent
        self._connection: BrokerConnection | None = None
        self._in_doubt = False  # whether the connection leads to the coordinator

    def __len__(self) -> int:
        return len(self._queue)

    def connections(self) -> list[BrokerConnection]:
        """The one in use, while there is a commit for it."""
        connection = self._connection
        return [connection] if self._queue and connection is not None and not connection.closed else []

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
        backoff = self._cluster.backoff() if retried else None
        commit = PendingCommit(member, offsets, callback, Deadline(timeout_s), backoff)
        self._queue.append(commit)
        self.turn()
        return commit

    def commit(self, member: GroupMetadata, offsets: Offsets, deadline: Deadline) -> None:
        """Waits for the commits before it and for its own; raises if the group does not have the offsets."""
        commit = self.send(member, offsets, _ignored, deadline.remaining_s(), retried=True)
        self.wait(lambda: commit.is_done, deadline)
        if not commit.is_done:
            self._queue.remove(commit)
            commit.expired()
        if commit.error is not None:
            raise commit.error

    def wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Until `done` or the deadline."""
        while True:
            self.turn()
            if done() or deadline.expired:
                return
            timeout_s = min(deadline.remaining_s(), self.due_at_s() - time.monotonic())
            if self._waker.fd in wait_ready(self.connections(), timeout_s, self._waker.fd):
                self._waker.drain()

    # -- a turn --------------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Takes responses and sends what may be sent now; never waits."""
        if not self._queue:
            return
        self._aside.collect(COMMIT_LANE)
        for connection in self.connections():
            connection.progress()
            connection.check_deadlines()
        self._receive()
        for commit in [commit for commit in self._queue if commit.pending is None and commit.deadline.expired]:
            commit.expired()
            self._finish(commit)
        self._send_next()

    def due_at_s(self) -> float:
        """On time.monotonic(): when `turn` has something to do without an event."""
        if not self._queue:
            return float("inf")
        now_s = time.monotonic()
        times_s = [connection.next_deadline_s() for connection in self.connections()]
        times_s += [now_s + commit.deadline.remaining_s() for commit in self._queue if commit.pending is None]
        if self._queue and self._queue[0].pending is None and not self._aside.is_busy(COMMIT_LANE):
            times_s.append(self._queue[0].retry_at_s)
        return min(times_s, default=float("inf"))

    def _receive(self) -> None:
        for commit in [commit for commit in self._queue if commit.pending is not None and commit.pending.done]:
            if commit.pending is None:
                continue  # a callback has called back into the consumer
            try:
                error = offset_commit_error(commit.pending.result(), commit.member.group_id)
            except DecodeError as problem:
                error = error_of(ErrorCode.NETWORK_EXCEPTION, WHAT, str(problem))
            except KafkaError as problem:
                error = problem
            if error is not None and error.code is not None:
                self._on_error(error.code, commit.member)
            self._ended(commit, error)

    def _ended(self, commit: PendingCommit, error: KafkaError | None) -> None:
        """One attempt has ended."""
        commit.pending = None
        if error is not None and error.recovery is Recovery.RETRY:
            self._cluster.forget(group_coordinator(commit.member.group_id))
            self._in_doubt = True
        if error is None or commit.failed(error):
            self._finish(commit)

    def _finish(self, commit: PendingCommit) -> None:
        if commit.is_done:
            return
        commit.is_done = True
        self._queue.remove(commit)
        if commit.callback is not None:
            commit.callback(commit.offsets, commit.error)
        elif commit.error is not None:
            log.warning("offsets were not committed; the next commit covers them: %s", commit.error)

    # -- sending -------------------------------------------------------------------------------------------------------
    def _send_next(self) -> None:
        for commit in list(self._queue):
            if commit.pending is None:
                in_flight = any(other.pending is not None for other in self._queue)
                if (commit.is_retried and in_flight) or commit.retry_at_s > time.monotonic():
                    return
                connection = self._connection_for(commit, in_flight)
                if connection is None:
                    return
                try:
                    self._send(commit, connection)
                except KafkaError as error:  # the broker is too old for it
                    self._ended(commit, error)
                    continue
            if commit.is_retried:
                return  # nothing overtakes it

    def _send(self, commit: PendingCommit, connection: BrokerConnection) -> None:
        version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        request = offset_commit_request(commit.member, commit.offsets)
        limit_s = min(commit.deadline.remaining_s(), self._cluster.settings.request_timeout_ms / 1000)
        commit.pending = connection.send(OFFSET_COMMIT, request, version=version, timeout_s=limit_s)

    def _connection_for(self, commit: PendingCommit, in_flight: bool) -> BrokerConnection | None:
        """The one that the commits before it are on; a new one only when none is on its way."""
        if in_flight:
            return next(iter(self.connections()), None)
        if self._in_doubt or any(connection.retiring for connection in self.connections()):
            self._connection, self._in_doubt = None, False
        if not self.connections():
            coordinator = group_coordinator(commit.member.group_id)
            limit_s = self._cluster.settings.request_timeout_ms / 1000
            self._connection = None
            self._aside.start(
                COMMIT_LANE,
                lambda: self._cluster.connect(coordinator, Deadline(limit_s), COMMIT_LANE),
                lambda outcome: self._connected(coordinator, outcome),
            )
        return self._connection

    def _connected(self, coordinator: CoordinatorTarget, outcome: TaskOutcome[BrokerConnection]) -> None:
        try:
            self._connection = outcome.result()
        except KafkaError as error:
            self._cluster.forget(coordinator)
            for commit in list(self._queue):
                self._ended(commit, error)


def _ignored(offsets: Offsets, error: KafkaError | None) -> None:
    """The caller of `commit` gets the error."""
