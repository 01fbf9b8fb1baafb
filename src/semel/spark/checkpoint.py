"""What Spark's checkpoint says about a micro-batch: where each source starts and ends.

A file is `v1`, a line of metadata, then a line per source ("-" where a source took no part). Local files are read as
they are, others through Hadoop's file system, so that HDFS, S3 and the like work as they do for Spark.

The stream writer has no way to ask Spark (`QueryCheckpoint`): it gets neither the batch's number nor its offsets when a
batch is planned, but Spark has written both, and the newest file in `offsets` belongs to that batch. It reads other
file systems through pyarrow (hdfs, s3, gs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from semel.client.types import TopicPartition
from semel.spark.ledger import MicroBatch, plan_of
from semel.spark.offsets import START, Edge, parse, parse_edge, start_of, to_json

KNOWN_VERSION = "v1"
UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TEMPORARY = re.compile(f"temporary-{UUID.pattern}")  # Spark's name for it
ABSENT = "-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be trusted to say what a batch covers."""


class QueryRun:
    """One run of one streaming query, as seen from inside foreachBatch."""

    def __init__(self, session: Any) -> None:
        context = session.sparkContext
        self.query_id: str = context.getLocalProperty("sql.streaming.queryId")
        if self.query_id is None:
            raise CheckpointError(
                "the sink was not called by a streaming query, or in another thread than the query's; use it with "
                "writeStream.foreachBatch(sink), and give a thread of your own the query's properties "
                "(pyspark.inheritable_thread_target)"
            )
        query = running_query(session)
        self._query = query
        self.run_id: str = query.runId().toString()
        self.root: str = query.resolvedCheckpointRoot()
        self._files = local_files(self.root) or _HadoopFiles(context, self.root)
        self._last: tuple[int, str | None] = (-1, None)  # the file of a batch: the next one starts where it ends
        self._is_stateful: bool | None = None  # None: nobody has looked
        configured = session.conf.get("spark.sql.streaming.checkpointLocation", "")
        self.short_lived = short_lived(self.root, query.name(), configured)
        _refuse_asynchronous(query)

    def batch(self, batch_id: int) -> MicroBatch:
        texts = dict([self._last, (batch_id, self._offsets(batch_id))])
        self._last = (batch_id, texts[batch_id])
        return batch_of(lambda n: texts[n] if n in texts else self._offsets(n), self.query_id, batch_id)

    def _offsets(self, batch_id: int) -> str | None:
        return self._files.read(f"offsets/{batch_id}")

    def lag(self) -> dict[TopicPartition, int]:
        """Offsets that the sources held beyond the last batch that is done, when Spark planned it. Any thread may call
        it. Sources that do not report where they end (semel's before Spark 4.2, files) are left out."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        try:
            progress = self._query.lastProgress()
            sources = () if progress is None else progress.sources()
            edges = [(source.endOffset(), source.latestOffset()) for source in sources]
        except (Py4JError, OSError):  # the session was stopped
            return {}
        return lag_of(edges)

    def is_active(self) -> bool:
        """Whether this run goes on. Any thread may call it."""
        from py4j.protocol import Py4JError

        try:
            return bool(self._query.isActive())
        except (Py4JError, OSError):  # the session was stopped
            return False

    def is_current(self, session: Any) -> bool:
        """Whether the caller is surely this run, by the name that Spark gives to all jobs of a run."""
        return bool(session.sparkContext.getLocalProperty("spark.jobGroup.id") == self.run_id)

    def is_stateful(self) -> bool:
        """Whether the query keeps state: Spark describes its state stores in the checkpoint when it plans batch 0."""
        if self._is_stateful is None:
            self._is_stateful = bool(self._files.names("state"))
        return self._is_stateful


def lag_of(edges: Iterable[tuple[str | None, str | None]]) -> dict[TopicPartition, int]:
    """What is left between where a batch ended and where its sources did, by partition. One topic in two sources: the
    larger lag."""
    found: dict[TopicPartition, int] = {}
    for end, latest in edges:
        read = parse(end) or {}
        for topic, parts in (parse(latest) or {}).items():
            for partition, offset in parts.items():
                if partition in read.get(topic, {}):
                    place = TopicPartition(topic, partition)
                    found[place] = max(found.get(place, 0), offset - read[topic][partition])
    return found


def short_lived(root: str, query_name: str | None, configured: str | None) -> str:
    """Why a checkpoint is of no use to the next start of its query; "" if it is as it should be. `configured` is the
    session's folder for checkpoints: a query without a name gets a new one in it at every start."""
    parent, _, folder = root.rstrip("/").rpartition("/")
    if TEMPORARY.fullmatch(folder):
        return (
            f"the query has no option checkpointLocation, so its checkpoint is temporary ({root}) and every start "
            'begins at batch 0; set .option("checkpointLocation", ...)'
        )
    is_there = configured and parent.endswith(configured.rstrip("/").rpartition(":")[2])
    if query_name is None and is_there and UUID.fullmatch(folder):
        return (
            f"the query has neither a name nor an option checkpointLocation, so every start has a new checkpoint (this "
            f'one is {root}); set .option("checkpointLocation", ...), or .queryName(...)'
        )
    return ""


def running_query(session: Any) -> Any:
    """Spark's own object for the query that calls, in the JVM."""
    context = session.sparkContext
    number = context._jvm.java.util.UUID.fromString(context.getLocalProperty("sql.streaming.queryId"))
    return session._jsparkSession.sharedState().activeStreamingQueries().get(number)


def batch_of(read: Callable[[int], str | None], query_id: str, batch_id: int) -> MicroBatch:
    """What a batch covers, by files of the offset log."""
    text = read(batch_id)
    if text is None:
        raise CheckpointError(f"offsets/{batch_id} is missing in the checkpoint: Spark writes it before a batch runs")
    ends = parse_offset_log(text, batch_id)
    text_before = read(batch_id - 1) if batch_id else None
    before = None if text_before is None else parse_offset_log(text_before, batch_id - 1)
    starts = [_start(i, end, before) for i, end in enumerate(ends)]
    return MicroBatch(
        query_id,
        batch_id,
        starts,
        [_canonical(end) for end in ends],
        plan=plan_of(text),
        plan_before="" if text_before is None else plan_of(text_before),
    )


def parse_offset_log(text: str, batch_id: int) -> list[str | None]:
    """The sources' lines of one file of the offset log."""
    version, _, rest = text.partition("\n")
    if version.strip() != KNOWN_VERSION:
        raise CheckpointError(
            f"offsets/{batch_id} has version {version.strip()!r}, this version of semel reads {KNOWN_VERSION!r}; "
            "use a newer semel, or an older Spark"
        )
    _metadata, *lines = rest.rstrip("\n").split("\n")
    return [None if line == ABSENT else line for line in lines]


def _start(index: int, end: str | None, before: list[str | None] | None) -> str | None:
    """Where a source starts: where the batch before ended, else what its first end carries, else unknown."""
    if before and index < len(before) and before[index] is not None:
        line = before[index]
        if parse(line) is None or parse(end) is None:
            return _canonical(line)
        return _as_text(start_of(json.loads(end or ""), json.loads(line or "")))
    carried = json.loads(end).get(START) if end and end.startswith("{") and f'"{START}"' in end else None
    return None if carried is None else _canonical(json.dumps(carried))


def _canonical(line: str | None) -> str | None:
    """Offsets in Kafka as sorted JSON with the ids of topics, without other additions: equal places are equal text."""
    found = parse_edge(line)
    return line if found is None else _as_text(found)


def _as_text(edge: Edge) -> str:
    return json.dumps(to_json(edge.offsets, edge.ids), separators=(",", ":"))


def _refuse_asynchronous(query: Any) -> None:
    """Asynchronous progress tracking writes the offset log late: a batch and its replay would look the same."""
    if "Async" in query.getClass().getSimpleName():
        raise CheckpointError(
            "the query uses asynchronous progress tracking, which logs offsets after the batch has run; exactly-once "
            "needs them before. Remove the option asyncProgressTrackingEnabled"
        )


LOCAL = "file:/"


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

    def current(self) -> MicroBatch:
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


class _HadoopFiles:
    """As Spark reads them. Each call is a question to the JVM."""

    def __init__(self, context: Any, root: str) -> None:
        self._root = root
        self._path = context._jvm.org.apache.hadoop.fs.Path  # every dot is a question, too
        self._hadoop = context._jsc.hadoopConfiguration()

    def read(self, name: str) -> str | None:
        path, files = self._found(name)
        if not files.exists(path):
            return None
        stream = files.open(path)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def names(self, folder: str) -> list[str]:
        path, files = self._found(folder)
        return [each.getPath().getName() for each in files.listStatus(path)] if files.exists(path) else []

    def _found(self, name: str) -> tuple[Any, Any]:
        path = self._path(f"{self._root}/{name}")
        return path, path.getFileSystem(self._hadoop)


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


def local_files(location: str) -> _LocalFiles | None:
    """The files of a location that has the scheme of local ones."""
    if not location.startswith(LOCAL):
        return None
    return _LocalFiles(Path("/" + location.removeprefix(LOCAL).lstrip("/")))


def _files(location: str) -> _LocalFiles | _RemoteFiles:
    local = local_files(location)
    if local is not None:
        return local
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
