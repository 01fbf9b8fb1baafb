"""The commits of one consumer, in one order: the offsets that stay are those of the last call. No I/O, no clock.

All go through one queue. Requests that are not waited for follow each other on one connection, which the broker works
through in order; a commit that is tried again is alone on its way. A driver (`engine.py`) sends them:

    commit = core.add(...)                   # then, in turns:
    core.expire(now_s)                       # fails what has waited too long to be sent
    core.next_to_send(now_s)                 # then `sent`; and `responded` with the error of the attempt, if any
    core.unreachable(error, now_s)           # there is no connection to the coordinator
    core.take_doubt()                        # whether the coordinator must be looked up again
    core.take_finished()                     # the next commit that is done, to be called back
    core.next_event_s(connecting)            # when there is something to do without an event
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping

from semel.client.errors import KafkaError, RetriableError, TimedOutError
from semel.client.pauses import Pauses
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.errors import ErrorCode, Recovery

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Offsets, KafkaError | None], None]
WHAT = "committing offsets"
NEVER_S = float("inf")


class PendingCommit:
    """One commit on its way: `is_done` with or without an `error`."""

    def __init__(
        self,
        member: GroupMetadata,
        offsets: Offsets,
        callback: Callback | None,
        timeout_s: float,
        now_s: float,
        retries: Pauses | None,
    ) -> None:
        self.member = member
        self.offsets = offsets
        self.callback = callback
        self.deadline_s = now_s + timeout_s
        self.is_retried = retries is not None
        self.is_sent = False
        self.is_done = False
        self.error: KafkaError | None = None
        self.retry_at_s = 0.0
        self._first_error: KafkaError | None = None
        self._timeout_s = timeout_s
        self._pauses = retries

    def failed(self, error: KafkaError, now_s: float) -> bool:
        """Takes the error of one attempt; whether that was the last one."""
        self._first_error = self._first_error or error
        if self._pauses is None or error.recovery is not Recovery.RETRY:
            self.error = error
            return True
        wait_s = self._pauses.next_s()
        if self.deadline_s - now_s <= wait_s:
            self.error = self._timed_out(error)
            return True
        self.retry_at_s = now_s + wait_s
        return False

    def expired(self, first: PendingCommit) -> None:
        """`first` of the queue, which may be this one: what others wait for."""
        self.error = self._timed_out(self._first_error or first._first_error)

    def _timed_out(self, last: KafkaError | None) -> TimedOutError:
        cause = f"the last try: {last}" if last is not None else "the coordinator did not respond"
        if self._first_error is not None and str(self._first_error) != str(last):
            cause += f"; the first try: {self._first_error}"
        code = last.code if last is not None else ErrorCode.REQUEST_TIMED_OUT
        return TimedOutError(f"{WHAT} did not succeed within {self._timeout_s:.3g} s; {cause}", code)


class CommitsCore:
    """The queue. `pauses` makes the waits between the attempts of one commit; `renew` returns the newest identity of
    the member that one belongs to, None if it is over."""

    def __init__(
        self, pauses: Callable[[], Pauses], renew: Callable[[GroupMetadata], GroupMetadata | None] = lambda _: None
    ) -> None:
        self.succeeded_total = self.failed_total = 0
        self._pauses = pauses
        self._renew = renew
        self._queue: deque[PendingCommit] = deque()
        self._finished: deque[PendingCommit] = deque()
        self._is_in_doubt = False

    def _count(self, commit: PendingCommit) -> None:
        if commit.error is None:
            self.succeeded_total += 1
        else:
            self.failed_total += 1

    def __len__(self) -> int:
        """Those that are not done."""
        return len(self._queue)

    @property
    def in_flight(self) -> list[PendingCommit]:
        return [commit for commit in self._queue if commit.is_sent]

    # --- the calls ---

    def add(
        self,
        member: GroupMetadata,
        offsets: Offsets,
        callback: Callback | None,
        timeout_s: float,
        now_s: float,
        retried: bool = False,
    ) -> PendingCommit:
        """To be sent as soon as those before it allow."""
        commit = PendingCommit(member, offsets, callback, timeout_s, now_s, self._pauses() if retried else None)
        self._queue.append(commit)
        return commit

    def withdraw(self, commit: PendingCommit) -> None:
        """Its caller does not wait any longer, and gets the error itself."""
        commit.expired(self._queue[0])
        self._queue.remove(commit)
        self._count(commit)

    # --- sending ---

    def expire(self, now_s: float) -> None:
        """Fails what waited too long to be sent. A request on its way has a deadline of its own."""
        for commit in [each for each in self._queue if not each.is_sent and each.deadline_s <= now_s]:
            commit.expired(self._queue[0])
            self._finish(commit)

    def next_to_send(self, now_s: float) -> PendingCommit | None:
        """The first one that was not sent, if nothing keeps it: one that is tried again goes alone, and nothing
        overtakes it."""
        for commit in self._queue:
            if not commit.is_sent:
                if (commit.is_retried and bool(self.in_flight)) or commit.retry_at_s > now_s:
                    return None
                commit.member = self._renew(commit.member) or commit.member
                return commit
            if commit.is_retried:
                return None
        return None

    def sent(self, commit: PendingCommit) -> None:
        commit.is_sent = True

    def not_sent_but(self, requests: Container[PendingCommit]) -> None:
        """Those without a request are not on their way, whatever a call that was interrupted (Ctrl-C) has left."""
        for commit in self._queue:
            commit.is_sent = commit in requests

    def _retriable(self, commit: PendingCommit, error: KafkaError) -> KafkaError:
        """A member whose epoch went on commits under the new one, as long as it never lost its partitions. The new
        epoch may be on its way: the next attempts find it."""
        renewed = self._renew(commit.member) if error.code is ErrorCode.STALE_MEMBER_EPOCH else None
        if renewed is None:
            return error
        commit.member = renewed
        return RetriableError(str(error), error.code)

    def responded(self, commit: PendingCommit, error: KafkaError | None, now_s: float) -> None:
        """An attempt has ended, with or without a response."""
        commit.is_sent = False
        if commit.is_done or commit not in self._queue:
            return  # withdrawn meanwhile
        if error is not None and error.recovery is Recovery.RETRY:
            self._is_in_doubt = True
        if error is None or commit.failed(self._retriable(commit, error), now_s):
            self._finish(commit)

    def unreachable(self, error: KafkaError, now_s: float) -> None:
        """An attempt of all of them has failed: there is no connection to the coordinator."""
        self._is_in_doubt = True
        for commit in list(self._queue):
            self.responded(commit, error, now_s)

    def take_doubt(self) -> bool:
        """Whether the coordinator must be looked up again before the next request to it."""
        in_doubt, self._is_in_doubt = self._is_in_doubt, False
        return in_doubt

    def take_finished(self) -> PendingCommit | None:
        """The next one that is done and was not taken; its callback may add others."""
        return self._finished.popleft() if self._finished else None

    def next_event_s(self, connecting: bool) -> float:
        """When one that was not sent has waited too long, or is to be tried again; not while that needs a connection
        which is being opened."""
        if not self._queue:
            return NEVER_S
        due_s = min((commit.deadline_s for commit in self._queue if not commit.is_sent), default=NEVER_S)
        first = self._queue[0]
        return due_s if first.is_sent or connecting else min(due_s, first.retry_at_s)

    def _finish(self, commit: PendingCommit) -> None:
        self._count(commit)
        commit.is_done = True
        self._queue.remove(commit)
        self._finished.append(commit)
