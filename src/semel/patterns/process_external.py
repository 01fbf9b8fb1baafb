"""Modes of `semel.process` whose sink keeps the offsets beside the data: what databases and folders share.

The sink decides where to read on: at the start, after every rebalance and after every error. An instance that gets
partitions claims them in the sink, which shuts out the last owner. The group gets the offsets afterwards, for lag tools
only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

from semel import faults
from semel.client.consumer import Consumer
from semel.client.dead_letters import reason_of
from semel.client.errors import ConfigError, KafkaError
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.process_modes import Mode
from semel.patterns.process_output import Emitter, RecordError, first_record
from semel.sinks.claims import Claim, Claims
from semel.sinks.files.errors import OlderFolderError, UnfitRowError
from semel.sinks.files.folder import LoopFolder, Unit
from semel.sinks.files.formats import DEAD_LETTERS, FileChunk, format_of, rows_of
from semel.sinks.files.settings import Files

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

    def end_calls(self) -> None:
        """Its calls are not those of a broker."""

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
        def on_committed(_: object, error: KafkaError | None) -> None:
            if error is not None:
                log.debug("the group does not have the offsets yet: %s", error)

        try:
            self.consumer.commit_async(
                {partition: OffsetAndMetadata(offset) for partition, offset in offsets.items()}, on_committed
            )
        except KafkaError as error:
            on_committed(None, error)

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


# --- The mode of `semel.process` whose sink is a folder: rows and offsets become visible by one manifest ---
#
#     take      applies the function; rows are kept as columns or as lines
#     settle    files under temporary names, their names, then the manifest with the offsets: its link() is the commit
#     undo      read what the manifests say, and seek there
#
# The folder decides where to read on; see `process_external`.


Rows = list[Mapping[str, Any]]


class FilesMode(ExternalMode):
    def __init__(
        self, consumer: Consumer, emitter: Emitter, settings: Files, application_id: str, instance: str | None
    ) -> None:
        super().__init__(consumer, emitter, application_id, instance, settings.when_behind)
        self.words = SinkWords(
            "folder",
            f"the manifests of {settings.folder}",
            "choose another folder",
            "Files(dead_letters=True)",
            OlderFolderError,
        )
        self._keeps_bad = settings.dead_letters
        self._format = format_of(settings)
        self._folder = LoopFolder(settings.folder, application_id, settings.format, self.holder)
        self._chunks: list[FileChunk] = []
        self._letters: list[FileChunk] = []

    def start(self) -> None:
        self._folder.open()

    def close(self) -> None:
        """Claims stay until another instance takes them: nothing is open."""

    # -- partitions ----------------------------------------------------------------------------------------------------
    def _take_partitions(self, partitions: list[TopicPartition]) -> Claims:
        return self._folder.take_partitions(partitions, self._topic_ids)

    def _read_claims(self, partitions: Iterable[TopicPartition]) -> Claims:
        self._folder.read()
        return self._folder.claims_of(partitions)

    # -- work ----------------------------------------------------------------------------------------------------------
    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        if self.emitter.tables:
            self._take_table(batch)
            return
        made = [(record, self._rows(record)) for record in batch]
        try:
            self._chunks += self._format.of_rows([row for _, rows in made for row in rows])
        except UnfitRowError:  # record by record: so the ones are found that do not fit
            for record, rows in made:
                self._chunks += self._fitting(record, rows)

    def _rows(self, record: ConsumerRecord) -> Rows:
        try:
            return rows_of(self.emitter.function(record))
        except KafkaError:
            raise
        except Exception as error:
            instead = self._instead(record, record, error)
            return instead if isinstance(instead, list) else instead.to_pylist()

    def _fitting(self, record: ConsumerRecord, rows: Rows) -> list[FileChunk]:
        try:
            return self._format.of_rows(rows)
        except UnfitRowError as error:
            instead = self._instead(record, record, error)
        return self._fitting_instead(record, instead)

    def _fitting_instead(self, record: ConsumerRecord, instead: Any) -> list[FileChunk]:
        try:
            return self._format.of_rows(instead) if isinstance(instead, list) else self._format.of_table(instead)
        except UnfitRowError as error:
            self._set_aside(record, error)
            return []

    def _take_table(self, table: Any) -> None:
        """The rows that the function fails with, or that do not fit, are found by halving."""
        try:
            made = self.emitter.function(table)
            self._chunks += [] if made is None else self._format.of_table(_whole(made))
        except KafkaError:
            raise
        except Exception as error:
            if table.num_rows > 1:
                half = table.num_rows // 2
                self._take_table(table.slice(0, half))
                self._take_table(table.slice(half))
                return
            record = first_record(table)
            self._chunks += self._fitting_instead(record, self._instead(table, record, error))

    def _instead(self, given: Any, record: ConsumerRecord, error: Exception) -> Any:
        """What `on_error` makes of it, rows or a table; else no rows, and a dead letter; else the end of the loop."""
        if self.emitter.on_error is not None:
            try:
                returned = self.emitter.on_error(given, error)
                return _whole(returned) if hasattr(returned, "to_pylist") else rows_of(returned)
            except KafkaError:
                raise
            except Exception as failure:
                error = failure
        self._set_aside(record, error)
        return []

    def _set_aside(self, record: ConsumerRecord, error: Exception) -> None:
        reason = reason_of(error)
        if not self._keeps_bad:
            raise self._refused(record, reason) from error
        self._letters += DEAD_LETTERS.of_rows([{**record._asdict(), "reason": reason}])

    def settle(self) -> None:
        if not self.is_working:
            return
        offsets = self._ended()
        held = {partition: self._claims[partition] for partition in offsets}
        self._folder.commit_unit(held, offsets, self._topic_ids, Unit(self._chunks, self._letters), self._format)
        self._claims |= {place: held[place]._replace(next_offset=offset) for place, offset in offsets.items()}
        self.records_out += sum(chunk.rows for chunk in self._chunks)
        self.dead_letters += len(self._letters)
        self.commits += 1
        self._chunks, self._letters, self.begun = [], [], {}
        if faults.armed:
            faults.hit("files.committed")
        self._tell_group(offsets)

    def drop(self) -> None:
        self._chunks, self._letters = [], []


def _whole(made: Any) -> Any:
    import pyarrow as pa

    if isinstance(made, pa.RecordBatch):
        return pa.Table.from_batches([made])
    if not isinstance(made, pa.Table):
        raise ConfigError(
            f"the function returned {type(made).__name__}; with tables=True expected None or a pyarrow.Table"
        )
    return made
