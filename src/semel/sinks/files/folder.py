"""Data files: what they are called, how they get onto the disk, which of them are nobody's any more."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from semel import faults
from semel.client.types import TopicPartition
from semel.sinks.claims import NO_TOPIC_ID, Claim, Claims
from semel.sinks.files.errors import FolderError, FolderTakenError, OlderFolderError, explained
from semel.sinks.files.formats import DEAD_LETTERS, ContentWriter, FileChunk
from semel.sinks.files.manifests import (
    DATA,
    DEAD,
    FORMAT,
    OWN,
    TEMPORARY,
    ClaimEntry,
    FileEntry,
    FolderState,
    Manifest,
    ManifestLog,
    OffsetEntry,
    check_identity,
    sync_folder,
)

log = logging.getLogger("semel.files")

_NAME = re.compile(r"\.?semel-([0-9a-f]{32})-\d{8,}\.(?:parquet|jsonl)(?:\.tmp)?")
SHOWN = 3


class Unit(NamedTuple):
    """What is committed together."""

    chunks: Sequence[FileChunk]
    dead_letters: Sequence[FileChunk]


class FolderWriter:
    """One writer of a folder: an instance of a loop, or a compaction. Its id is in the names of its files."""

    def __init__(self, path: Path, holder: str) -> None:
        self.path = path
        self.id = uuid.uuid4().hex
        self._holder = holder
        self._log = ManifestLog(path, self.id)
        self._numbers = count(1)

    def open(self) -> FolderState:
        """Creates the folder. Refuses one that holds something and no manifest."""
        with explained(f"creating {self.path}"):
            (self.path / OWN).mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            sync_folder(self.path)
            there = sorted(entry.name for entry in os.scandir(self.path) if entry.name[0] not in "._")
        state = self._log.read()
        if there and not state.number:
            raise FolderError(
                f"{self.path} has no manifest, but holds {', '.join(there[:SHOWN])}: semel did not write that, and "
                "leaves it alone. Choose an empty folder, or move these files away"
            )
        return state

    @property
    def state(self) -> FolderState:
        return self._log.state

    def read(self) -> FolderState:
        return self._log.read()

    # -- committing ----------------------------------------------------------------------------------------------------
    def claim(self, places: Iterable[TopicPartition], application_id: str, file_format: str) -> FolderState:
        """Makes this writer the only one that may commit something about them."""
        claims = [ClaimEntry(place.topic, place.partition, self.id, self._holder) for place in places]

        def make(state: FolderState) -> Manifest:
            check_identity(state, application_id, file_format)
            return self._manifest(application_id, file_format, claims=claims)

        return self._log.append(make)

    def commit(
        self,
        held: Mapping[TopicPartition, int],
        *,
        offsets: Sequence[OffsetEntry] = (),
        before: Mapping[TopicPartition, int | None] | None = None,
        add: Sequence[FileEntry] = (),
        remove: Sequence[str] = (),
    ) -> None:
        """`held`: the generations of the claims that it rests on; `before`: the offsets that it follows."""

        def make(state: FolderState) -> Manifest:
            for place, generation in held.items():
                self._check_held(state, place, generation)
            for place, offset in (before or {}).items():
                found = state.offsets.get(place)
                if (None if found is None else found.next_offset) != offset:
                    raise FolderError(
                        f"{self.path} has {place.topic}-{place.partition} at {found and found.next_offset}, this "
                        f"instance left it at {offset}: the folder was restored while it was in use. Start again"
                    )
            return self._manifest(
                state.application_id, state.file_format, offsets=list(offsets), add=list(add), remove=list(remove)
            )

        try:
            self._log.append(make)
        except FolderTakenError:  # so nobody will ever name these files
            for entry in add:
                (self.path / entry.name).unlink(missing_ok=True)
            raise

    def check_held(self, place: TopicPartition, generation: int) -> None:
        """Raises if another writer has taken it."""
        self._check_held(self.read(), place, generation)

    def _check_held(self, state: FolderState, place: TopicPartition, generation: int) -> None:
        claim = state.claims[place]
        if claim.writer == self.id and claim.generation == generation:
            return
        what = f"{place.topic}-{place.partition}" if place.topic else "the compaction"
        raise FolderTakenError(
            f"{what} belongs to generation {claim.generation} ({claim.holder}) now, this instance has {generation}: "
            "another one took over; what was written here is not visible"
        )

    def _manifest(
        self,
        application_id: str,
        file_format: str,
        *,
        claims: Sequence[ClaimEntry] = (),
        offsets: Sequence[OffsetEntry] = (),
        add: Sequence[FileEntry] = (),
        remove: Sequence[str] = (),
    ) -> Manifest:
        return Manifest(
            format=FORMAT,
            application_id=application_id,
            file_format=file_format,
            writer=self.id,
            written_at_ms=int(time.time() * 1000),
            claims=list(claims),
            offsets=list(offsets),
            add=list(add),
            remove=list(remove),
        )

    def write_checkpoint(self) -> None:
        self._log.write_checkpoint()

    # -- data ----------------------------------------------------------------------------------------------------------
    def write(self, unit: Unit, content: ContentWriter) -> list[FileEntry]:
        """All of it as files, durable and under their names; a manifest has to name them yet."""
        with explained(f"writing files in {self.path}"):
            entries = self._written(unit.chunks, content, DATA, "")
            entries += self._written(unit.dead_letters, DEAD_LETTERS, DEAD, f"{OWN}/{DEAD}")
            if faults.armed:
                faults.hit("files.written")
            for entry in entries:
                path = self.path / entry.name
                path.with_name(f".{path.name}.tmp").rename(path)
            above = {parent for entry in entries for parent in (self.path / entry.name).parents}
            for folder in above:
                if folder.is_relative_to(self.path):
                    sync_folder(folder)
            if faults.armed:
                faults.hit("files.renamed")
        return entries

    def _written(self, chunks: Sequence[FileChunk], content: ContentWriter, kind: str, below: str) -> list[FileEntry]:
        """One file for each subfolder, under a temporary name."""
        by_subfolder: dict[str, list[FileChunk]] = {}
        for chunk in chunks:
            by_subfolder.setdefault(below or chunk.subfolder, []).append(chunk)
        entries = []
        for subfolder, parts in by_subfolder.items():
            name = f"semel-{self.id}-{next(self._numbers):08d}{content.suffix}"
            folder = self.path / subfolder
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f".{name}.tmp", "wb") as file:
                content.write(file, [part.content for part in parts])
                file.flush()
                os.fsync(file.fileno())
                size_bytes = file.tell()
            place = f"{subfolder}/{name}" if subfolder else name
            entries.append(FileEntry(place, sum(part.rows for part in parts), size_bytes, kind))
        return entries

    # -- leftovers -----------------------------------------------------------------------------------------------------
    def sweep(self) -> int:
        """Deletes what dead writers of this folder left and nobody will ever name; how many files. What semel did not
        write, or not here, stays. The order matters: files first, then the claims; see docs/decisions/0142."""
        listed = list(_walk(self.path))
        state = self._log.read()
        active = {claim.writer for claim in state.claims.values()}
        foreign, swept = [], 0
        for name, writer in listed:
            if name in state.files:
                continue
            if writer is None or writer not in state.writers:
                foreign.append(name)
            elif name in state.removed or writer not in active:
                (self.path / name).unlink(missing_ok=True)
                swept += 1
        for temporary in (self.path / OWN).iterdir():
            if TEMPORARY.fullmatch(temporary.name) and self.id not in temporary.name:
                temporary.unlink(missing_ok=True)  # a writer that is alive writes it again
                swept += 1
        if foreign:
            log.warning(
                "%s holds %d files that semel did not write, such as %s: they are left alone, and no manifest names "
                "them; readers that list the folder take them for data",
                self.path,
                len(foreign),
                ", ".join(foreign[:SHOWN]),
            )
        return swept


def _walk(folder: Path) -> Iterable[tuple[str, str | None]]:
    """Files, by names relative to the folder, and their writers. No manifests, and no hidden files of others."""
    for top, folders, names in os.walk(folder):
        where = Path(top).relative_to(folder)
        if where.parts[:1] == (OWN,) and where.parts[1:2] != (DEAD,):
            folders[:] = [name for name in folders if name == DEAD]
            continue
        for name in names:
            found = _NAME.fullmatch(name)
            if found is not None or name[0] not in "._":
                yield (where / name).as_posix(), None if found is None else found[1]


class LoopFolder(FolderWriter):
    """A folder as an instance of the loop sees it: claims and offsets of partitions."""

    def __init__(self, path: Path, application_id: str, file_format: str, holder: str) -> None:
        super().__init__(path, holder)
        self._application_id = application_id
        self._file_format = file_format

    def take_partitions(self, places: Sequence[TopicPartition], topic_ids: Mapping[str, UUID]) -> Claims:
        is_first = self.id not in self.state.writers
        state = self.read()
        check_identity(state, self._application_id, self._file_format)
        for place in places:
            self._check_topic(state, place, topic_ids[place.topic])
        self.claim(places, self._application_id, self._file_format)
        if faults.armed:
            faults.hit("files.claimed")
        if is_first:
            swept = self.sweep()
            if swept:
                log.info("%s: swept %d files that were never committed", self.path, swept)
        return self.claims_of(places)

    def _check_topic(self, state: FolderState, place: TopicPartition, topic_id: UUID) -> None:
        found = state.offsets.get(place)
        if found is None or UUID(found.topic_id) == topic_id or NO_TOPIC_ID in (UUID(found.topic_id), topic_id):
            return
        raise OlderFolderError(
            f"{self.path} has {place.topic}-{place.partition} at {found.next_offset} of the topic with the id "
            f"{found.topic_id}, but the topic's id is {topic_id}: it was deleted and created anew. Correct the topic's "
            "name, or choose another folder to write the new topic from its beginning"
        )

    def claims_of(self, places: Iterable[TopicPartition]) -> Claims:
        """As of the last look. The generation of a claim that is another writer's is negative: never one's own."""
        found = {}
        for place in places:
            claim, at = self.state.claims.get(place), self.state.offsets.get(place)
            if claim is not None:
                mine = claim.writer == self.id
                found[place] = Claim(claim.generation if mine else -1, None if at is None else at.next_offset)
        return found

    def commit_unit(
        self,
        held: Claims,
        offsets: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, UUID],
        unit: Unit,
        content: ContentWriter,
    ) -> None:
        entries = self.write(unit, content) if unit.chunks or unit.dead_letters else []
        self.commit(
            {place: claim.generation for place, claim in held.items()},
            before={place: claim.next_offset for place, claim in held.items()},
            offsets=[
                OffsetEntry(place.topic, place.partition, str(topic_ids[place.topic]), offset)
                for place, offset in offsets.items()
            ],
            add=entries,
        )
