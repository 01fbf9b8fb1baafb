"""The log of manifests: what a folder holds, up to which offsets, and who may go on.

    _semel/manifest-00000000000000000017.json      one commit: files added and removed, offsets, claims
    _semel/checkpoint-00000000000000000256.json    everything up to that number; the manifests before it are deleted

A manifest gets its name by link(), which never replaces a file: of two writers that want the same number one wins, and
the other one reads what it missed before it tries the next. So nobody commits without having seen every commit before,
and whoever claims a partition shuts out its last owner, however long that one was frozen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from semel import faults
from semel.client.types import TopicPartition
from semel.sinks.files.errors import FolderError, explained

FORMAT = 1
OWN = "_semel"  # the subfolder of semel's own files; readers of Spark and Hive leave it out
CHECKPOINT_EVERY = 256
TRIES = 20  # a reader that is overtaken by checkpoints so often has other troubles
DATA, DEAD = "data", "dead_letters"
COMPACTION = TopicPartition("", 0)  # what a compaction claims; no topic has this name
T = TypeVar("T", "Manifest", "Checkpoint")
_NAME = re.compile(r"(manifest|checkpoint)-(\d{20})\.json")
TEMPORARY = re.compile(r"\.(?:manifest|checkpoint)-[0-9a-f]{32}\.tmp")


class FileEntry(msgspec.Struct, frozen=True):
    name: str  # relative to the folder, with / between
    rows: int
    bytes: int
    kind: str = DATA


class OffsetEntry(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    topic_id: str
    next_offset: int


class ClaimEntry(msgspec.Struct, frozen=True):
    """`generation` is the number of the manifest that made the claim; 0 in that manifest itself."""

    topic: str
    partition: int
    writer: str
    holder: str
    generation: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: int
    application_id: str
    file_format: str
    writer: str
    written_at_ms: int = 0
    claims: list[ClaimEntry] = []
    offsets: list[OffsetEntry] = []
    add: list[FileEntry] = []
    remove: list[str] = []


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    number: int
    application_id: str
    file_format: str
    claims: list[ClaimEntry]
    offsets: list[OffsetEntry]
    files: list[FileEntry]
    removed: list[str]
    writers: list[str]


_DECODERS: dict[type, Any] = {kind: msgspec.json.Decoder(kind) for kind in (Manifest, Checkpoint)}


@dataclass
class FolderState:
    """All manifests up to a number, one after the other."""

    number: int = 0
    application_id: str = ""
    file_format: str = ""
    claims: dict[TopicPartition, ClaimEntry] = field(default_factory=dict)
    offsets: dict[TopicPartition, OffsetEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)  # by compactions; perhaps still there
    writers: set[str] = field(default_factory=set)  # everybody who ever claimed something

    def apply(self, number: int, manifest: Manifest) -> None:
        self.number = number
        self.application_id = self.application_id or manifest.application_id
        self.file_format = self.file_format or manifest.file_format
        self.writers.add(manifest.writer)
        for claim in manifest.claims:
            place = TopicPartition(claim.topic, claim.partition)
            self.claims[place] = msgspec.structs.replace(claim, generation=number)
        for offset in manifest.offsets:
            self.offsets[TopicPartition(offset.topic, offset.partition)] = offset
        self._change_files(manifest)

    def _change_files(self, manifest: Manifest) -> None:
        """New files come last; what replaces others comes where the first of them was."""
        added = {entry.name: entry for entry in manifest.add}
        if not manifest.remove:
            self.files.update(added)
            return
        gone = set(manifest.remove)
        files: dict[str, FileEntry] = {}
        for name, entry in self.files.items():
            if name in gone:
                files.update(added)
                added = {}
            else:
                files[name] = entry
        self.files = files
        self.removed |= gone

    def checkpoint(self, folder: Path) -> Checkpoint:
        return Checkpoint(
            format=FORMAT,
            number=self.number,
            application_id=self.application_id,
            file_format=self.file_format,
            claims=list(self.claims.values()),
            offsets=list(self.offsets.values()),
            files=list(self.files.values()),
            removed=sorted(name for name in self.removed if (folder / name).exists()),
            writers=sorted(self.writers),
        )

    @classmethod
    def of(cls, found: Checkpoint) -> FolderState:
        return cls(
            found.number,
            found.application_id,
            found.file_format,
            {TopicPartition(claim.topic, claim.partition): claim for claim in found.claims},
            {TopicPartition(offset.topic, offset.partition): offset for offset in found.offsets},
            {entry.name: entry for entry in found.files},
            set(found.removed),
            set(found.writers),
        )


class ManifestLog:
    """The manifests of a folder, as one writer or reader sees them."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        self._folder = folder
        self._own = folder / OWN
        self._writer = writer
        self._state = FolderState()

    @property
    def state(self) -> FolderState:
        """As of the last look."""
        return self._state

    # -- reading -------------------------------------------------------------------------------------------------------
    def read(self) -> FolderState:
        """Everything that is committed now. Raises if manifests are missing or cannot be read."""
        for _ in range(TRIES):
            manifests, checkpoint = self._listed()
            self._check_not_older(manifests, checkpoint)
            try:
                if checkpoint > self._state.number:
                    self._state = FolderState.of(self._load(self._path("checkpoint", checkpoint), Checkpoint))
                self._read_on()
            except FileNotFoundError:  # a newer checkpoint took the place of what was listed
                continue
            if self._listed()[1] > self._state.number:
                continue
            if max(manifests, default=0) > self._state.number:
                raise FolderError(
                    f"{self._own} has manifest {max(manifests)}, but manifest {self._state.number + 1} is missing: the "
                    "folder was restored or copied in part. Restore all of it"
                )
            return self._state
        raise FolderError(f"{self._own} changed faster than it could be read, {TRIES} times; try again")

    def _read_on(self) -> None:
        """By opening one number after the other: a listing made meanwhile may have a later one and miss an earlier."""
        while True:
            number = self._state.number + 1
            try:
                manifest = self._load(self._path("manifest", number), Manifest)
            except FileNotFoundError:
                return
            self._state.apply(number, manifest)

    def _check_not_older(self, manifests: set[int], checkpoint: int) -> None:
        mine = self._state.number
        if mine and mine not in manifests and checkpoint < mine:
            raise FolderError(
                f"{self._own} ends before manifest {mine}, which was there: the folder was deleted, moved or restored "
                "while it was in use. Start again"
            )

    def _listed(self) -> tuple[set[int], int]:
        """The numbers of the manifests, and of the last checkpoint; 0 for none."""
        manifests: set[int] = set()
        checkpoint = 0
        with explained(f"reading {self._own}"):
            names = os.listdir(self._own) if self._own.exists() else []
        for name in names:
            found = _NAME.fullmatch(name)
            if found is not None and found[1] == "manifest":
                manifests.add(int(found[2]))
            elif found is not None:
                checkpoint = max(checkpoint, int(found[2]))
        return manifests, checkpoint

    def _load(self, path: Path, kind: type[T]) -> T:
        try:
            found: T = _DECODERS[kind].decode(path.read_bytes())
        except msgspec.MsgspecError as error:
            raise FolderError(
                f"{path} cannot be read: {error}. Restore this file from a backup; nothing was changed"
            ) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror or error}; nothing was changed") from error
        if found.format != FORMAT:
            raise FolderError(f"{path} has format {found.format}; this version of semel reads format {FORMAT}")
        return found

    def _path(self, kind: str, number: int) -> Path:
        return self._own / f"{kind}-{number:020d}.json"

    # -- writing -------------------------------------------------------------------------------------------------------
    def append(self, make: Callable[[FolderState], Manifest]) -> FolderState:
        """Commits what `make` returns for the latest state. `make` raises if that must not be committed any more."""
        while True:
            state = self.read()
            manifest = make(state)
            number = state.number + 1
            with explained(f"writing manifest {number} of {self._folder}"):
                if not self._link(number, msgspec.json.encode(manifest)):
                    continue
                if self._listed()[1] >= number:  # this number was used, and deleted after a checkpoint
                    self._path("manifest", number).unlink(missing_ok=True)
                    continue
                if faults.armed:
                    faults.hit("files.linked")
                sync_folder(self._own)
            state.apply(number, manifest)
            if number % CHECKPOINT_EVERY == 0:
                self.write_checkpoint()
            return state

    def _link(self, number: int, content: bytes) -> bool:
        """Whether the number was free."""
        temporary = self._own / f".manifest-{self._writer}.tmp"
        write_durably(temporary, content)
        if faults.armed:
            faults.hit("files.manifest_written")
        try:
            os.link(temporary, self._path("manifest", number))
        except FileExistsError:
            return False
        except FileNotFoundError:
            if not self._own.exists():
                raise
            return False  # swept by an instance that started
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def write_checkpoint(self) -> None:
        """Makes manifests up to here superfluous, and deletes them, the oldest first; the last one stays."""
        state = self._state
        temporary = self._own / f".checkpoint-{self._writer}.tmp"
        with explained(f"writing a checkpoint of {self._folder}"):
            write_durably(temporary, msgspec.json.encode(state.checkpoint(self._folder)))
            try:
                temporary.rename(self._path("checkpoint", state.number))
            except FileNotFoundError:
                return  # swept by an instance that started; the next one will do
            sync_folder(self._own)
            if faults.armed:
                faults.hit("files.checkpoint_written")
            for name in sorted(os.listdir(self._own), key=_age):
                found = _NAME.fullmatch(name)
                if found is not None and int(found[2]) < state.number:
                    (self._own / name).unlink(missing_ok=True)


def _age(name: str) -> tuple[bool, str]:
    """Manifests by number, then checkpoints: a manifest is gone only while a later checkpoint is there."""
    return not name.startswith("manifest"), name


def check_identity(state: FolderState, application_id: str, file_format: str) -> None:
    if state.number and (state.application_id, state.file_format) != (application_id, file_format):
        raise FolderError(
            f"the folder belongs to application {state.application_id!r} with format {state.file_format!r}; this is "
            f"{application_id!r} with {file_format!r}. Choose another folder, or correct the name"
        )


# -- how things get onto the disk --------------------------------------------------------------------------------------
def write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """A new name is durable when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
