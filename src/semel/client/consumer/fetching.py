"""What a consumer decides about fetching: where to start, what to look up, what a response or its absence means.

A state machine without a thread, a socket, a clock or a lock around the plans and chunks of `fetcher.py`. Events and
the time are arguments of its methods; requests, look-ups and the time of the next retry come out of them. A driver
(`engine.py`) owns the rest:

    core.unresolved(now_s)              # offsets to look up; then committed_found or offsets_found, or look_up_failed
    core.stale_leaders(now_s)           # leaders to look up; then leaders_found, or look_up_failed
    core.plan(busy_nodes, now_s)        # Fetch requests; then responded, or failed
    core.take_doubted()                 # partitions whose leader must be looked up again
    core.next_retry_s()                 # when a partition that failed may be tried again

What the program must decide about is raised. `since_s` is the time at which an attempt that failed began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from semel.client.consumer.assigned_partitions import AssignedPartitions, PartitionState, ResetTo
from semel.client.consumer.fetcher import Fetcher, FetchFailure, FetchPlan
from semel.client.errors import ConnectionFailedError, KafkaError, TimedOutError, error_of
from semel.client.group.offset_requests import FoundOffset
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.types import (
    CorruptRecordError,
    GroupMetadata,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetOutOfRangeError,
    PartitionError,
    TopicPartition,
    UnknownPartitionError,
)
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.records import FetchResponse
from semel.protocol.schema import NO_UUID

_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
# A transaction is being finished, as it should be; or the next heartbeat brings the member's new epoch, or its end.
_PASSING = (ErrorCode.UNSTABLE_OFFSET_COMMIT, ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID)
_RESETS = {"earliest": ResetTo.EARLIEST, "latest": ResetTo.LATEST}

log = logging.getLogger(__name__)


class RetryBudget:
    """How long a consumer retries before poll() raises: default.api.timeout.ms. Before any broker was reached, a
    refused connection is raised when poll()'s own timeout ends: a wrong address must not look like an empty topic."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._last: KafkaError | None = None

    def succeeded(self) -> None:
        self._since_s = self._last = None

    def failed(self, error: KafkaError, since_s: float) -> None:
        """An attempt failed; `since_s`: when it began."""
        if self._last is None or str(self._last) != str(error):
            log.warning("consumer: %s", error)
        if self._since_s is None:
            self._since_s = since_s
        self._last = error

    def check(self, now_s: float, poll_ends: bool, was_reached: bool) -> None:
        """Raises if it has lasted too long. `was_reached`: whether any broker was, ever."""
        if self._last is None or self._since_s is None:
            return
        lasted_s = now_s - self._since_s
        is_refused = isinstance(self._last, ConnectionFailedError) and not isinstance(self._last, TimeoutError)
        if lasted_s >= self._limit_s or (poll_ends and is_refused and not was_reached):
            last, self._since_s, self._last = self._last, None, None
            raise TimedOutError(
                f"nothing could be read for {lasted_s:.3g} s; the last try: {last}", last.code
            ) from last


class _LookedUp(NamedTuple):
    """A partition, and its version when a look-up began."""

    state: PartitionState
    version: int

    @property
    def is_current(self) -> bool:
        return self.state.version == self.version


class CommittedLookUp(NamedTuple):
    """The group's committed offsets are wanted, by this member if the coordinator is to check it."""

    group_id: str
    looked_up: list[_LookedUp]
    member: GroupMetadata | None = None

    @property
    def partitions(self) -> list[TopicPartition]:
        return [each.state.topic_partition for each in self.looked_up]


class OffsetsLookUp(NamedTuple):
    """Offsets of the log are wanted: each partition's begin, end, or first record after a time."""

    wanted: dict[TopicPartition, int]
    looked_up: list[_LookedUp]


class LeadersLookUp(NamedTuple):
    """The leaders of these topics are wanted."""

    topics: list[str]
    states: list[PartitionState]


class FetchingCore:
    """The fetching of one consumer. `metadata` is what its driver keeps up to date, `reader` returns the identity that
    fetches committed offsets, if the coordinator is to check it."""

    def __init__(
        self,
        settings: ConsumerSettings,
        assigned: AssignedPartitions,
        metadata: Metadata,
        budget: RetryBudget,
        reader: Callable[[], GroupMetadata | None] = lambda: None,
    ) -> None:
        self.fetcher = Fetcher(assigned, settings)
        self._settings = settings
        self._assigned = assigned
        self._metadata = metadata
        self._budget = budget
        self._reader = reader
        self._backoff_s = settings.retry_backoff_ms / 1000
        self._looked_at_s = 0.0  # when it was last looked for what to do
        self._doubted: list[TopicPartition] = []

    def take_doubted(self) -> list[TopicPartition]:
        """Partitions whose leader, as far as it is known, is in doubt."""
        doubted, self._doubted = self._doubted, []
        return doubted

    def next_retry_s(self) -> float:
        """When a partition that failed may be tried again."""
        at_s = self._looked_at_s
        return min((s.retry_at_s for s in self._assigned if s.retry_at_s > at_s), default=float("inf"))

    # --- fetching ---

    def plan(self, busy_nodes: Iterable[int], now_s: float, draining: bool = False) -> list[FetchPlan]:
        """A request for every broker that is not busy and leads a partition that may hold more (see `Fetcher.plan`)."""
        names = {state.topic_partition.topic for state in self._assigned}
        topics = self._metadata.topics
        ids = {name: topic.topic_id for name in names if (topic := topics.get(name)) is not None}
        for state in self._assigned:
            topic_id = ids.get(state.topic_partition.topic, NO_UUID)
            if topic_id != state.topic_id and topic_id != NO_UUID and state.is_ready:
                self._on_topic_id(state, topic_id, now_s)
        return self.fetcher.plan(self._leader_of, ids, busy_nodes, now_s, draining)

    def _on_topic_id(self, state: PartitionState, topic_id: bytes, now_s: float) -> None:
        """The topic was deleted and created again: the position is of the old one. All of the new one is newer than
        what was read; at the same offset, its first records would be skipped."""
        if state.topic_id == NO_UUID:
            state.topic_id = topic_id
            return
        state.retry_at_s = now_s + self._backoff_s
        state.unknown_since_s = state.unknown_since_s or now_s
        if state.position is not None and state.position < state.fetch_offset:
            return  # what was read ahead is delivered first
        if self._settings.auto_offset_reset not in _RESETS:
            raise OffsetOutOfRangeError(
                f"{state.topic_partition}: the topic was deleted and created again, and offset {state.fetch_offset} is "
                "one of the old topic; auto.offset.reset=none leaves it to you: seek(), or seek_to_beginning()",
                ErrorCode.OFFSET_OUT_OF_RANGE,
                state.topic_partition,
                state.fetch_offset,
            )
        log.warning("%s: the topic was deleted and created again; it is read from its begin", state.topic_partition)
        state.reset(ResetTo.EARLIEST)

    def responded(self, plan: FetchPlan, response: FetchResponse, now_s: float) -> None:
        """Keeps the records; what failed is retried, reset or raised."""
        if response.error_code:
            self.failed(plan, error_of(response.error_code, f"fetching from broker {plan.node_id}"), now_s, now_s)
            return
        failures = self.fetcher.absorb(plan, response)
        self._budget.succeeded()
        for failure in failures:
            self._on_failure(failure, now_s)

    def failed(self, plan: FetchPlan, error: KafkaError, now_s: float, since_s: float) -> None:
        """The whole request failed, or could not be sent: look for the leaders anew, a little later."""
        if error.recovery is not Recovery.RETRY:
            raise error
        self._budget.failed(error, since_s)
        for partition, requested in plan.requested.items():
            self._doubted.append(partition)
            requested.state.retry_at_s = now_s + self._backoff_s

    def _on_failure(self, failure: FetchFailure, now_s: float) -> None:
        """One partition of a response failed."""
        state, code, _ = failure
        partition = state.topic_partition
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._on_out_of_range(failure, now_s)
        elif code is ErrorCode.CORRUPT_MESSAGE:
            raise CorruptRecordError(
                f"{partition}: the broker cannot read its log at offset {state.fetch_offset}; its disk needs a look",
                code,
                partition,
                state.fetch_offset,
            )
        elif code.retriable:
            self._doubted.append(partition)
            state.retry_at_s = now_s + self._backoff_s
            if code in _UNKNOWN:
                self._check_unknown(state, now_s)
        else:
            error = error_of(code, f"fetching {partition} at offset {state.fetch_offset}")
            raise PartitionError(str(error), code, partition, state.fetch_offset)

    def _on_out_of_range(self, failure: FetchFailure, now_s: float) -> None:
        state, code, data = failure
        if state.position is not None and state.position < state.fetch_offset:
            state.retry_at_s = now_s + self._backoff_s
            return  # what was read ahead is delivered first
        reset_to = _RESETS.get(self._settings.auto_offset_reset)
        if reset_to is None:
            raise OffsetOutOfRangeError(
                f"{state.topic_partition} has no offset {state.fetch_offset} (any more): its log starts at "
                f"{data.log_start_offset}; auto.offset.reset=none leaves it to you: seek(), or seek_to_beginning()",
                code,
                state.topic_partition,
                state.fetch_offset,
            )
        state.reset(reset_to)

    # --- leaders ---

    def stale_leaders(self, now_s: float) -> LeadersLookUp | None:
        """The topics of all partitions to fetch whose metadata is old or in doubt."""
        max_age_s = self._settings.metadata_max_age_ms / 1000
        names = {state.topic_partition.topic for state in self._assigned}
        stale = {name for name in names if not self._metadata.is_fresh(name, now_s, max_age_s)}
        if not stale:
            return None
        states = [
            state
            for state in self._assigned
            if state.topic_partition.topic in stale
            and state.is_ready
            and not state.paused
            and state.retry_at_s <= now_s
        ]
        return LeadersLookUp(sorted({s.topic_partition.topic for s in states}), states) if states else None

    def leaders_found(
        self, look_up: LeadersLookUp, now_s: float, since_s: float, failure: KafkaError | None = None
    ) -> None:
        """The metadata was brought up to date, or that failed."""
        for state in look_up.states:
            problem = failure or self._leader_error(state.topic_partition)
            if problem is not None and self._assigned.get(state.topic_partition) is state:
                self._on_no_leader(state, problem, now_s, since_s)

    def _leader_error(self, partition: TopicPartition) -> KafkaError | None:
        """Why a partition cannot be fetched, by the metadata."""
        name, index = partition
        topic = self._metadata.topics.get(name)
        if topic is None or name in self._metadata.errors:
            code = self._metadata.errors.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return error_of(code, f"looking up topic {name!r}")
        found = topic.partitions.get(index)
        if found is not None and found.leader >= 0:
            return None
        self._doubted.append(partition)
        if found is None:
            code, detail = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"it has {len(topic.partitions)} partitions"
            return error_of(code, f"partition {index} of {name!r}", detail)
        return error_of(found.error or ErrorCode.LEADER_NOT_AVAILABLE, f"partition {index} of {name!r}")

    def _leader_of(self, partition: TopicPartition) -> tuple[int, int] | None:
        """(node, epoch) by the metadata, unless that is in doubt; what is merely old is used while it is renewed."""
        topic = self._metadata.topics.get(partition.topic)
        if topic is None or not self._metadata.is_fresh(partition.topic, 0.0, float("inf")):
            return None
        found = topic.partitions.get(partition.partition)
        return (found.leader, found.leader_epoch) if found is not None and found.leader >= 0 else None

    def _on_no_leader(self, state: PartitionState, error: KafkaError, now_s: float, since_s: float) -> None:
        state.retry_at_s = now_s + self._settings.retry_backoff_max_ms / 1000
        if error.recovery is not Recovery.RETRY:
            raise error
        if error.code in _UNKNOWN:
            self._check_unknown(state, now_s)
        else:
            self._budget.failed(error, since_s)

    def _check_unknown(self, state: PartitionState, now_s: float) -> None:
        """A topic may be on its way; one that stays away is an error. (A group's leader takes it off by itself.)"""
        state.unknown_since_s = state.unknown_since_s or now_s
        if now_s - state.unknown_since_s < self._settings.default_api_timeout_ms / 1000:
            return
        state.unknown_since_s = None
        raise UnknownPartitionError(
            f"partition {state.topic_partition} does not exist, and did not appear for "
            f"default.api.timeout.ms={self._settings.default_api_timeout_ms}; was the topic deleted? "
            "unassign it, or create the topic",
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            state.topic_partition,
        )

    # --- where to start ---

    def unresolved(self, now_s: float) -> CommittedLookUp | OffsetsLookUp | None:
        """The offsets that are still unknown: the group's, else by auto.offset.reset. One try."""
        self._looked_at_s = now_s
        new = [state for state in self._assigned if state.is_new and state.retry_at_s <= now_s]
        group_id = self._settings.group_id
        if new and group_id is not None:
            return CommittedLookUp(group_id, [_LookedUp(state, state.version) for state in new], self._reader())
        for state in new:
            self._start_without_committed(state)
        resetting = [s for s in self._assigned if s.reset_to is not None and s.retry_at_s <= now_s]
        wanted = {state.topic_partition: state.reset_to for state in resetting if state.reset_to is not None}
        return OffsetsLookUp(wanted, [_LookedUp(state, state.version) for state in resetting]) if wanted else None

    def committed_found(self, look_up: CommittedLookUp, committed: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        states = _unmoved(look_up.looked_up)
        for state in states:
            found = committed.get(state.topic_partition)
            if found is not None:
                state.seek(found.offset, found.leader_epoch)
        for state in states:
            if state.topic_partition not in committed:
                self._start_without_committed(state)

    def committed_not_found(self, look_up: CommittedLookUp, error: KafkaError, now_s: float, since_s: float) -> None:
        self._postpone(_unmoved(look_up.looked_up), error, now_s, since_s)

    def offsets_found(
        self,
        look_up: OffsetsLookUp,
        found: Mapping[TopicPartition, FoundOffset],
        failed: Mapping[TopicPartition, KafkaError],
        now_s: float,
        since_s: float,
    ) -> None:
        if found:
            self._budget.succeeded()
        states = _unmoved(look_up.looked_up)
        for state in states:
            if state.topic_partition in found:
                at = found[state.topic_partition]
                state.seek(at.offset, at.leader_epoch)
        for state in states:
            error = failed.get(state.topic_partition)
            if error is not None and error.code in _UNKNOWN:
                self._on_no_leader(state, error, now_s, since_s)
            elif error is not None:
                self._postpone([state], error, now_s, since_s)

    def _start_without_committed(self, state: PartitionState) -> None:
        reset_to = _RESETS.get(self._settings.auto_offset_reset)
        if reset_to is None:
            raise NoOffsetError(
                f"group {self._settings.group_id!r} has no committed offset for {state.topic_partition}, and "
                "auto.offset.reset=none leaves it to you: seek(), or commit an offset first",
                None,
                state.topic_partition,
            )
        state.reset(reset_to)

    def _postpone(self, states: Iterable[PartitionState], error: KafkaError, now_s: float, since_s: float) -> None:
        if error.code not in _PASSING:
            if error.recovery is not Recovery.RETRY:
                raise error
            self._budget.failed(error, since_s)
        for state in states:
            state.retry_at_s = now_s + self._backoff_s


def _unmoved(looked_up: Iterable[_LookedUp]) -> list[PartitionState]:
    """Those that have not moved since the look-up began."""
    return [each.state for each in looked_up if each.is_current]
