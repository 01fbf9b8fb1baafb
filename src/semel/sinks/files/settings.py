"""What a program says about a folder that records go to: `semel.Files`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from semel.client.errors import ConfigError

FORMATS = ("parquet", "jsonl")
WHEN_BEHIND = ("refuse", "reprocess", "skip")
COMMIT_INTERVAL_MS = 10_000  # a file for each: by default fewer and larger ones than transactions of topics
MAX_RECORDS = 100_000


class Files:
    """A folder as the sink of `semel.process`: rows become visible together with their offsets, through a manifest.

    folder        on a local file system; created if it is missing. It must be empty the first time
    format        parquet or jsonl
    schema        of Parquet files: a `pyarrow.Schema`, or {"id": "int64", "name": "string"}. Rows (dicts) need it,
                  tables are cast to it
    partition_by  columns whose values name subfolders, as Hive does: day=2026-03-01/. They stay in the files, too
    compression   of Parquet: zstd, snappy, gzip, lz4 or none
    dead_letters  whether records that the function refuses, or whose rows do not fit, are kept as JSON lines in
                  _semel/dead_letters, under the same manifest. Otherwise the loop ends with a `RecordError`, unless
                  on_error says more
    when_behind   what to do if the group's committed offsets are beyond the folder's, as after a restore from a backup:
                  refuse, reprocess (from the folder's offsets) or skip (to the group's)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        format: Literal["parquet", "jsonl"] = "parquet",
        schema: Any = None,
        partition_by: str | Sequence[str] = (),
        compression: str = "zstd",
        dead_letters: bool = False,
        when_behind: Literal["refuse", "reprocess", "skip"] = "refuse",
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
        if when_behind not in WHEN_BEHIND:
            raise ConfigError(f"when_behind is {when_behind!r}; it must be one of {', '.join(WHEN_BEHIND)}")
        if schema is not None and format != "parquet":
            raise ConfigError("schema goes with format='parquet'; JSON lines have no types")
        self.folder = local_folder(folder)
        self.format = format
        self.schema = _schema(schema)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.compression = compression
        self.dead_letters = dead_letters
        self.when_behind = when_behind
        missing = [name for name in self.partition_by if self.schema is not None and name not in self.schema.names]
        if missing:
            raise ConfigError(f"partition_by names {missing[0]!r}; the schema has {', '.join(self.schema.names)}")

    def __repr__(self) -> str:
        return f"Files({str(self.folder)!r}, format={self.format!r})"


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Refuses what is not a path of a local file system."""
    text = os.fspath(folder)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return Path(text).absolute()
    name = scheme[1].lower()
    if name == "file":
        return Path("/" + text[len("file://") :].lstrip("/"))
    if name in ("hdfs", "viewfs", "webhdfs"):
        raise ConfigError(
            f"{text}: HDFS is not supported: a manifest needs a rename that never overwrites, and semel has not been "
            "tried there. Write with Spark's own file sink behind a semel source"
        )
    raise ConfigError(
        f"{text}: object stores have neither a rename nor an append that two writers cannot both win. Use a table "
        "format (Apache Iceberg, Delta Lake, Apache Hudi) behind a semel source on Spark"
    )


def _schema(schema: Any) -> Any:
    if schema is None:
        return None
    import pyarrow as pa

    if isinstance(schema, pa.Schema):
        return schema
    if not isinstance(schema, Mapping):
        raise ConfigError(f"schema is {schema!r}; expected a pyarrow.Schema, or column names and types in a dict")
    try:
        types = {name: pa.type_for_alias(kind) if isinstance(kind, str) else kind for name, kind in schema.items()}
        return pa.schema(types.items())
    except (ValueError, TypeError) as error:
        raise ConfigError(f"schema: {error}; expected names of Arrow types such as int64, string, date32") from error
