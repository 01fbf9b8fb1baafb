"""The checkpoint of a running query, read by a Python process of the driver that has no way to ask Spark.

Spark gives a stream writer neither the batch's number nor its offsets when a batch is planned, but it has written both:
the newest file in `offsets` belongs to the batch that is being planned. Local files are read as they are, other file
systems through pyarrow (hdfs, s3, gs).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semel.spark.checkpoint import CheckpointError, batch_of
from semel.spark.ledger import Batch

LOCAL = ("file:///", "file:/")


class QueryCheckpoint:
    """What the checkpoint folder says about the batch that is being planned."""

    def __init__(self, location: str | None) -> None:
        if not location:
            raise CheckpointError(
                "the stream writer must read the query's checkpoint to know which batch it writes, but the query has "
                'no option checkpointLocation; set writeStream.option("checkpointLocation", ...), not only in the '
                "session's configuration"
            )
        self._location = location
        self._files = _files(location)

    def current(self) -> Batch:
        """The batch that is being planned: logged, and not finished yet."""
        batch_id = max(self._numbers("offsets"), default=None)
        if batch_id is None:
            raise CheckpointError(
                f"{self._location} has no offsets yet, or this is not the folder that Spark writes to; give the "
                "checkpoint location with its scheme (file:///..., hdfs://..., s3://...)"
            )
        if batch_id in self._numbers("commits"):
            raise CheckpointError(
                f"{self._location}: batch {batch_id} is the newest and is finished, although a batch is being written; "
                "another query uses the same checkpoint, or offsets are logged late (asynchronous progress tracking)"
            )
        return batch_of(lambda number: self._files.read(f"offsets/{number}"), self._query_id(), batch_id)

    def is_stateful(self) -> bool:
        """Whether the query keeps state: Spark describes its state stores in the checkpoint when it plans batch 0."""
        return bool(self._files.names("state"))

    def _query_id(self) -> str:
        text = self._files.read("metadata")
        if text is None:
            raise CheckpointError(f"{self._location}/metadata is missing: this is not the checkpoint of a query")
        found: str = json.loads(text)["id"]
        return found

    def _numbers(self, folder: str) -> set[int]:
        return {int(name) for name in self._files.names(folder) if name.isdecimal()}


class _LocalFiles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> str | None:
        try:
            return (self._root / name).read_text()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return [path.name for path in (self._root / folder).iterdir()]
        except FileNotFoundError:
            return []


class _RemoteFiles:
    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root

    def read(self, name: str) -> str | None:
        try:
            with self._files.open_input_stream(f"{self._root}/{name}") as stream:
                return bytes(stream.read()).decode()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector

        chosen = FileSelector(f"{self._root}/{folder}", allow_not_found=True)
        return [info.base_name for info in self._files.get_file_info(chosen)]


def _files(location: str) -> _LocalFiles | _RemoteFiles:
    for prefix in LOCAL:
        if location.startswith(prefix):
            return _LocalFiles(Path("/" + location.removeprefix(prefix).lstrip("/")))
    if "://" not in location:
        return _LocalFiles(Path(location))
    from pyarrow.fs import FileSystem

    try:
        files, root = FileSystem.from_uri(location.replace("s3a://", "s3://", 1))
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint location {location!r} cannot be opened from Python ({error}); the stream writer reads "
            "local files, hdfs, s3 and gs. Use writeStream.foreachBatch(semel.sink(...)), which reads it through Spark"
        ) from error
    return _RemoteFiles(files, root.rstrip("/"))
