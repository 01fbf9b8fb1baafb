"""Fetching over the network: sends what the fetcher plans, takes the answers, and finds positions to start from."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable

from semel.client.cluster import Cluster, Leader, Node
from semel.client.connection import Connection
from semel.client.consumer_errors import (
    CorruptRecordError,
    NoOffsetError,
    OffsetOutOfRangeError,
    PartitionError,
    UnknownPartitionError,
)
from semel.client.consumer_patience import Patience
from semel.client.consumer_positions import PartitionState, Positions, ResetTo
from semel.client.consumer_settings import ConsumerSettings
from semel.client.consumer_types import TopicPartition
from semel.client.errors import KafkaError, error_of
from semel.client.fetcher import FIRST_VERSION_WITH_TOPIC_IDS, Fetcher, FetchPlan, Trouble
from semel.client.group_offsets import fetch_committed, list_offsets
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages.fetch import FETCH
from semel.protocol.schema import NO_UUID

FETCH_LANE = "fetch"
_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
_RESETS = {"earliest": ResetTo.EARLIEST, "latest": ResetTo.LATEST}


class Fetching:
    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        positions: Positions,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fetcher = Fetcher(positions, settings)
        self._cluster = cluster
        self._settings = settings
        self._positions = positions
        self._patience = patience
        self._clock = clock
        self._in_flight: dict[int, tuple[FetchPlan, Pending]] = {}

    # -- asking --------------------------------------------------------------------------------------------------------
    def send(self, deadline: Deadline, draining: bool = False) -> None:
        """Sends a fetch to every broker that has none in flight and leads a partition with room (see `plan`)."""
        step = self._patience.step(deadline)
        topics = self._cluster.metadata.topics
        plans = self.fetcher.plan(
            lambda partition: self._leader_of(partition, step),
            {name: topic.topic_id for name, topic in topics.items()},
            self._in_flight,
            self._clock(),
            draining,
        )
        for plan in plans:
            try:
                connection = self._cluster.connect(Node(plan.node_id), step, FETCH_LANE)
                self._in_flight[plan.node_id] = (plan, self._send(connection, plan))
            except KafkaError as error:
                self._on_failed(plan, error)

    def _send(self, connection: Connection, plan: FetchPlan) -> Pending:
        by_name = NO_UUID in plan.names
        at_most = FIRST_VERSION_WITH_TOPIC_IDS - 1 if by_name else 0x7FFF
        version = connection.capabilities.version_of(FETCH, at_most)
        timeout_s = (self._settings.request_timeout_ms + self._settings.fetch_max_wait_ms) / 1000
        pending = connection.send(FETCH, plan.request, version=version, timeout_s=timeout_s)
        connection.read_ahead()
        return pending

    def _leader_of(self, partition: TopicPartition, deadline: Deadline) -> tuple[int, int] | None:
        try:
            found = self._cluster.partition(*partition, deadline)
        except KafkaError as error:
            self._on_no_leader(self._positions.of(partition), error)
            return None
        return found.leader, found.leader_epoch

    def _on_no_leader(self, state: PartitionState, error: KafkaError) -> None:
        now_s = self._clock()
        state.retry_at_s = now_s + self._settings.retry_backoff_max_ms / 1000
        if error.recovery is not Recovery.RETRY:
            raise error
        if error.code in _UNKNOWN:
            self._check_unknown(state, now_s)
        else:
            self._patience.failed(error)

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

    # -- waiting and receiving -----------------------------------------------------------------------------------------
    def connections(self) -> list[Connection]:
        return self._cluster.connections(FETCH_LANE)

    def read_on(self, ready: set[int]) -> bool:
        """Reads what has come; whether that was only a part of an answer, so that all there is to do is wait on."""
        mine = {fd: connection for connection in self.connections() for fd in connection.waits_for()}
        if not ready or not ready <= mine.keys():
            return False
        for fd in ready:
            mine[fd].progress()
        return not any(pending.done for _, pending in self._in_flight.values())

    def receive(self) -> None:
        """Takes the answers that have come. Raises what the program must decide about."""
        for connection in self.connections():
            connection.progress()
            connection.check_deadlines()
        for node_id, (plan, pending) in list(self._in_flight.items()):
            if pending.done:
                del self._in_flight[node_id]
                self._on_answer(plan, pending)

    def _on_answer(self, plan: FetchPlan, pending: Pending) -> None:
        try:
            answer = pending.result()
            if answer.error_code:
                raise error_of(answer.error_code, f"fetching from broker {plan.node_id}")
            troubles = self.fetcher.absorb(plan, answer)
        except DecodeError as error:
            self._on_failed(plan, error_of(ErrorCode.NETWORK_EXCEPTION, "fetching", str(error)))
        except PartitionError:
            raise
        except KafkaError as error:
            self._on_failed(plan, error)
        else:
            self._patience.succeeded()
            for trouble in troubles:
                self._on_trouble(trouble)

    def _on_failed(self, plan: FetchPlan, error: KafkaError) -> None:
        """The whole request failed: look for the leaders anew, a little later."""
        if error.recovery is not Recovery.RETRY:
            raise error
        self._patience.failed(error)
        for partition, asked in plan.asked.items():
            self._cluster.forget(Leader(*partition))
            asked.state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000

    def _on_trouble(self, trouble: Trouble) -> None:
        """One partition of an answer failed."""
        state, code, _ = trouble
        partition = state.topic_partition
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._on_out_of_range(trouble)
        elif code is ErrorCode.CORRUPT_MESSAGE:
            raise CorruptRecordError(
                f"{partition}: the broker cannot read its log at offset {state.fetch_offset}; its disk needs a look",
                code,
                partition,
                state.fetch_offset,
            )
        elif code.retriable:
            self._cluster.forget(Leader(*partition))
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000
            if code in _UNKNOWN:
                self._check_unknown(state, self._clock())
        else:
            error = error_of(code, f"fetching {partition} at offset {state.fetch_offset}")
            raise PartitionError(str(error), code, partition, state.fetch_offset)

    def _on_out_of_range(self, trouble: Trouble) -> None:
        state, code, data = trouble
        if state.position is not None and state.position < state.fetch_offset:
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000
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

    # -- where to start ------------------------------------------------------------------------------------------------
    def resolve(self, deadline: Deadline) -> None:
        """Finds the positions that are still unknown: the group's, else by auto.offset.reset. One try each."""
        now_s = self._clock()
        new = [state for state in self._positions if state.is_new and state.retry_at_s <= now_s]
        if new:
            self._start_from_committed(new, self._patience.step(deadline))
        resetting = {
            state.topic_partition: state.reset_to
            for state in self._positions
            if state.reset_to is not None and state.retry_at_s <= now_s
        }
        if resetting:
            self._reset(resetting, self._patience.step(deadline))

    def _start_from_committed(self, new: list[PartitionState], deadline: Deadline) -> None:
        group_id = self._settings.group_id
        partitions = [state.topic_partition for state in new]
        try:
            committed = (
                fetch_committed(self._cluster, group_id, partitions, self._settings.reads_committed, deadline)
                if group_id is not None
                else {}
            )
        except KafkaError as error:
            self._postpone(new, error)
            return
        for state in new:
            found = committed.get(state.topic_partition)
            if found is not None:
                state.seek(found.offset, found.leader_epoch)
            else:
                self._start_without_committed(state)

    def _start_without_committed(self, state: PartitionState) -> None:
        reset_to = _RESETS.get(self._settings.auto_offset_reset)
        if reset_to is None:
            raise NoOffsetError(
                f"group {self._settings.group_id!r} has no position for {state.topic_partition}, and "
                "auto.offset.reset=none leaves it to you: seek(), or commit a position first",
                None,
                state.topic_partition,
            )
        state.reset(reset_to)

    def _reset(self, resetting: dict[TopicPartition, int], deadline: Deadline) -> None:
        outcome = list_offsets(self._cluster, resetting, self._settings.isolation, deadline)
        for partition, found in outcome.found.items():
            self._positions.of(partition).seek(found.offset, found.leader_epoch)
        if outcome.found:
            self._patience.succeeded()
        for partition, error in outcome.failed.items():
            state = self._positions.of(partition)
            if error.code in _UNKNOWN:
                self._on_no_leader(state, error)
            else:
                self._postpone([state], error)

    def _postpone(self, states: Iterable[PartitionState], error: KafkaError) -> None:
        if error.recovery is not Recovery.RETRY:
            raise error
        if error.code is not ErrorCode.UNSTABLE_OFFSET_COMMIT:  # a transaction is being finished, as it should be
            self._patience.failed(error)
        for state in states:
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000

    def next_retry_s(self) -> float:
        """When a partition that failed may be tried again."""
        now_s = self._clock()
        return min((s.retry_at_s for s in self._positions if s.retry_at_s > now_s), default=float("inf"))


def wait_ready(connections: Iterable[Connection], timeout_s: float, wakeup: int) -> set[int]:
    """Waits until a connection can go on or `wakeup` is readable; the file descriptors that are ready."""
    poller = select.poll()
    for connection in connections:
        for fd, events in connection.waits_for().items():
            poller.register(fd, events)
    poller.register(wakeup, select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0.0, min(timeout_s, 3600.0)) * 1000)}
