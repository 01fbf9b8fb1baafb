"""Modes of `semel.process` whose sink keeps the offsets beside the data: what databases and folders share.

The sink decides where to read on: at the start, after every rebalance and after every error. An instance that gets
partitions claims them in the sink, which shuts out the last owner. The group gets the offsets afterwards, for lag tools
only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from semel.client.consumer import Consumer
from semel.client.errors import KafkaError
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.process_modes import Mode
from semel.patterns.process_output import Emitter, RecordError
from semel.sinks.claims import Claim, Claims

log = logging.getLogger("semel.process")


class SinkWords(NamedTuple):
    """How a sink is called in errors."""

    thing: str  # database, folder
    offsets: str  # where its offsets are
    start_over: str  # what to do to begin anew
    dead_letters: str  # the option that keeps bad records
    mismatch: type[KafkaError]  # raised when its offsets do not fit the group's or the topic's


class ExternalMode(Mode):
    has_state = True  # offsets, for each partition
    words: SinkWords

    def __init__(
        self, consumer: Consumer, emitter: Emitter, application_id: str, instance: str | None, when_behind: str
    ) -> None:
        self.consumer = consumer
        self.emitter = emitter
        self.begun: dict[TopicPartition, int] = {}
        self.failed: BaseException | None = None
        self.records_out = self.dead_letters = self.duplicates = self.commits = self.aborts = 0
        self.holder = f"{instance or 'any'} on {socket.gethostname()}, process {os.getpid()}"
        self._application_id = application_id
        self._when_behind = when_behind
        self._claims: Claims = {}
        self._topic_ids: dict[str, UUID] = {}

    # -- what a sink does ----------------------------------------------------------------------------------------------
    def _take_partitions(self, partitions: list[TopicPartition]) -> Claims:
        """Makes this instance their owner. Raises if an offset is of another topic of that name."""
        raise NotImplementedError

    def _read_claims(self, partitions: Iterable[TopicPartition]) -> Claims:
        raise NotImplementedError

    # -- partitions ----------------------------------------------------------------------------------------------------
    def assigned(self, partitions: list[TopicPartition]) -> None:
        self._claim(partitions)

    def released(self, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._claims.pop(partition, None)

    def _claim(self, partitions: Iterable[TopicPartition]) -> None:
        """Makes this instance their owner and goes to what the sink says."""
        wanted = list(partitions)
        if not wanted:
            return
        self._topic_ids |= self.consumer.topic_ids(partition.topic for partition in wanted)
        claims = self._take_partitions(wanted)
        committed = self.consumer.committed(wanted)
        ends = self.consumer.end_offsets(wanted)
        for partition in wanted:
            behind = committed.get(partition)
            start = self._start_of(
                partition, claims[partition].next_offset, None if behind is None else behind.offset, ends[partition]
            )
            if start is None:
                self.consumer.seek_to_beginning(partition)
            elif start >= 0:
                self.consumer.seek(partition, start)
        self._claims |= claims

    def _start_of(self, partition: TopicPartition, mine: int | None, group: int | None, end: int) -> int | None:
        """Where to read on; None: at the beginning; -1: wherever a new group would. Raises if nobody can know."""
        name, words = f"{partition.topic}-{partition.partition}", self.words
        if mine is not None and mine > end:
            raise words.mismatch(
                f"{words.offsets} has {name} at {mine}, but the topic ends at {end}: the topic was deleted and "
                f"created anew, or restored. Correct the topic's name, or {words.start_over} to apply the new topic "
                "from its beginning"
            )
        if group is None or (mine is not None and group <= mine):
            return -1 if mine is None else mine
        if self._when_behind == "refuse":
            raise words.mismatch(
                f"{name}: the group {self._application_id!r} has committed offset {group}, {words.offsets} has "
                f"{'none' if mine is None else mine}: the {words.thing} is older than the topics, as after a restore "
                "from a backup, or it is another one. Restore a newer backup; or say when_behind='reprocess' to apply "
                f"the records from the {words.thing}'s offset on again, or when_behind='skip' to go on at the group's"
            )
        return group if self._when_behind == "skip" else mine

    # -- work ----------------------------------------------------------------------------------------------------------
    def _ended(self) -> dict[TopicPartition, int]:
        """The offsets after all that was taken; the ids of their topics are known."""
        offsets = {partition: at.offset for partition, at in self._progress().items()}
        self._topic_ids |= self.consumer.fetched_topic_ids(offsets)  # of a topic that was created anew meanwhile
        return offsets

    def _refused(self, record: ConsumerRecord, reason: str) -> RecordError:
        return RecordError(
            f"{record.topic}-{record.partition} at offset {record.offset}: {reason}. Nothing of its transaction "
            "was written. Correct it, or say what happens to such records with on_error= or "
            f"{self.words.dead_letters}",
            None,
            record.topic,
            record.partition,
            record.offset,
        )

    def _tell_group(self, offsets: dict[TopicPartition, int]) -> None:
        def told(_: object, error: KafkaError | None) -> None:
            if error is not None:
                log.debug("the group does not have the offsets yet: %s", error)

        try:
            self.consumer.commit_async(
                {partition: OffsetAndMetadata(offset) for partition, offset in offsets.items()}, told
            )
        except KafkaError as error:
            told(None, error)

    # -- after an error ------------------------------------------------------------------------------------------------
    def _rewind(self) -> None:
        """Back to what the sink says, for everything that is assigned. What another instance took is claimed anew if
        the group still says that it is ours."""
        assigned = self.consumer.assignment()
        self._claims = {partition: claim for partition, claim in self._claims.items() if partition in assigned}
        found = self._read_claims(self._claims)
        for partition, mine in list(self._claims.items()):
            now = found.get(partition)
            if now is None or now.generation != mine.generation:
                self._check_membership(partition, mine)
                del self._claims[partition]
        for partition, began in self.begun.items():
            if partition in self._claims:
                claim = self._claims[partition] = found[partition]
                self.consumer.seek(partition, began if claim.next_offset is None else claim.next_offset)
        self._claim(partition for partition in assigned if partition not in self._claims)
        self.begun = {}

    def _check_membership(self, partition: TopicPartition, mine: Claim) -> None:
        """Raises if the group went on without this instance: then the other one is right."""
        if mine.next_offset is not None:
            self.consumer.commit({partition: OffsetAndMetadata(mine.next_offset)})
