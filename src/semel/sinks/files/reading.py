"""Readers of a folder, who see what manifests name and nothing else; and the compaction of small files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from semel import faults
from semel.client.errors import ConfigError
from semel.sinks.files.errors import FolderError
from semel.sinks.files.folder import FolderWriter, Unit
from semel.sinks.files.formats import FileChunk, Parquet
from semel.sinks.files.manifests import COMPACTION, DATA, DEAD, FileEntry, FolderState, ManifestLog
from semel.sinks.files.settings import local_folder

TRIES = 10  # a reader that is overtaken by a compaction so often has other troubles
TARGET_BYTES = 128 * 1024 * 1024


def folder_state(folder: str | os.PathLike[str]) -> FolderState:
    """What the manifests of a folder say. Raises if there are none."""
    path = local_folder(folder)
    state = ManifestLog(path).read()
    if not state.number:
        raise FolderError(f"{path} has no manifest: nothing was written to it by semel.Files yet")
    return state


def committed_files(folder: str | os.PathLike[str], *, dead_letters: bool = False) -> list[str]:
    """The paths of all files that are committed, in their order: for Spark, DuckDB and others who read them."""
    path = local_folder(folder)
    kind = DEAD if dead_letters else DATA
    return [str(path / entry.name) for entry in folder_state(path).files.values() if entry.kind == kind]


def read_files(folder: str | os.PathLike[str], *, dead_letters: bool = False) -> Any:
    """Everything that is committed, as a `pyarrow.Table`. A compaction may run meanwhile."""
    import pyarrow as pa

    for left in reversed(range(TRIES)):
        paths = committed_files(folder, dead_letters=dead_letters)
        try:
            tables = [_read(path) for path in paths]
        except FileNotFoundError as error:
            if left and paths != committed_files(folder, dead_letters=dead_letters):
                continue
            raise FolderError(f"{error.filename or error} is missing, and a manifest names it; restore it") from error
        except pa.ArrowException as error:
            raise _mixed(folder, error) from error
        try:
            return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
        except pa.ArrowException as error:
            raise _mixed(folder, error) from error
    raise AssertionError("unreachable")


def _mixed(folder: str | os.PathLike[str], error: Exception) -> FolderError:
    return FolderError(
        f"the files of {os.fspath(folder)} cannot be one table: {error}. Rows are whole; read the paths of "
        "committed_files() with a program that takes columns of several types"
    )


def _read(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as pj
    import pyarrow.parquet as pq

    with open(path, "rb") as file:
        if path.endswith(".parquet"):
            return pq.ParquetFile(file).read()
        options = pj.ReadOptions(block_size=os.path.getsize(path) + 1)
        found = pj.read_json(file, read_options=options)
        schema = pa.schema([(field.name, _as_written(field.type)) for field in found.schema])
        if schema == found.schema:
            return found
        file.seek(0)
        return pj.read_json(file, read_options=options, parse_options=pj.ParseOptions(explicit_schema=schema))


def _as_written(kind: Any) -> Any:
    """JSON has no times: Arrow takes texts for some that look like one, in one file and not in the next."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_written(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_written(field.type)) for field in kind])
    return kind


# -- compaction --------------------------------------------------------------------------------------------------------
class Compacted(NamedTuple):
    files_before: int
    files_after: int
    swept: int  # leftovers of dead writers


def compact(folder: str | os.PathLike[str], *, target_bytes: int = TARGET_BYTES) -> Compacted:
    """Joins small files that lie beside each other into files of about `target_bytes`, and shortens the log. Each
    exchange is one manifest, so that a reader sees the small ones or the large one. Loops may write meanwhile."""
    if target_bytes < 1:
        raise ConfigError("target_bytes must be at least 1")
    path = local_folder(folder)
    before = folder_state(path)
    writer = FolderWriter(path, f"compaction, process {os.getpid()}")
    generation = writer.claim([COMPACTION], before.application_id, before.file_format).number
    swept = writer.sweep()
    count = len(writer.state.files)
    try:
        for run in list(_runs(path, writer.state, target_bytes)):
            _exchange(writer, run, generation)
    except (FolderError, FileNotFoundError):
        writer.check_held(COMPACTION, generation)  # another compaction may have removed what this one wanted to read
        raise
    after = writer.read()
    writer.write_checkpoint()
    return Compacted(count, len(after.files), swept)


def _exchange(writer: FolderWriter, run: list[FileEntry], generation: int) -> None:
    (written,) = writer.write(_joined(writer.path, run), _Copied(Path(run[0].name).suffix))
    entry = FileEntry(written.name, written.rows, written.bytes, run[0].kind)
    writer.commit({COMPACTION: generation}, add=[entry], remove=[each.name for each in run])
    if faults.armed:
        faults.hit("files.compacted")
    for each in run:
        (writer.path / each.name).unlink(missing_ok=True)


def _runs(path: Path, state: FolderState, target_bytes: int) -> Iterator[list[FileEntry]]:
    """Files of one subfolder that follow each other, fit into one file, and have the same columns."""
    open_runs: dict[str, tuple[list[FileEntry], Any]] = {}
    for entry in state.files.values():
        subfolder = entry.name.rpartition("/")[0]
        run, columns = open_runs.get(subfolder, ([], None))
        own = _columns(path / entry.name)
        if run and (columns != own or sum(each.bytes for each in run) + entry.bytes > target_bytes):
            if len(run) > 1:
                yield run
            run = []
        open_runs[subfolder] = ([*run, entry], own)
    yield from (run for run, _ in open_runs.values() if len(run) > 1)


def _columns(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_schema(path) if path.suffix == ".parquet" else None


class _Copied:
    """The contents of files as the content of one."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def write(self, file: Any, parts: Sequence[Any]) -> None:
        if self.suffix == Parquet.suffix:
            Parquet().write(file, [_read(str(path)) for path in parts])
            return
        for path in parts:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)


def _joined(path: Path, run: list[FileEntry]) -> Unit:
    subfolder = run[0].name.rpartition("/")[0]
    return Unit([FileChunk(subfolder, path / entry.name, entry.rows) for entry in run], [])
