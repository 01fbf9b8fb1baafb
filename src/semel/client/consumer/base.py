"""What the consumers for threads and for asyncio have in common: all but how they wait.

Calls that may wait are coroutines over a `Network`; the rest returns at once. `Consumer` runs the coroutines with
`immediate`, `semel.aio.AsyncConsumer` awaits them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic
from uuid import UUID

import msgspec

from semel.client.cluster_calls import Connection
from semel.client.consumer.assigned_partitions import PartitionState, ResetTo
from semel.client.consumer.commits import Callback, PendingCommit
from semel.client.consumer.core import RebalanceListener, TopicSubscription
from semel.client.consumer.engine import ConsumerEngine, log
from semel.client.consumer.reader import ChunkReader, Iteration, RecordRun
from semel.client.errors import ClosedError, ConfigError, IllegalStateError, KafkaError, TimedOutError
from semel.client.group.offset_calls import fetch_committed, list_offsets_retried
from semel.client.group.offset_requests import EARLIEST, LATEST, FoundOffset
from semel.client.metrics import ConsumerMetrics
from semel.client.network import Network
from semel.client.serde import Deserializers, checked
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import (
    CommitFailedError,
    ConsumerRecord,
    DeserializationError,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    RebalanceError,
    TopicPartition,
    checked_offsets,
    checked_partitions,
    checked_topic,
    number_of,
    timestamp_ms,
)
from semel.protocol.errors import ErrorCode
from semel.protocol.schema import NO_UUID

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.client.consumer.decode import Form

# Keys are TopicPartition or plain pairs; a Mapping's key type says nothing of subclasses, hence both.
OffsetsToCommit = Mapping[TopicPartition, int | OffsetAndMetadata] | Mapping[tuple[str, int], int | OffsetAndMetadata]

NO_DESERIALIZERS = Deserializers()
CLOSE_TIMEOUT_S = 5.0
ITERATION_POLL_MS = 1000.0
_GENERATION_OVER = (ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.STALE_MEMBER_EPOCH)


class Woken(Exception):
    """wakeup() was called: the poll returns at once."""


class _CountedListener(RebalanceListener):
    """Counts the assignments, and passes everything on to the program's listener."""

    def __init__(self, listener: RebalanceListener) -> None:
        self.listener = listener
        self.count = 0

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        self.count += 1
        return self.listener.on_partitions_assigned(partitions)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        return self.listener.on_partitions_revoked(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        return self.listener.on_partitions_lost(partitions)


class ConsumerBase(Generic[Connection]):
    """A consumer without its driver."""

    # What may end a poll at a moment when nothing was taken out of what was fetched.
    _HARMLESS: tuple[type[BaseException], ...] = (KafkaError, Woken)

    def __init__(
        self,
        options: Mapping[str, Any] | ConsumerSettings | None,
        key_deserializer: Any,
        value_deserializer: Any,
        keywords: dict[str, Any],
        network: Callable[[ConsumerSettings], Network[Connection]],
    ) -> None:
        of_key, of_value = checked(key_deserializer=key_deserializer, value_deserializer=value_deserializer)
        self._deserializers = Deserializers(of_key, of_value)
        if isinstance(options, ConsumerSettings):
            self.settings = options.replace(**keywords)
        else:
            self.settings = ConsumerSettings.of(options, **keywords)
        self._engine = ConsumerEngine(self.settings, network(self.settings), self._commit_before_revoke)
        self._before_take: dict[PartitionState, int | None] = {}
        self._rebalances = _CountedListener(RebalanceListener())
        self._reader = ChunkReader(self._engine.fetcher, self.settings.reads_committed)
        self._next_auto_commit_s = time.monotonic() + self.settings.auto_commit_interval_ms / 1000
        self._woken = False
        self._iteration: Iteration | None = None
        self._postponed: KafkaError | None = None  # raised after records were taken, which are returned first

    # -- what to read --------------------------------------------------------------------------------------------------
    def subscribe(
        self,
        topics: Iterable[str] | str | re.Pattern[str],
        listener: RebalanceListener | None = None,
    ) -> None:
        """Joins the group for these topics, or for all that a compiled pattern matches. Partitions come with poll()."""
        self._engine.check_usable()
        if self.settings.group_id is None:
            raise ConfigError("subscribe() shares partitions in a group and needs group.id; without one, use assign()")
        if self._engine.member is None and len(self._engine.assigned):
            raise IllegalStateError("this consumer has partitions by assign(); unsubscribe() first")
        if isinstance(topics, re.Pattern):
            subscription = TopicSubscription(pattern=topics)
        else:
            subscription = TopicSubscription(map(checked_topic, [topics] if isinstance(topics, str) else topics))
            if not subscription.names:
                raise ConfigError("subscribe() needs at least one topic; unsubscribe() ends a subscription")
        self._rebalances.listener = listener or RebalanceListener()
        self._engine.subscribe(subscription, self._rebalances)

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Reads exactly these partitions, outside of group management."""
        self._engine.check_usable()
        if self._engine.member is not None:
            raise IllegalStateError("this consumer has subscribed; unsubscribe() before assign()")
        self._engine.assigned.assign(checked_partitions(partitions))

    async def _unsubscribe(self) -> None:
        """Leaves the group, or drops what was assigned."""
        self._engine.check_usable()
        deadline = Deadline(CLOSE_TIMEOUT_S)
        if self._engine.member is not None:
            await self._commit_before_leaving(deadline)
        await self._engine.leave_group("the consumer unsubscribed", deadline)
        self._engine.assigned.assign([])
        self._reader.clear()

    def assignment(self) -> set[TopicPartition]:
        return self._engine.assigned.partitions

    def subscription(self) -> set[str]:
        return set(self._engine.core.subscription.topics)

    # -- reading -------------------------------------------------------------------------------------------------------
    async def _poll_records(self, timeout_ms: float = 1000, max_records: int | None = None) -> list[ConsumerRecord]:
        """The next records, at most `max_records` (max.poll.records); an empty list when the timeout passes."""
        from semel.client.consumer.decode import ROWS

        limit = self.settings.max_poll_records if max_records is None else max_records
        _check_limits(max_records=limit)
        found: list[ConsumerRecord] = []
        with contextlib.suppress(Woken), self._nothing_lost():
            for run in self._runs(await self._poll(timeout_ms, ROWS, max_records=limit)):
                found += run.records
        return found

    def _runs(self, parts: list[tuple[TopicPartition, pa.Table]]) -> list[RecordRun]:
        """The rows of what was taken, deserialized. A record that cannot be, and all behind it, are given back; it is
        an error when it comes first."""
        from semel.client.consumer.decode import rows

        read: list[tuple[PartitionState, list[ConsumerRecord]]] = []
        error: DeserializationError | None = None
        for partition, table in parts:
            records = rows(partition, table)
            if self._deserializers != NO_DESERIALIZERS:
                records, error = self._deserializers.apply(records)
            read.append((self._engine.assigned.of(partition), records))
            if error is not None:
                break
        if error is not None:
            assert error.partition is not None
            self._give_back(parts[len(read) :], {error.partition: error.offset})
            if not any(records for _, records in read):
                raise error
        return [RecordRun(state, state.version, records) for state, records in read]

    def _give_back(self, parts: list[tuple[TopicPartition, pa.Table]], offsets: dict[TopicPartition, int]) -> None:
        """The next poll reads on at these offsets, and these parts again."""
        first = dict(offsets)
        for partition, table in parts:
            first.setdefault(partition, table.column("offset")[0].as_py())
        for partition, offset in first.items():
            self._engine.assigned.of(partition).seek(offset)

    async def _poll_table(
        self,
        timeout_ms: float = 1000,
        *,
        max_records: int | None = None,
        max_bytes: int | None = None,
        headers: bool = False,
        views: bool = False,
    ) -> pa.Table:
        """The next records as one Arrow table: topic, partition, offset, timestamp, key, value and, if wanted,
        headers. Without limits it is all that has been fetched; empty when the timeout passes. Keys and values are
        bytes: the deserializers are not applied.

        With `views`, keys and values are of Arrow's type binary_view and stay in the memory that they were received
        in: nothing is copied, and that memory lives as long as the table. `send_table` takes such columns.
        """
        from semel.client.consumer.decode import Form, joined

        _check_limits(max_records=max_records, max_bytes=max_bytes)
        form = Form(headers, views)
        with contextlib.suppress(Woken), self._nothing_lost():
            return joined(await self._poll(timeout_ms, form, max_records, max_bytes), form)
        return joined([], form)

    async def _next_iteration(self) -> Iteration:
        """The records of one more poll, for a loop over the consumer. Raises `Woken`, which ends the loop."""
        from semel.client.consumer.decode import ROWS

        with self._nothing_lost():
            try:
                parts = await self._poll(ITERATION_POLL_MS, ROWS, max_records=self.settings.max_poll_records)
            except ClosedError:
                if self._engine.closed:  # by its listener, say: the loop ends
                    raise Woken from None
                raise
            self._iteration = iteration = Iteration(self._runs(parts))
        return iteration

    @contextlib.contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """Around a poll. If it is interrupted (Ctrl-C), the next one reads again what this one was about to return, and
        everything that was fetched: it may have been on its way from one place to the next."""
        self._before_take = {}
        try:
            yield
        except self._HARMLESS:
            raise
        except BaseException:
            for state in self._engine.assigned:
                position = self._before_take.get(state, state.position)
                if position is not None:
                    state.seek(position)
            raise

    def wakeup(self) -> None:
        """Makes the poll() that waits, or else the next one, return at once, empty. May be called from another thread
        or task, or a signal handler."""
        self._woken = True
        self._engine.wake()

    async def _poll(
        self, timeout_ms: float, form: Form, max_records: int | None = None, max_bytes: int | None = None
    ) -> list[tuple[TopicPartition, pa.Table]]:
        engine = self._engine
        engine.check_usable()
        if engine.member is None and not len(engine.assigned):
            raise IllegalStateError("nothing to read: call subscribe() or assign() before poll()")
        self._end_iteration()
        if self._postponed is not None:
            error, self._postponed = self._postponed, None
            raise error
        self._auto_commit()
        deadline = Deadline(timeout_ms / 1000)
        await engine.network.give_way()
        while await engine.run_until(self._has_records, deadline):
            if self._woken:
                self._woken = False
                raise Woken
            self._before_take = self._reader.positions()
            if max_records is None and max_bytes is None:
                engine.fetching.send(draining=True)  # the next response comes while this one is decoded
                self._reader.decode_all(form)
            parts = self._reader.take(form, max_records, max_bytes)
            if parts:
                self._fetch_ahead()
                return parts
            if deadline.expired:
                break  # what is at hand, however much, may all belong to aborted transactions
        return []

    def _end_iteration(self) -> None:
        """A poll from outside the loop, or the loop's own next one: what the loop yielded has been processed."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.give_back()

    def _fetch_ahead(self) -> None:
        """Before the program gets to work on what it is given."""
        try:
            self._engine.fetching.send()
        except KafkaError as error:
            self._postponed = error

    def _has_records(self) -> bool:
        if self._woken:
            return True
        return self._engine.core.is_delivering and self._reader.has_records

    # -- positions -----------------------------------------------------------------------------------------------------
    async def _position(self, partition: tuple[str, int], timeout_ms: float | None = None) -> int:
        """The offset of the next record that poll() would return."""
        state = self._state(partition)
        deadline = self._deadline(timeout_ms)
        with self._nothing_lost():
            await self._engine.run_until(lambda: state.is_ready, deadline)
        if state.position is None:
            raise TimedOutError(
                f"the position of {state.topic_partition} was not known within {deadline.total_s:.3g} s"
            )
        unread = self._iteration.unread() if self._iteration is not None else {}
        return unread.get(state.topic_partition, state.position)

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Goes on at this offset."""
        at = number_of(offset)
        if not 0 <= at < 2**63:
            raise ConfigError(f"cannot seek to offset {offset!r}; use seek_to_beginning() or seek_to_end()")
        self._state(partition).seek_by_program(at)

    def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Goes to the first record of these partitions (none given: all); looked up by the next poll()."""
        for state in self._states(partitions):
            state.reset(ResetTo.EARLIEST)

    def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        """Goes past the last record that can be read."""
        for state in self._states(partitions):
            state.reset(ResetTo.LATEST)

    def seek_to_committed(self, *partitions: tuple[str, int]) -> None:
        """Goes back to the group's committed offsets, as after an aborted transaction."""
        self._need_group("seek_to_committed()")
        for state in self._states(partitions):
            state.forget()

    def pause(self, *partitions: tuple[str, int]) -> None:
        """poll() returns nothing of these until resume(); the place in the group is kept."""
        states = self._states(partitions)
        if self._iteration is not None:
            self._iteration.give_back({state.topic_partition for state in states})
        for state in states:
            state.paused = True

    def resume(self, *partitions: tuple[str, int]) -> None:
        for state in self._states(partitions):
            state.paused = False

    def paused(self) -> set[TopicPartition]:
        return {state.topic_partition for state in self._engine.assigned if state.paused}

    async def _lag(self, timeout_ms: float | None = None) -> dict[TopicPartition, int]:
        """How many offsets each assigned partition is behind the end of what can be read, from the brokers."""
        deadline = self._deadline(timeout_ms)
        partitions = sorted(self._engine.assigned.partitions)
        ends = await self._end_offsets(partitions, timeout_ms)
        lags = {}
        for partition in partitions:
            lags[partition] = max(0, ends[partition] - await self._position(partition, deadline.remaining_s() * 1000))
        return lags

    def current_lag(self, partition: tuple[str, int]) -> int | None:
        """How many offsets a partition is behind the end that its last fetch response named. Sends no request; None
        before the first response."""
        return self._lag_of(self._state(partition))

    def _lag_of(self, state: PartitionState) -> int | None:
        end, position = state.end_offset(self.settings.reads_committed), state.position
        return None if end is None or position is None else max(0, end - position)

    def metrics(self) -> ConsumerMetrics:
        """What it has read so far, and its lag, without a request. Any thread may call it, also after close()."""
        engine = self._engine
        lags = [(state.topic_partition, self._lag_of(state)) for state in list(engine.assigned)]
        return ConsumerMetrics(
            client_id=self.settings.client_id,
            group_id=self.settings.group_id,
            records_consumed_total=self._reader.records_total,
            bytes_consumed_total=self._reader.bytes_total,
            fetch_total=engine.fetching.requests_total,
            fetch_error_total=engine.fetching.failed_total,
            fetches_in_flight=0 if engine.closed else engine.fetching.in_flight_count,
            commit_total=engine.core.commits.succeeded_total,
            commit_error_total=engine.core.commits.failed_total,
            rebalance_total=self._rebalances.count,
            records_lag={partition: lag for partition, lag in lags if lag is not None},
        )

    # -- offsets of the log --------------------------------------------------------------------------------------------
    async def _beginning_offsets(
        self, partitions: Iterable[tuple[str, int]], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        return await self._offsets_at(partitions, EARLIEST, timeout_ms)

    async def _end_offsets(
        self, partitions: Iterable[tuple[str, int]], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """Where the readable part of each log ends: before the first open transaction under read_committed."""
        return await self._offsets_at(partitions, LATEST, timeout_ms)

    async def _settled_ends(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, int]:
        """The end offsets once all that is committed is visible, for who reads up to them and no further."""
        from semel.client.admin.calls import AdminCalls

        partitions = [*partitions]
        if self.settings.reads_committed:
            await AdminCalls(self.settings, self._engine.calls).await_markers(partitions)
        return await self._end_offsets(partitions)

    async def _offsets_for_times(
        self,
        times: Mapping[TopicPartition, int | datetime] | Mapping[tuple[str, int], int | datetime],
        timeout_ms: float | None = None,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after a time (milliseconds since 1970, or a datetime with a time zone) in each
        partition; None if there is none."""
        self._engine.check_usable()
        at_ms = [timestamp_ms(at, "a time for offsets_for_times()") for at in times.values()]
        wanted = dict(zip(checked_partitions(times), at_ms, strict=True))
        found = await self._list_offsets(wanted, timeout_ms)
        return {
            partition: OffsetAndTimestamp(at.offset, at.timestamp) if at.offset >= 0 else None
            for partition, at in found.items()
        }

    async def _offsets_at(
        self, partitions: Iterable[tuple[str, int]], where: int, timeout_ms: float | None
    ) -> dict[TopicPartition, int]:
        self._engine.check_usable()
        wanted = dict.fromkeys(checked_partitions(partitions), where)
        found = await self._list_offsets(wanted, timeout_ms)
        return {partition: at.offset for partition, at in found.items()}

    async def _list_offsets(
        self, wanted: dict[TopicPartition, int], timeout_ms: float | None
    ) -> dict[TopicPartition, FoundOffset]:
        deadline = self._deadline(timeout_ms)
        return await list_offsets_retried(self._engine.calls, wanted, self.settings.isolation, deadline)

    async def _partitions_for(self, topic: str, timeout_ms: float | None = None) -> set[int]:
        self._engine.check_usable()
        return set(await self._engine.calls.partitions(topic, self._deadline(timeout_ms).total_s))

    async def _topic_ids(self, topics: Iterable[str], timeout_ms: float | None = None) -> dict[str, UUID]:
        """The ids of topics: another one for each topic that was created with a name. Zero where a broker has none."""
        self._engine.check_usable()
        deadline, calls = self._deadline(timeout_ms), self._engine.calls
        for topic in (names := set(topics)):
            await calls.partitions(topic, deadline.remaining_s())
        return {topic: UUID(bytes=(await calls.topic(topic, deadline)).topic_id) for topic in names}

    def fetched_topic_ids(self, partitions: Iterable[TopicPartition]) -> dict[str, UUID]:
        """The ids of the topics that were fetched from, as far as they are known."""
        found = {place.topic: self._engine.assigned.of(place).topic_id for place in partitions}
        return {topic: UUID(bytes=topic_id) for topic, topic_id in found.items() if topic_id != NO_UUID}

    # -- commits -------------------------------------------------------------------------------------------------------
    async def _commit(
        self,
        offsets: OffsetsToCommit | None = None,
        timeout_ms: float | None = None,
    ) -> None:
        """Commits offsets (all of this consumer, or the given ones) and waits until the group has them, and those of
        every earlier commit_async()."""
        wanted = self._to_commit(offsets)
        if not wanted:
            return
        identity = self._identity()
        if self._engine.member is not None and self._engine.member.is_rebalancing:
            raise RebalanceError("the group is being rebalanced; call poll() to take part, then commit")
        try:
            await self._engine.commits.commit(identity, wanted, self._deadline(timeout_ms))
        except KafkaError as error:
            raise _commit_error(error) from error
        self._engine.commits.raise_callback_error()

    def commit_async(
        self,
        offsets: OffsetsToCommit | None = None,
        callback: Callback | None = None,
    ) -> None:
        """Sends a commit and returns; `callback(offsets, error or None)` is called by a later poll(), commit() or
        close()."""
        wanted = self._to_commit(offsets)
        if wanted:
            timeout_s = self.settings.request_timeout_ms / 1000
            self._engine.commits.send(self._identity(), wanted, callback, timeout_s)

    async def _committed(
        self, partitions: Iterable[tuple[str, int]] | None = None, timeout_ms: float | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The group's committed offsets of these partitions (default: the assigned ones), without those that have none.

        Under read_committed it waits for transactions that are about to change them."""
        self._engine.check_usable()
        group_id = self._need_group("committed()")
        wanted = self.assignment() if partitions is None else set(checked_partitions(partitions))
        if not wanted:
            return {}
        calls, stable, deadline = self._engine.calls, self.settings.reads_committed, self._deadline(timeout_ms)
        return await calls.retry(
            lambda: fetch_committed(calls, group_id, sorted(wanted), stable, deadline),
            f"reading the committed offsets of group {group_id!r}",
            deadline,
        )

    def group_metadata(self) -> GroupMetadata:
        """This consumer's identity in its group, for `producer.send_offsets_to_transaction`, which needs
        enable.auto.commit=false."""
        return msgspec.structs.replace(self._identity(), commits_itself=self.settings.enable_auto_commit)

    def _identity(self) -> GroupMetadata:
        """The identity that commits."""
        self._engine.check_usable()
        group_id = self._need_group("a commit")
        return self._engine.member.identity() if self._engine.member is not None else GroupMetadata(group_id)

    def consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets after the records that poll() returned or an iteration yielded: what a commit without arguments
        commits."""
        return self._offsets_before(self._iteration.unread() if self._iteration is not None else {})

    def _processed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What an automatic commit may cover. An offset of a topic that was deleted would be taken for one of the next
        topic of that name, whose first records nobody would read."""
        offsets = self._offsets_before(self._iteration.unprocessed() if self._iteration is not None else {})
        return {place: offset for place, offset in offsets.items() if not self._engine.assigned.of(place).is_gone}

    def _offsets_before(self, unread: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndMetadata]:
        return {
            partition: OffsetAndMetadata(unread[partition]) if partition in unread else OffsetAndMetadata(at, "", epoch)
            for partition, (at, epoch) in self._engine.assigned.consumed().items()
        }

    def _to_commit(self, offsets: OffsetsToCommit | None) -> dict[TopicPartition, OffsetAndMetadata]:
        self._engine.check_usable()
        self._need_group("a commit")
        if offsets is None:
            return self.consumed()
        return checked_offsets(offsets)

    def _auto_commit(self) -> None:
        if not self.settings.enable_auto_commit or self.settings.group_id is None:
            return
        if time.monotonic() >= self._next_auto_commit_s and not len(self._engine.commits):
            self._next_auto_commit_s = time.monotonic() + self.settings.auto_commit_interval_ms / 1000
            if self._engine.member is None or self._engine.member.may_commit:
                self.commit_async(self._processed())

    def _commit_before_revoke(self) -> PendingCommit | None:
        """Starts the automatic commit that partitions wait for before they are given back; None: there is none."""
        wanted = self._processed() if self.settings.enable_auto_commit else {}
        if not wanted:
            return None
        return self._engine.commits.send(self._identity(), wanted, _warn, CLOSE_TIMEOUT_S, retried=True)

    async def _commit_before_leaving(self, deadline: Deadline) -> None:
        wanted = self._processed() if self.settings.enable_auto_commit and self.settings.group_id is not None else {}
        if not wanted:
            return
        try:
            await self._engine.commits.commit(self._identity(), wanted, deadline)
        except KafkaError as error:
            _warn(wanted, error)

    # -- the end -------------------------------------------------------------------------------------------------------
    async def _close(self, timeout_ms: float | None = None) -> None:
        """Commits (with enable.auto.commit), gives partitions back, leaves the group, closes. May be called twice.

        All of that takes no longer than the timeout (5 s); what a broker did not confirm by then is left undone."""
        engine = self._engine
        if engine.closed:
            return
        if engine.network.is_over:
            engine.close()  # in a forked child, say: the parent's place in the group is not ours to give up
            return
        engine.check_usable()
        try:
            deadline = Deadline(CLOSE_TIMEOUT_S if timeout_ms is None else timeout_ms / 1000)
            await engine.commits.wait(lambda: not len(engine.commits), deadline)
            await self._commit_before_leaving(deadline)
            await engine.leave_group("the consumer was closed", deadline)
        finally:
            engine.close()
        engine.commits.raise_callback_error()

    # -- small things --------------------------------------------------------------------------------------------------
    def _deadline(self, timeout_ms: float | None) -> Deadline:
        return Deadline((self.settings.default_api_timeout_ms if timeout_ms is None else timeout_ms) / 1000)

    def _state(self, partition: tuple[str, int]) -> PartitionState:
        self._engine.check_usable()
        return self._engine.assigned.of(checked_partitions([partition])[0])

    def _states(self, partitions: Iterable[tuple[str, int]]) -> list[PartitionState]:
        self._engine.check_usable()
        named = [self._engine.assigned.of(partition) for partition in checked_partitions(partitions)]
        return named or list(self._engine.assigned)

    def _need_group(self, what: str) -> str:
        if self.settings.group_id is None:
            raise ConfigError(f"{what} needs group.id")
        return self.settings.group_id


def _check_limits(**limits: int | None) -> None:
    """What a poll may return at most: with nothing to return it would never end."""
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"{name} is {limit}; it must be at least 1")


def _commit_error(error: KafkaError) -> KafkaError:
    """What a refused commit means to the program."""
    if error.code is ErrorCode.REBALANCE_IN_PROGRESS:
        return RebalanceError(f"{error}; call poll() to take part", error.code)
    if error.code in _GENERATION_OVER and not isinstance(error, TimedOutError):
        return CommitFailedError(
            f"{error}. The group went on without this consumer: it did not poll() within max.poll.interval.ms or "
            "its heartbeats did not arrive within the session timeout. Records since the last commit will be read "
            "again by the new owners of the partitions",
            error.code,
        )
    return error


def _warn(_: object, error: KafkaError | None) -> None:
    if error is not None:
        log.warning("offsets were not committed before partitions were given back: %s", error)
