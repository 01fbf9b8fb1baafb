"""Offsets of groups: OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete, and the end of transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from semel.broker.groups.classic_group import CONSUMER, Act, Group, GroupError, GroupEvent, GroupState
from semel.broker.groups.consumer.model import ConsumerGroup, ConsumerGroupState
from semel.broker.groups.rebalance import Rebalance
from semel.broker.groups.records import NO_TIME, CommittedOffset, OffsetKey, OffsetRecord
from semel.broker.groups.state import Core, TopicOffsets
from semel.broker.turns import MANY, Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.schema import NO_UUID
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.broker.topics import Topic
    from semel.protocol.messages.offsets import OffsetCommitRequestPartition
    from semel.protocol.messages.transactions import TxnOffsetCommitRequestPartition

NO_GENERATION = -1
_LAST_MS = 2**63 - 1
GROUP_ID_NOT_FOUND_FROM = 9  # OffsetCommit: older clients expect ILLEGAL_GENERATION for a group that is not there


class Committer(NamedTuple):
    """The client that commits. Without generation, member and instance it does not use group management."""

    generation: int = NO_GENERATION
    member_id: str = ""
    group_instance_id: str | None = None

    @property
    def is_simple(self) -> bool:
        return self.generation < 0 and not self.member_id and self.group_instance_id is None


class OffsetToCommit(NamedTuple):
    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: bytes = NO_UUID

    @classmethod
    def of(cls, topic: Topic, part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition) -> OffsetToCommit:
        return cls(
            topic.name,
            part.partition_index,
            part.committed_offset,
            part.committed_leader_epoch,
            part.committed_metadata or "",
            topic.id,
        )


class CommitOutcome(NamedTuple):
    """How a commit ended: the first ones of its offsets are stored, the others are not."""

    stored: int
    code: ErrorCode  # of the others


class Commits:
    """The requests about offsets."""

    def __init__(self, core: Core, rebalance: Rebalance) -> None:
        self._core = core
        self._rebalance = rebalance
        self._writing: Counter[str] = Counter()  # groups: writes of offsets that are not durable yet

    # -- committing ----------------------------------------------------------------------------------------------------
    async def commit(
        self,
        group_id: str,
        who: Committer,
        commits: Sequence[OffsetToCommit],
        *,
        version: int = GROUP_ID_NOT_FOUND_FROM,
        retention_ms: int = NO_TIME,
        producer: tuple[int, int] | None = None,
    ) -> CommitOutcome:
        """Stores offsets. Returns when they are durable, or with the error for those that are not. With `producer` (id,
        epoch) inside its transaction, where they wait for its marker.

        Very many are written in several batches, so that others are served in between; whether the caller may commit is
        checked for each. INVALID_TXN_STATE: the transaction ended in between; what is left must not begin another one.
        """
        turns = Turns()
        stored = 0
        began = None
        for some in _in_batches(commits):
            start = self._transaction_start(group_id, producer)
            if began not in (None, start):
                return CommitOutcome(stored, ErrorCode.INVALID_TXN_STATE)
            began = start
            code = await self._commit(group_id, who, some, version, retention_ms, producer)
            if code is not ErrorCode.NONE:
                return CommitOutcome(stored, code)
            stored += len(some)
            await turns.next()
        return CommitOutcome(stored, ErrorCode.NONE)

    def _transaction_start(self, group_id: str, producer: tuple[int, int] | None) -> int | None:
        """Where the producer's transaction began, or will begin, in the group's log. None: no producer, or no log."""
        try:
            partition = self._core.partition_of(group_id)
            return None if producer is None else self._core.runtime.topic.transaction_start(partition, producer)
        except StorageError:  # the write will say so
            return None

    async def _commit(
        self,
        group_id: str,
        who: Committer,
        commits: Sequence[OffsetToCommit],
        version: int,
        retention_ms: int,
        producer: tuple[int, int] | None,
    ) -> ErrorCode:
        is_plain = producer is None
        try:
            group, consumers = self._core.groups.get(group_id), self._core.consumer_groups.get(group_id)
            if group is not None:
                self._check_classic(group, who, is_plain)
            elif consumers is not None:
                _check_consumer(consumers, who, commits, version if is_plain else None)
            elif who.generation >= 0:
                knows_code = is_plain and version >= GROUP_ID_NOT_FOUND_FROM
                raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND if knows_code else ErrorCode.ILLEGAL_GENERATION)
            now_ms = self._core.clock.now_ms()
            expire_ms = NO_TIME if retention_ms == NO_TIME else min(now_ms + retention_ms, _LAST_MS)
            return await self._write(group_id, _records(group_id, commits, now_ms, expire_ms), producer)
        except GroupError as error:
            return error.code

    def _check_classic(self, group: Group, who: Committer, is_plain: bool) -> None:
        if who.is_simple or (who.generation < 0 and group.state is GroupState.EMPTY):
            group.decide(GroupEvent.COMMIT_SIMPLE if is_plain else GroupEvent.TXN_COMMIT_SIMPLE)
            return
        if group.state is not GroupState.DEAD:
            group.check_member(who.member_id, who.group_instance_id)
            group.check_generation(who.generation)
        if group.decide(GroupEvent.COMMIT if is_plain else GroupEvent.TXN_COMMIT).act is Act.ACCEPT_ALIVE:
            self._rebalance.alive(group.members[who.member_id])

    async def _write(
        self, group_id: str, records: list[OffsetRecord], producer: tuple[int, int] | None = None
    ) -> ErrorCode:
        if not records:
            return ErrorCode.NONE
        self._writing[group_id] += 1
        try:
            return await self._core.runtime.commit(self._core.partition_of(group_id), records, producer=producer)
        finally:
            self._writing[group_id] -= 1
            if not self._writing[group_id]:
                del self._writing[group_id]

    def is_writing(self, group_id: str) -> bool:
        """Whether offsets of the group are on their way to the log."""
        return group_id in self._writing

    def check_reader(self, group_id: str, member_id: str | None, epoch: int) -> None:
        """A member of a consumer group that fetches offsets must be at its epoch (OffsetFetch 9+)."""
        consumers = self._core.consumer_groups.get(group_id)
        if consumers is not None and (member_id is not None or epoch >= 0):
            _check_member_epoch(consumers, member_id or "", epoch)

    # -- reading -------------------------------------------------------------------------------------------------------
    async def settled(self, group_id: str) -> None:
        """Returns when every offset of the group that was accepted so far can be seen.

        A consumer that takes over a partition fetches stable offsets. It must see what the former owner committed,
        also if that is written and not yet durable.
        """
        await self._core.runtime.settled(self._core.partition_of(group_id))

    def committed(self, group_id: str, topic: str, partition: int, topic_id: bytes = NO_UUID) -> CommittedOffset | None:
        """A committed offset. One of an earlier topic with the same name is none."""
        found = self._core.offsets.get(OffsetKey(group_id, topic, partition))
        is_other = found is not None and NO_UUID not in (found.topic_id, topic_id) and found.topic_id != topic_id
        return None if is_other else found

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may change this offset (UNSTABLE_OFFSET_COMMIT)."""
        return self._core.offsets.is_pending(OffsetKey(group_id, topic, partition))

    def all_of(self, group_id: str) -> TopicOffsets:
        return self._core.offsets.of_group(group_id)

    # -- deleting ------------------------------------------------------------------------------------------------------
    async def delete(self, group_id: str, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], ErrorCode]:
        """Deletes offsets (topic, partition) of topics that the group is not subscribed to."""
        if not group_id:
            raise GroupError(ErrorCode.INVALID_GROUP_ID)
        group, consumers = self._core.groups.get(group_id), self._core.consumer_groups.get(group_id)
        if group is not None:
            is_consumer = group.protocol_type == CONSUMER
            group.decide(GroupEvent.DELETE_OFFSETS if is_consumer else GroupEvent.DELETE_OFFSETS_OPAQUE)
            subscribes = group.subscribes
        elif consumers is not None:
            subscribes = consumers.subscribes
        else:
            raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND)
        codes = {
            (topic, partition): ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if subscribes(topic) else ErrorCode.NONE
            for topic, partition in wanted
        }
        slots = [OffsetKey(group_id, *where) for where, code in codes.items() if code is ErrorCode.NONE]
        error = await self.write_tombstones(group_id, [slot for slot in slots if self._exists(slot)])
        if error is not ErrorCode.NONE:
            raise GroupError(error)
        return codes

    async def write_tombstones(self, group_id: str, slots: Sequence[OffsetKey]) -> ErrorCode:
        """Deletes offsets of one group."""
        return await self._write(group_id, [OffsetRecord(slot, None) for slot in slots])

    def _exists(self, slot: OffsetKey) -> bool:
        return self._core.offsets.get(slot) is not None or self._core.offsets.is_pending(slot)


def _records(group_id: str, commits: Sequence[OffsetToCommit], now_ms: int, expire_ms: int) -> list[OffsetRecord]:
    return [
        OffsetRecord(
            OffsetKey(group_id, commit.topic, commit.partition),
            CommittedOffset(commit.offset, commit.leader_epoch, commit.metadata, now_ms, expire_ms, commit.topic_id),
        )
        for commit in commits
    ]


def _in_batches(commits: Sequence[OffsetToCommit]) -> Iterator[Sequence[OffsetToCommit]]:
    """At least one, also of no offsets: the caller is checked all the same."""
    for at in range(0, max(len(commits), 1), MANY):
        yield commits[at : at + MANY]


def _check_consumer(
    group: ConsumerGroup, who: Committer, commits: Sequence[OffsetToCommit], version: int | None
) -> None:
    """Whether a client may commit to a group of the consumer protocol; no version: inside a transaction.

    A transaction of a client that names no member is let in as it is in a classic group. A member may be behind its
    epoch as long as it has had the partitions since then (KIP-1251): a rebalance that leaves them to it does not refuse
    what it commits meanwhile.
    """
    if who.generation < 0 and group.state is ConsumerGroupState.EMPTY:
        return
    if version is None and who.is_simple:
        return
    member = group.subscriptions.get(who.member_id)
    is_classic = member is not None and member.classic is not None
    is_known = who.member_id in group.current and not is_classic
    if version is not None and is_known and version < GROUP_ID_NOT_FOUND_FROM:
        raise GroupError(ErrorCode.UNSUPPORTED_VERSION)
    current = group.current.get(who.member_id)
    if current is not None and who.generation < current.epoch:
        firsts = [current.since.get((each.topic_id, each.partition)) for each in commits]
        if all(first is not None and first <= who.generation for first in firsts):
            return
    try:
        _check_member_epoch(group, who.member_id, who.generation)
    except GroupError as error:
        if (version is None or is_classic) and error.code is ErrorCode.STALE_MEMBER_EPOCH:
            raise GroupError(ErrorCode.ILLEGAL_GENERATION) from error
        raise


def _check_member_epoch(group: ConsumerGroup, member_id: str, epoch: int) -> None:
    current = group.current.get(member_id)
    if current is None:
        raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id} is no member of group {group.group_id}")
    if current.epoch != epoch:
        raise GroupError(ErrorCode.STALE_MEMBER_EPOCH, f"epoch {epoch}, {member_id} is at {current.epoch}")
