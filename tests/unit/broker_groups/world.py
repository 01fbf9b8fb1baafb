"""A group coordinator whose time, log and member ids are in the test's hands."""

from __future__ import annotations

import asyncio
import heapq
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from semel.broker.coordinator_runtime import Outcome
from semel.broker.groups import Committer, GroupCoordinator, OffsetToCommit
from semel.broker.groups.classic_group import ClassicMember, GroupState
from semel.broker.groups.membership import Joiner
from semel.protocol.batch import BatchHeader, read_header
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    CONSUMER_SUBSCRIPTION,
    ConsumerProtocolSubscription,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)
from semel.protocol.partitioning import coordinator_partition
from semel.protocol.rows import Record, decode_batch, encode_batch
from semel.protocol.schema import NO_UUID
from semel.storage import StorageError
from tests.support.clock import ManualClock
from tests.support.waiting import PATIENCE_S

SETTINGS = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 6000,
    "group.max.session.timeout.ms": 1_800_000,
    "group.max.size": 2**31 - 1,
    "offset.metadata.max.bytes": 4096,
    "offsets.retention.minutes": 10_080,
    "offsets.retention.check.interval.ms": 600_000,
    "group.consumer.session.timeout.ms": 45_000,
    "group.consumer.heartbeat.interval.ms": 5000,
    "group.consumer.max.size": 2**31 - 1,
    "group.consumer.migration.policy": "bidirectional",
    "group.consumer.assignors": ("uniform", "range"),
    "group.version": 1,
    "group.coordinator.rebalance.protocols": ("classic", "consumer"),
}
SESSION_MS = 10_000
REBALANCE_MS = 60_000


class ManualTimers:
    """Timers that ring only when the test moves time."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._queue: list[tuple[float, int, SimpleNamespace]] = []
        self._numbers = count()

    def monotonic_ms(self) -> float:
        return self.now_ms

    def call_later(self, delay_ms: float, action: Callable[[], None]) -> SimpleNamespace:
        entry = SimpleNamespace(action=action)
        entry.cancel = lambda: setattr(entry, "action", None)
        heapq.heappush(self._queue, (self.now_ms + delay_ms, next(self._numbers), entry))
        return entry

    def due(self, until_ms: float) -> Iterator[Callable[[], None]]:
        """What rings up to a time, in order; `now_ms` is each ring's time while it is handled."""
        while self._queue and self._queue[0][0] <= until_ms:
            at_ms, _, entry = heapq.heappop(self._queue)
            if entry.action is not None:
                self.now_ms = max(self.now_ms, at_ms)
                yield entry.action

    @property
    def waiting(self) -> int:
        return sum(entry.action is not None for _, _, entry in self._queue)


class MemoryTopic:
    """An internal topic of record batches in memory. Durability can be held back, and writes can fail."""

    name = "__consumer_offsets"

    def __init__(self, partition_count: int = 4) -> None:
        self.partition_count = partition_count
        self.batches: dict[int, list[bytearray]] = defaultdict(list)
        self.held: list[asyncio.Future[None]] | None = None  # a list: durability is held back
        self.refuse: ErrorCode | None = None  # writes fail at once
        self.lose: ErrorCode | None = None  # writes fail when they should become durable
        self.writes = 0

    def partition_for(self, key: str) -> int:
        return coordinator_partition(key, self.partition_count)

    def append(
        self, partition: int, records: list[tuple[bytes | None, bytes | None]], producer: Any = None
    ) -> tuple[int, bool]:
        if self.refuse is not None:
            raise StorageError(self.refuse, "the test refuses this write")
        self.writes += 1
        base_offset = self._end(partition)
        producer_id, epoch = producer or (-1, -1)
        if self.lose is None:
            self.batches[partition].append(
                encode_batch(
                    [Record(base_offset + i, 1000, key, value) for i, (key, value) in enumerate(records)],
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    transactional=producer is not None,
                )
            )
        return base_offset, False

    def transaction_start(self, partition: int, producer: tuple[int, int]) -> int:
        """Of the open transaction, or of the one that the next write would begin."""
        start = None
        for header, _ in self.read(partition):
            if header.producer_id == producer[0]:
                start = None if header.is_control else header.base_offset if start is None else start
        return self._end(partition) if start is None else start

    def when_durable(self, partition: int, end_offset: int, on_outcome: Outcome) -> None:
        error = None if self.lose is None else StorageError(self.lose, "the test loses this write")
        if self.held is None:
            on_outcome(error)
            return
        gate = asyncio.get_running_loop().create_future()
        gate.add_done_callback(lambda _: on_outcome(error))
        self.held.append(gate)

    def mark(self, partition: int, producer_id: int, *, commit: bool) -> None:
        """Appends a marker, as the transaction coordinator does."""
        offset = self._end(partition)
        key, value = b"\0\0" + (b"\0\1" if commit else b"\0\0"), bytes(6)
        self.batches[partition].append(
            encode_batch(
                [Record(offset, 1000, key, value)],
                producer_id=producer_id,
                producer_epoch=0,
                transactional=True,
                control=True,
            )
        )

    def read(self, partition: int) -> Iterator[tuple[BatchHeader, list[Record]]]:
        for batch in self.batches[partition]:
            yield read_header(batch), list(decode_batch(batch).records)

    def records(self, partition: int) -> list[Record]:
        return [record for _, records in self.read(partition) for record in records]

    def _end(self, partition: int) -> int:
        return read_header(self.batches[partition][-1]).next_offset if self.batches[partition] else 0


class Topics:
    """The topics of the broker, as far as groups look at them."""

    def __init__(self) -> None:
        self._topics: dict[str, SimpleNamespace] = {}

    def create(self, name: str, partitions: int = 1) -> bytes:
        """The id of a topic, new or with a new number of partitions."""
        topic_id = name.encode().ljust(16, b"_")
        self._topics[name] = SimpleNamespace(name=name, id=topic_id, partitions=list(range(partitions)))
        return topic_id

    def delete(self, name: str) -> None:
        del self._topics[name]

    def get(self, name: str) -> SimpleNamespace | None:
        return self._topics.get(name)

    def by_id(self, topic_id: bytes) -> SimpleNamespace | None:
        return next((topic for topic in self if topic.id == topic_id), None)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self._topics.values())


class World:
    """A coordinator and short words for what clients do to it."""

    def __init__(self, **settings: int) -> None:
        self.settings: dict[str, Any] = {
            **SETTINGS,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        self.clock = ManualClock(1_700_000_000_000)
        self.timers = ManualTimers()
        self.log = MemoryTopic()
        self.topics = Topics()
        self.store: dict[str, dict[str, str]] = {}  # settings of groups
        self._ids = count(1)
        self.waiting: list[asyncio.Task[Any]] = []

    async def start(self) -> World:
        parts: Any = (self.settings, self.clock, self.topics, self.store, self.log)
        self.groups = GroupCoordinator(*parts, timers=self.timers, new_id=lambda: f"id{next(self._ids)}")
        await self.groups.start()
        return self

    async def crash_and_restart(self) -> None:
        """Nothing survives but the log."""
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        self.waiting.clear()
        self.timers = ManualTimers()
        await self.start()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def pass_time(self, ms: float) -> None:
        until_ms = self.timers.now_ms + ms
        self.clock.advance_ms(int(ms))
        for action in self.timers.due(until_ms):
            action()
            await self.settle()
        self.timers.now_ms = until_ms
        await self.settle()

    # -- what clients do -----------------------------------------------------------------------------------------------
    async def join(self, member_id: str = "", **changes: Any) -> asyncio.Task[JoinGroupResponse]:
        """A JoinGroup on its way; the task is done when it is answered."""
        version = changes.pop("version", 3)
        client = changes.pop("client", "c")
        topics, protocols = changes.pop("topics", ["t"]), changes.pop("protocols", ["range"])
        request = JoinGroupRequest(
            group_id=changes.pop("group", "g"),
            session_timeout_ms=changes.pop("session_timeout_ms", SESSION_MS),
            rebalance_timeout_ms=changes.pop("rebalance_timeout_ms", REBALANCE_MS),
            member_id=member_id,
            group_instance_id=changes.pop("instance", None),
            protocol_type=changes.pop("protocol_type", "consumer"),
            protocols=[JoinGroupRequestProtocol(name, subscription(topics)) for name in protocols],
        )
        assert not changes, changes
        return await self._ask(self.groups.membership.join(Joiner(request, version, client, "/127.0.0.1")))

    async def sync(
        self, joined: JoinGroupResponse, assignments: dict[str, bytes] | None = None, **changes: Any
    ) -> asyncio.Task[SyncGroupResponse]:
        request = SyncGroupRequest(
            group_id=changes.pop("group", "g"),
            generation_id=changes.pop("generation", joined.generation_id),
            member_id=joined.member_id,
            group_instance_id=changes.pop("instance", None),
            protocol_type=changes.pop("protocol_type", None),
            protocol_name=changes.pop("protocol_name", None),
            assignments=[SyncGroupRequestAssignment(*entry) for entry in (assignments or {}).items()],
        )
        assert not changes, changes
        return await self._ask(self.groups.membership.sync(request))

    async def _ask(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.waiting.append(task)
        await self.settle()
        return task

    def beat(self, joined: JoinGroupResponse, **changes: Any) -> ErrorCode:
        generation = changes.pop("generation", joined.generation_id)
        return self.groups.membership.heartbeat("g", generation, joined.member_id, changes.pop("instance", None))

    async def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        codes = await self.groups.membership.leave("g", [MemberIdentity(member_id, instance)])
        await self.settle()
        return codes[0]

    async def commit(self, offset: int, who: Committer | None = None, **changes: Any) -> ErrorCode:
        partition, group, topic = changes.pop("partition", 0), changes.pop("group", "g"), changes.pop("topic", "t")
        commits = [self._offset(topic, partition, offset)]
        return (await self.groups.commits.commit(group, who or Committer(), commits, **changes)).code

    async def txn_commit(self, offset: int, producer_id: int = 77, **changes: Any) -> ErrorCode:
        group = changes.pop("group", "g")
        commits = [self._offset("t", changes.pop("partition", 0), offset)]
        who = Committer(changes.pop("generation", -1), **changes)
        return (await self.groups.commits.commit(group, who, commits, producer=(producer_id, 0))).code

    def _offset(self, topic: str, partition: int, offset: int) -> OffsetToCommit:
        found = self.topics.get(topic)
        return OffsetToCommit(topic, partition, offset, topic_id=NO_UUID if found is None else found.id)

    def end_transaction(self, producer_id: int = 77, *, commit: bool, group: str = "g") -> None:
        partition = self.log.partition_for(group)
        self.log.mark(partition, producer_id, commit=commit)
        self.groups.on_marker(partition, producer_id, commit)

    # -- what is seen --------------------------------------------------------------------------------------------------
    @property
    def state(self) -> GroupState:
        group = self.groups.find("g")
        return GroupState.DEAD if group is None else group.state

    @property
    def members(self) -> dict[str, ClassicMember]:
        group = self.groups.find("g")
        assert group is not None
        return group.members

    def committed(self, group: str = "g", topic: str = "t", partition: int = 0) -> int | None:
        committed = self.groups.commits.committed(group, topic, partition)
        return None if committed is None else committed.offset

    # -- groups in a state ---------------------------------------------------------------------------------------------
    async def stable(self, members: int = 1, **changes: Any) -> list[JoinGroupResponse]:
        """A stable group; the first answer is the leader's."""
        joins = [await self.join(**changes) for _ in range(members)]
        await self.pass_time(0)
        first = [task.result() for task in joins if task.done()]
        if len(first) < members:  # the others made the first one join again
            joins += [await self.join(answer.member_id, **changes) for answer in first]
            await self.settle()
        answers = {task.result().member_id: task.result() for task in joins if task.done()}
        newest = max(answer.generation_id for answer in answers.values())
        current = sorted(
            (answer for answer in answers.values() if answer.generation_id == newest),
            key=lambda answer: answer.member_id != answer.leader,
        )
        assert len(current) == members, current
        shares = {answer.member_id: f"share of {answer.member_id}".encode() for answer in current}
        syncs = [await self.sync(answer, shares if answer is current[0] else None) for answer in current]
        await self.settle()
        assert all(task.result().error_code == 0 for task in syncs)
        assert self.state is GroupState.STABLE
        return current


def subscription(topics: list[str]) -> bytes:
    return b"\0\0" + CONSUMER_SUBSCRIPTION.encode(ConsumerProtocolSubscription(topics=topics), 0)


def in_world(**settings: int) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs an async test in a world of its own; its other parameters are pytest's."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**parameters: Any) -> None:
            async def play() -> None:
                world = await World(**settings).start()
                await asyncio.wait_for(test(world, **parameters), PATIENCE_S)

            asyncio.run(play())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        parameters = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
