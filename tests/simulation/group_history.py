"""What the consumers of a group got and committed, and what must hold for it.

Records may be read twice after a member was killed, expelled or could not commit; never skipped, never out of order,
and never from before a commit that was acknowledged. A commit whose response was lost may arrive late, behind a newer
one of the same generation, and take the group's offset back: the protocol has nothing against it.
"""

from __future__ import annotations

from semel.client.consumer.assigned_partitions import PartitionState
from semel.client.consumer.commits import Offsets
from semel.client.types import GroupMetadata, TopicPartition
from tests.simulation.world import World


class Reading:
    """What one consumer got of a partition, from an offset on."""

    def __init__(self, name: str, state: PartitionState, start: int) -> None:
        self.name = name
        self.state = state
        self.version = state.version
        self.start = self.position = self.fetched_to = start
        self.records: list[tuple[int, bytes | None]] = []


class GroupHistory:
    def __init__(self, world: World) -> None:
        self._world = world
        self.readings: dict[TopicPartition, list[Reading]] = {}
        self.visible: dict[TopicPartition, dict[int, bytes | None]] = {}
        self.deleted_to: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, tuple[int, int]] = {}  # acknowledged: offset, generation
        self._committed_s: dict[TopicPartition, float] = {}  # when that was
        self._acknowledged: dict[tuple[GroupMetadata, TopicPartition], int] = {}
        self._sent: dict[TopicPartition, int] = {}  # the highest offset that anyone tried to commit
        self._doubtful: dict[TopicPartition, list[tuple[int, int]]] = {}  # offset, generation
        self._owners: dict[tuple[TopicPartition, int], list[tuple[GroupMetadata, float]]] = {}  # and their first commit

    # --- commits ---

    def commit_sent(self, offsets: Offsets) -> None:
        for partition, at in offsets.items():
            self._sent[partition] = max(self._sent.get(partition, 0), at.offset)

    def commit_lost(self, offsets: Offsets, identity: GroupMetadata) -> None:
        for partition, at in offsets.items():
            self._doubtful.setdefault(partition, []).append((at.offset, identity.generation_id))

    def commit_acknowledged(self, offsets: Offsets, identity: GroupMetadata, sent_s: float) -> None:
        """A member that was frozen may learn of it late, when others have committed since."""
        for partition, at in offsets.items():
            self._check_owner(partition, identity, sent_s)
            lowest = self.lowest_start(partition)
            is_later = sent_s > self._committed_s.get(partition, sent_s)
            assert not is_later or lowest is None or at.offset >= lowest, (
                f"{identity} took the group back to {at.offset} of {partition}, but {lowest} was committed"
            )
            last = self._acknowledged.get((identity, partition), 0)
            assert at.offset >= last, f"{identity} committed {at.offset} of {partition} after {last}"
            self._acknowledged[identity, partition] = at.offset
            offset, generation = self._committed.get(partition, (-1, -1))
            if is_later:  # one that went back started where a late commit had taken the group
                offset = at.offset
            self._committed[partition] = (max(offset, at.offset), max(generation, identity.generation_id))
            self._committed_s[partition] = self._world.now_s

    def _check_owner(self, partition: TopicPartition, identity: GroupMetadata, sent_s: float) -> None:
        """One in each generation; a static member that was started again follows itself. One that was followed is
        refused. A generation that no member had an assignment of is not stored: after a restart of the broker its
        number comes again."""
        owners = self._owners.setdefault((partition, self._world.broker.restarts), [])
        for owner, acknowledged_s in owners:
            is_earlier = identity.generation_id < owner.generation_id
            assert not is_earlier or sent_s <= acknowledged_s, f"{partition}: {identity} could commit after {owner} had"
            if owner.generation_id == identity.generation_id and owner.member_id != identity.member_id:
                instances = {owner.group_instance_id, identity.group_instance_id}
                assert len(instances - {None}) == 1, (
                    f"{partition} has two owners in a generation: {owner} and {identity}"
                )
        if all(owner != identity for owner, _ in owners):
            owners.append((identity, self._world.now_s))

    def is_committed(self, partition: TopicPartition, offset: int) -> bool:
        return self._committed.get(partition, (-1, -1))[0] >= offset

    def lowest_start(self, partition: TopicPartition) -> int | None:
        """Where a consumer may start at the earliest; None: at the begin of the log."""
        if partition not in self._committed:
            return None
        offset, generation = self._committed[partition]
        late = [at for at, sent_in in self._doubtful.get(partition, ()) if sent_in >= generation]
        return min([offset, *late])

    # --- reading ---

    def started(self, name: str, state: PartitionState, lowest: int | None) -> None:
        """A consumer has found an offset to start from, or to go on from."""
        partition, start = state.topic_partition, state.position
        assert start is not None
        readings = self.readings.setdefault(partition, [])
        before = next((reading for reading in reversed(readings) if reading.state is state), None)
        if before is not None:
            assert before.position >= before.fetched_to, (
                f"{name} jumped from {before.position} to {start} of {partition}, and dropped what it had read ahead "
                f"up to {before.fetched_to}"
            )
            assert start >= before.position, f"{name} went back from {before.position} to {start} of {partition}"
        elif lowest is not None:
            assert start >= lowest, f"{name} starts {partition} at {start}, but {lowest} was committed"
        most = max(self._sent.get(partition, 0), self.deleted_to.get(partition, 0))
        assert start <= most, f"{name} starts {partition} at {start}, but no more than {most} was committed or deleted"
        self._world.note(f"{name} reads {partition} from {start}")
        readings.append(Reading(name, state, start))

    def fetched(self, state: PartitionState) -> None:
        reading = self._current(state)
        if reading is not None:
            reading.fetched_to = max(reading.fetched_to, state.fetch_offset)

    def delivered(self, state: PartitionState, records: list[tuple[int, bytes | None]]) -> None:
        reading = self._current(state)
        assert reading is not None, f"records of {state.topic_partition} came from nowhere"
        reading.records += records

    def moved(self, state: PartitionState) -> None:
        """The program has read up to its position, which may be behind records that it does not get to see."""
        reading = self._current(state)
        if reading is not None and state.position is not None:
            reading.position = state.position

    def revoked(self, name: str, state: PartitionState) -> None:
        """Given back, in good order."""
        reading = self._current(state)
        if reading is not None and reading.records:
            partition, next_offset = state.topic_partition, reading.records[-1][0] + 1
            is_deleted = self.deleted_to.get(partition, 0) >= next_offset  # nobody will read them again
            assert is_deleted or self.is_committed(partition, next_offset), (
                f"{name} gave {partition} back without a commit of {next_offset}"
            )

    def _current(self, state: PartitionState) -> Reading | None:
        for reading in reversed(self.readings.get(state.topic_partition, [])):
            if reading.state is state:
                return reading if reading.version == state.version else None
        return None

    # --- the end ---

    def saw(self, partition: TopicPartition, rows: list[tuple[int, bytes | None]]) -> None:
        """What an independent reader sees now."""
        self.visible.setdefault(partition, {}).update(rows)

    def is_drained(self) -> bool:
        return all(not rows or self.is_committed(place, max(rows) + 1) for place, rows in self.visible.items())

    def check(self) -> None:
        for partition, rows in self.visible.items():
            read: set[int] = set()
            for reading in self.readings.get(partition, []):
                expected = [row for row in sorted(rows.items()) if reading.start <= row[0] < reading.position]
                assert reading.records == expected, (
                    f"{reading.name} read {partition} from {reading.start} to {reading.position}: "
                    f"got {reading.records}, expected {expected}"
                )
                read |= {offset for offset, _ in reading.records}
            missed = [offset for offset in rows if offset not in read and offset >= self.deleted_to.get(partition, 0)]
            assert not missed, f"nobody read {missed} of {partition}"
