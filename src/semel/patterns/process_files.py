"""The mode of `semel.process` whose sink is a folder: rows and offsets become visible by one manifest.

    take      applies the function; rows are kept as columns or as lines
    settle    files under temporary names, their names, then the manifest with the offsets: its link() is the commit
    undo      read what the manifests say, and seek there

The folder decides where to read on; see `process_external`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from semel import faults
from semel.client.consumer import Consumer
from semel.client.dead_letters import reason_of
from semel.client.errors import KafkaError
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.process_external import ExternalMode, SinkWords
from semel.patterns.process_output import Emitter, first_record
from semel.sinks.claims import Claims
from semel.sinks.files.errors import OlderFolderError, UnfitRowError
from semel.sinks.files.folder import LoopFolder, Unit
from semel.sinks.files.formats import DEAD_LETTERS, FileChunk, format_of, rows_of
from semel.sinks.files.settings import Files

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
            return self._instead(record, record, error)

    def _fitting(self, record: ConsumerRecord, rows: Rows) -> list[FileChunk]:
        try:
            return self._format.of_rows(rows)
        except UnfitRowError as error:
            instead = self._instead(record, record, error)
        try:
            return self._format.of_rows(instead)
        except UnfitRowError as error:
            self._set_aside(record, error)
            return []

    def _take_table(self, table: Any) -> None:
        """The rows that the function fails with, or that do not fit, are found by halving."""
        try:
            made = self.emitter.function(table)
            self._chunks += [] if made is None else self._format.of_table(made)
        except KafkaError:
            raise
        except Exception as error:
            if table.num_rows > 1:
                half = table.num_rows // 2
                self._take_table(table.slice(0, half))
                self._take_table(table.slice(half))
                return
            record = first_record(table)
            self._chunks += self._fitting(record, self._instead(table, record, error))

    def _instead(self, given: Any, record: ConsumerRecord, error: Exception) -> Rows:
        """What `on_error` makes of it; else nothing, and a dead letter; else the end of the loop."""
        if self.emitter.on_error is not None:
            try:
                returned = self.emitter.on_error(given, error)
                return returned.to_pylist() if hasattr(returned, "to_pylist") else rows_of(returned)
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
