"""`format("semel")`: topics as DataFrames, streaming and batch, with the options and columns of Spark's Kafka source.

The driver plans ranges of offsets, tasks fetch them as Arrow batches. read_committed is the default: a batch ends
at the last stable offset, so every record in its range is decided.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, TypedDict

import msgspec
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from semel.client.cluster import Cluster
from semel.client.settings import ClientSettings
from semel.spark import stages
from semel.spark.failures import reason_first
from semel.spark.ledger_topic import OwnTopics, last_entry
from semel.spark.offsets import (
    INITIAL,
    START,
    Edge,
    Offsets,
    Range,
    TopicIds,
    edge_of,
    limited,
    lowest,
    ranges,
    recreated,
    split,
    start_of,
    to_json,
)
from semel.spark.options import (
    COMMITTED,
    EARLIEST,
    HEADERS,
    JSON,
    LATEST,
    TYPES,
    OptionError,
    SourceOptions,
    checked_columns,
    json_schema,
    schema_of,
    spark_columns,
)
from semel.spark.reading import DataLossError, created_anew
from semel.spark.topics import TopicOffsets
from semel.spark.workers import end_quietly_when_idle, end_quietly_when_stopped, settle_worker, tables_of

# --- The source's column `json`: values that are JSON, read by the task that fetches them ---
#
# Spark's `from_json` is an expression. The optimizer moves filters on what it returns below it, and each field that a
# filter names becomes a `from_json` of its own: a query that filters parses every value two or three times. A column
# of the source is parsed once. Each value is read on its own, strictly: one that is not an object with fields of
# these types is null, and so is the column of a record without a value.


# What a value raises that cannot be read: wrong JSON or types, text that is not UTF-8, objects nested too deeply.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
WHOLE: dict[str, Any] = {
    name: Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)] for name, bits in BITS.items()
}
# What is at least half a step beyond the largest number of 32 bits would be infinite, and so is out of range.
BEYOND_FLOAT = 2.0**128 - 2.0**103
# Spark's type -> what a value is read as, and the name of Arrow's type
SIMPLE: dict[str, tuple[Any, str]] = {
    **{name: (WHOLE[name], f"int{bits}") for name, bits in BITS.items()},
    "string": (str, "string"),
    "boolean": (bool, "bool"),
    "float": (Annotated[float, msgspec.Meta(gt=-BEYOND_FLOAT, lt=BEYOND_FLOAT)], "float32"),
    "double": (float, "float64"),
    "timestamp": (Annotated[datetime, msgspec.Meta(tz=True)], "timestamp[us]"),
    "timestamp_ntz": (Annotated[datetime, msgspec.Meta(tz=False)], "timestamp[us]"),
    "date": (date, "date32"),
}


def read_as(kind: Any) -> tuple[Any, Any]:
    """The Python type that a value of one of Spark's types is read as, and its Arrow type. Everything may be null."""
    import pyarrow as pa
    from pyspark.sql.types import ArrayType, MapType, StructType

    name = kind.simpleString()
    if name in SIMPLE:
        python, arrow = SIMPLE[name]
        found = pa.type_for_alias(arrow)
        return python | None, pa.timestamp("us", "UTC") if name == "timestamp" else found
    if isinstance(kind, ArrayType):
        python, arrow = read_as(kind.elementType)
        return list[python] | None, pa.list_(arrow)  # type: ignore[valid-type]
    if isinstance(kind, MapType) and kind.keyType.simpleString() == "string":
        python, arrow = read_as(kind.valueType)
        return dict[str, python] | None, pa.map_(pa.string(), arrow)  # type: ignore[valid-type]
    if isinstance(kind, StructType):
        _check_fields(kind)
        inner = {field.name: read_as(field.dataType) for field in kind.fields}
        arrow = pa.struct([pa.field(name, arrow) for name, (_, arrow) in inner.items()])
        return TypedDict("Inner", {name: python for name, (python, _) in inner.items()}, total=False) | None, arrow  # type: ignore
    raise OptionError(
        f"option jsonSchema has the type {name}; expected {', '.join(SIMPLE)}, arrays and structs of them, or maps "
        "from string. Read others with from_json in the query"
    )


def _check_fields(kind: Any) -> None:
    names = [field.name for field in kind.fields]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"option jsonSchema has the field {twice!r} twice in one object; leave one of them out")
    filled = next((field.name for field in kind.fields if not field.nullable), None)
    if filled is not None:
        raise OptionError(
            f"option jsonSchema says that field {filled!r} is NOT NULL, but a value may lack it; leave NOT NULL out"
        )


def json_parser(kind: Any) -> Callable[[Any], Any]:
    """Makes an Arrow array of structs of this type out of a column of bytes."""
    import numpy as np
    import pyarrow as pa

    names = [field.name for field in kind.fields]
    places = [f"f{number}" for number in range(len(names))]  # a field of JSON may have any name
    types = [read_as(field.dataType) for field in kind.fields]
    row = msgspec.defstruct(
        "Row",
        [(place, python, None) for place, (python, _) in zip(places, types, strict=True)],
        rename=dict(zip(places, names, strict=True)),
        gc=False,
    )
    decode, nothing = msgspec.json.Decoder(row).decode, row()
    fields = [pa.field(name, arrow) for name, (_, arrow) in zip(names, types, strict=True)]

    def parsed(values: Any) -> Any:
        rows, unread = [], []
        for value in values.to_pylist():
            try:
                rows.append(decode(value or b""))
            except UNREADABLE:
                unread.append(len(rows))
                rows.append(nothing)
        columns = [
            pa.array(list(map(attrgetter(place), rows)), field.type)
            for place, field in zip(places, fields, strict=True)
        ]
        mask = np.zeros(len(rows), bool)
        mask[unread] = True
        return pa.StructArray.from_arrays(columns, fields=fields, mask=pa.array(mask))

    return parsed


try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION_CONTROL = True
except ImportError:  # PySpark 4.1
    from dataclasses import dataclass

    HAS_ADMISSION_CONTROL = False

    class ReadLimit:  # type: ignore[no-redef]
        pass

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        pass

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        max_rows: int

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        min_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        pass


__all__ = [
    "HAS_ADMISSION_CONTROL",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]


log = logging.getLogger("semel.spark")
end_quietly_when_idle()  # Spark plans in processes of their own; this import is the first that they see of semel
RANGE_COLUMNS = "topic STRING, partition INT, start BIGINT, end BIGINT"


class SemelDataSource(DataSource):
    """What Spark finds under the name `semel`."""

    @classmethod
    def name(cls) -> str:
        return "semel"

    @reason_first()
    def schema(self) -> str:
        if str(self.options.get("emit", "rows")).lower() == "ranges":
            return RANGE_COLUMNS
        return schema_of(checked_columns(self.options), json_schema(self.options))

    def _check_schema(self, given: StructType | None) -> None:
        """A source may be given a schema in place of its own, and then fails in its first task."""
        if given is None or str(self.options.get("emit", "rows")).lower() == "ranges":
            return
        names = checked_columns(self.options)
        wanted = [(name, "".join(TYPES.get(name, "").lower().split())) for name in names]
        found = [(f.name, f.dataType.simpleString() if f.name in TYPES else "") for f in given.fields]
        if found != wanted:
            raise OptionError(
                f"the source was given a schema, {given.simpleString()}, but its columns are {', '.join(names)}. Leave "
                "schema(...) out: read JSON with the option jsonSchema (or from_json), others with a cast, and leave "
                "columns out with the option columns"
            )

    @reason_first()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from semel.spark.batch_writer import BatchWriter

        if overwrite:
            raise OptionError("a topic cannot be overwritten; use mode('append')")
        return BatchWriter(dict(self.options), schema)

    @reason_first()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from semel.spark.stream_writer import StreamWriter

        return StreamWriter(dict(self.options), schema)  # overwrite: outputMode complete, the whole result each time

    @reason_first()
    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_schema(schema)
        return BatchReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            self._check_schema(schema)
            return (StreamReader if HAS_ADMISSION_CONTROL else StreamReader41)(dict(self.options), schema)
        except OptionError as error:
            return RefusedReader(error)


class _Planner:
    """What batch and stream have in common: the options, and a connection that is made when it is first needed."""

    def __init__(self, raw: Mapping[str, str], streaming: bool, schema: StructType | None = None) -> None:
        self.options = SourceOptions.parse(raw, streaming)
        self.json_type = schema[JSON].dataType if schema is not None and JSON in self.options.columns else None
        if self.json_type is not None:
            read_as(self.json_type)  # raises what cannot be read

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "json_type": self.json_type}  # tasks connect for themselves

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(ClientSettings.of(self.options.client, allow_auto_create_topics=False))

    @cached_property
    def topic_offsets(self) -> TopicOffsets:
        return TopicOffsets(self.cluster, self.options, OwnTopics(self.cluster, self.options.application_id))

    def start(self) -> Edge:
        """Where the options say to begin."""
        found = self.topic_offsets.partitions()
        ids = self.topic_offsets.ids(topic for topic, _ in found)
        committed = None
        if self.options.starting.word == COMMITTED:
            known = self.options.committed
            ends = committed_ends(self.cluster, self.options.application_id) if known is None else lowest([known])
            committed = self.of_these_topics(ends, ids)
        return Edge(self.topic_offsets.resolve(self.options.starting, found, committed), ids)

    def of_these_topics(self, known: Edge, now: TopicIds) -> Offsets:
        """Offsets without those of topics that were created anew since: an error, unless records may be lost."""
        others = recreated(known.ids, now)
        for topic in sorted(others & set(known.offsets)):
            what = created_anew(topic, f"offsets {known.offsets[topic]} (by partition)")
            if self.options.fail_on_data_loss:
                raise DataLossError(f"{what} (topic id {known.ids[topic]}, now {now[topic]})")
            log.warning("topic %r was deleted and created anew; reading it from its start", topic)
        return {topic: parts for topic, parts in known.offsets.items() if topic not in others}

    def tasks(self, start: Offsets, end: Edge) -> list[InputPartition]:
        wanted = list(ranges(start, end.offsets, end.ids))
        return [InputPartition(piece) for piece in split(wanted, self.options.min_partitions, self.options.max_records)]

    def read(self, task: InputPartition) -> Iterator[Any]:
        """Runs in a worker."""
        settle_worker()
        if task.value is None:  # PySpark's, in place of none
            return
        if self.options.emit_ranges:
            yield range_row(task.value)
            return
        with reason_first():
            yield from stages.task("source", read_range(self.options, task.value, self.json_type))


class BatchReader(_Planner, DataSourceReader):
    """spark.read.format("semel")"""

    def __init__(self, raw: Mapping[str, str], schema: StructType | None = None) -> None:
        super().__init__(raw, streaming=False, schema=schema)

    @reason_first()
    def partitions(self) -> list[InputPartition]:
        start = self.start()
        end = self.topic_offsets.resolve(self.options.ending, self.topic_offsets.partitions())
        return self.tasks(start.offsets, Edge(end, start.ids))


class StreamReader(_Planner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """spark.readStream.format("semel")"""

    def __init__(self, raw: Mapping[str, str], schema: StructType | None = None) -> None:
        super().__init__(raw, streaming=True, schema=schema)
        self._target: Edge | None = None  # Trigger.AvailableNow: read up to here, then stop
        self._waiting_since_s = -math.inf  # the first batch does not wait, as with Spark's own source

    @reason_first()
    def initialOffset(self) -> dict[str, Any]:
        return {**to_json(*self.start()), INITIAL: True}

    def getDefaultReadLimit(self) -> ReadLimit:
        most, least = self.options.max_offsets, self.options.min_offsets
        if most is not None:
            return ReadMaxRows(most)
        return ReadAllAvailable() if least is None else ReadMinRows(least)

    @reason_first()
    def prepareForTriggerAvailableNow(self) -> None:
        self.topic_offsets.await_markers(self.topic_offsets.partitions(must_exist=self.options.fail_on_data_loss))
        self._target = self._latest()

    @reason_first()
    def reportLatestOffset(self) -> dict[str, Any]:
        return to_json(self._latest().offsets)

    @reason_first()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        latest = self._target if self._target is not None else self._latest()
        known = edge_of(start)
        begin = self._with_new_partitions(self.of_these_topics(known, latest.ids), latest.offsets)
        end = self._end(begin, self._checked(begin, latest.offsets), limit)
        ids = {**known.ids, **latest.ids}
        if INITIAL in start:
            return {**to_json(end, ids), START: to_json(begin, ids)}
        if end == known.offsets and not recreated(known.ids, ids):
            return start  # nothing new: the very same offset, so that Spark runs no batch
        return to_json(end, ids)

    @reason_first()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return self.tasks(start_of(end, start).offsets, edge_of(end))

    def stop(self) -> None:
        if "cluster" in self.__dict__:
            self.cluster.close()
        end_quietly_when_stopped()

    def _latest(self) -> Edge:
        """Where the topics end now. A topic that is gone is left out if records may be lost, else it is an error."""
        found = self.topic_offsets.partitions(must_exist=self.options.fail_on_data_loss)
        ids = self.topic_offsets.ids(topic for topic, _ in found)
        return Edge(self.topic_offsets.edge(LATEST, found), ids)

    def _with_new_partitions(self, begin: Offsets, latest: Offsets) -> Offsets:
        """Partitions that appeared after the query started are read from their beginning."""
        new = [(t, p) for t, parts in latest.items() for p in parts if p not in begin.get(t, {})]
        if not new:
            return begin
        merged = {topic: dict(parts) for topic, parts in begin.items()}
        for topic, parts in self.topic_offsets.edge(EARLIEST, new).items():
            merged.setdefault(topic, {}).update(parts)
        return merged

    def _checked(self, begin: Offsets, latest: Offsets) -> Offsets:
        """The end of everything, never before `begin`. Where it would be, records are gone: an error, unless they may.

        A topic that was deleted keeps its offset, until there is another topic of that name.
        """
        end = {topic: dict(parts) for topic, parts in latest.items()}
        for topic, parts in begin.items():
            for partition, offset in parts.items():
                found = latest.get(topic, {}).get(partition)
                if found is None or found < offset:
                    if self.options.fail_on_data_loss and topic not in self.topic_offsets.left_out:
                        raise DataLossError(self._what_is_lost(topic, partition, offset, found))
                    end.setdefault(topic, {})[partition] = offset
        return end

    def _what_is_lost(self, topic: str, partition: int, offset: int, end: int | None) -> str:
        if not self.options.selects(topic, partition):
            return (
                f"the query has read {topic}-{partition} up to offset {offset}, as its checkpoint says, but its "
                "options do not name it any more. Name it again; or set failOnDataLoss=false to leave it where it is, "
                "or start with a new checkpoint"
            )
        found = "is gone" if end is None else f"ends at offset {end}"
        return (
            f"{topic}-{partition} {found}, but the query has read up to offset {offset}: the topic was deleted, "
            "truncated or created anew. Set failOnDataLoss=false to go on with what is there, or start with a new "
            "checkpoint"
        )

    def _end(self, begin: Offsets, latest: Offsets, limit: ReadLimit) -> Offsets:
        if not isinstance(limit, ReadAllAvailable) and self._must_wait(begin, latest):  # Trigger.Once wants all
            return begin
        self._waiting_since_s = time.monotonic()
        return limited(begin, latest, limit.max_rows) if isinstance(limit, ReadMaxRows) else latest

    def _must_wait(self, begin: Offsets, latest: Offsets) -> bool:
        """minOffsetsPerTrigger: too little is there, and the longest wait is not over."""
        least = self.options.min_offsets
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._waiting_since_s) * 1000
        return sum(r.size for r in ranges(begin, latest)) < least and waited_ms < self.options.max_delay_ms


class StreamReader41(StreamReader):
    """For PySpark 4.1, which requests the latest offset without saying where the batch starts, and gives no limit.

    It reads everything that is there in one batch: maxOffsetsPerTrigger and minOffsetsPerTrigger have no effect.
    """

    def __init__(self, raw: Mapping[str, str], schema: StructType | None = None) -> None:
        super().__init__(raw, schema)
        self._seen: dict[str, Any] | None = None
        if self.options.max_offsets or self.options.min_offsets:
            log.warning(
                "PySpark 4.1 gives Python sources no limit per batch: maxOffsetsPerTrigger and minOffsetsPerTrigger "
                "have no effect; PySpark 4.2 and later apply them"
            )

    @cached_property
    def _first(self) -> dict[str, Any]:
        """Resolved once: asked before the first batch and again when it is planned."""
        return super().initialOffset()

    def initialOffset(self) -> dict[str, Any]:
        return self._first

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return super().latestOffset(self._seen or self._first, ReadAllAvailable())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._seen = end  # also at a restart: Spark gives the end of the checkpoint as an empty range
        return super().partitions(start, end)


class RefusedReader(DataSourceStreamReader):
    """In place of a reader whose options are wrong. Spark stops its readers in the end, also one that was not made,
    and shows what fails then; so the reader is made, and raises as soon as it is used."""

    def __init__(self, error: OptionError) -> None:
        self._error = error

    @reason_first()
    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error

    initialOffset = latestOffset = partitions = read = _refuse


def committed_ends(cluster: Cluster, application_id: str | None) -> Edge:
    """Where the ledger of an application ends; empty where it has written nothing yet."""
    if application_id is None:
        raise ValueError("startingOffsets=committed needs the option applicationId, the application id of the sink")
    entry = last_entry(cluster, application_id)
    return lowest(entry.ends if entry else [])


def range_row(wanted: Range) -> Any:
    """A range as a row, for tasks that fetch it themselves."""
    import pyarrow as pa

    from semel.protocol.arrow_numbers import column

    kinds = {"topic": pa.string(), "partition": pa.int32(), "start": pa.int64(), "end": pa.int64()}
    columns = [column([value], kind) for value, kind in zip(wanted[: len(kinds)], kinds.values(), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=list(kinds))


def read_range(options: SourceOptions, wanted: Range, json_type: Any = None) -> Iterator[Any]:
    """The rows of a range as Arrow batches with the source's columns."""
    parse_json = None if json_type is None else json_parser(json_type)
    for table in tables_of(options, wanted, headers=HEADERS in options.columns):
        with stages.stage(stages.DECODE):
            batches = spark_columns(table, wanted, options.columns, parse_json).to_batches()
        yield from batches
