"""The columns that a sink writes: checked by name and type before anything runs, and brought into one frame."""

from __future__ import annotations

from typing import Any

from semel.spark.options import OptionError
from semel.spark.sink_options import HASH, SinkOptions

BINARY = {"binary", "string"}
TIMES = {"timestamp", "timestamp_ntz"}  # no number: Spark casts one as seconds, and Kafka counts milliseconds
HASH_OF_KEY = "if(key IS NULL, NULL, xxhash64(cast(key AS BINARY)))"  # Spark's own, computed in the JVM


class ColumnError(OptionError):
    """A column that is missing or has a type that cannot be written."""


# In this order, and as these types (None: as it is).
WRITTEN_AS = {
    "key": "binary",
    "value": "binary",
    "headers": None,
    "topic": None,
    "partition": None,  # a cast of what is no partition would make one of it, or fail
    "timestamp": "timestamp",
}


def prepared(df: Any, options: SinkOptions) -> Any:
    """Only what is written, in the types that tasks expect. A DataFrame that is like that already stays as it is: each
    step costs every row, and every question to the JVM costs a small batch."""
    types = dict(df.dtypes)
    check_columns(types, options)
    chosen = [cast(name, types) for name in WRITTEN_AS if name in types and (name != "topic" or options.extra_topics)]
    if options.partitioner == HASH and "key" in types:
        chosen.append(f"{HASH_OF_KEY} AS hash")
    if options.bad_column is not None:
        chosen.append(f"`{options.bad_column.replace('`', '``')}` AS bad")
    return df if chosen == df.columns else df.selectExpr(*chosen)


def cast(name: str, types: dict[str, str]) -> str:
    """The expression for a column in the type that is written."""
    kind = WRITTEN_AS[name]
    return name if kind in (None, types[name]) else f"cast({name} AS {kind}) AS {name}"


def check_columns(types: dict[str, str], options: SinkOptions) -> None:
    if "value" not in types:
        raise ColumnError(
            f"the DataFrame has no column 'value' (it has {', '.join(types) or 'none'}); select what to write, "
            'such as df.selectExpr("to_json(struct(*)) AS value")'
        )
    for name in ("key", "headers", "partition", "timestamp", *(("topic",) if options.extra_topics else ())):
        alike = [given for given in types if given.lower() == name and (name != "timestamp" or types[given] in TIMES)]
        if alike and name not in types:
            raise ColumnError(
                f"the DataFrame has a column {alike[0]!r}, but names count as they are written, and what is not called "
                f"{name!r} would be left out; rename it, such as {alike[0]} AS {name}, or drop it"
            )
    for name in ("key", "value"):
        if name in types and types[name] not in BINARY:
            raise ColumnError(f"column {name!r} is {types[name]}, expected binary or string; cast it")
    if "headers" in types and types["headers"] != "array<struct<key:string,value:binary>>":
        raise ColumnError(f"column 'headers' is {types['headers']}, expected array<struct<key:string,value:binary>>")
    if "topic" in types and types["topic"] != "string":
        raise ColumnError(f"column 'topic' is {types['topic']}, expected string")
    if options.topic is None and "topic" not in types:
        raise ColumnError("the sink has no topic and the DataFrame no column 'topic'; give one of them")
    if "partition" in types and types["partition"] not in ("int", "bigint", "smallint", "tinyint"):
        raise ColumnError(f"column 'partition' is {types['partition']}, expected int")
    if "timestamp" in types and types["timestamp"] not in TIMES:
        raise ColumnError(
            f"column 'timestamp' is {types['timestamp']}, expected timestamp: it becomes the time of the record. Make "
            "one, such as timestamp_millis(timestamp) AS timestamp; or leave the column out, then it is the time of "
            "writing"
        )
    if options.bad_column is not None and types.get(options.bad_column) not in ("boolean", "string"):
        found = types.get(options.bad_column, "not there")
        raise ColumnError(f"bad_column {options.bad_column!r} is {found}, expected a boolean or string column")


def one_frame(given: Any, options: SinkOptions) -> Any:
    """What was given to the sink, a DataFrame or a list of them, as one DataFrame."""
    if not isinstance(given, (list, tuple)):
        return given
    if not given:
        raise OptionError("the sink was called with an empty list; give at least one DataFrame, it may have no rows")
    if len(given) == 1:
        return given[0]
    names = {name for frame in given for name in frame.columns}
    first, *others = (_written(frame, options, names) for frame in given)
    for frame in others:
        first = first.unionByName(frame, allowMissingColumns=True)
    return first


def _written(frame: Any, options: SinkOptions, names: set[str]) -> Any:
    """The columns that are written, in one type in all frames. A column that only others have is null, but for the
    timestamp, which every record has."""
    types = dict(frame.dtypes)
    check_columns(types, options)
    chosen = []
    for name in WRITTEN_AS:
        if name in types:
            chosen.append(cast(name, types))
        elif name == "timestamp" and name in names:
            chosen.append("current_timestamp() AS timestamp")
    if options.bad_column is not None:
        chosen.append(f"`{options.bad_column.replace('`', '``')}`")
    return frame.selectExpr(*chosen)


def written_columns(batch: Any, options: SinkOptions) -> Any:
    """The columns that are written, keys and values as bytes. A topic column counts where there are several topics."""
    import pyarrow as pa

    columns = {}
    for name in WRITTEN_AS:
        if name in batch.schema.names and (name != "topic" or options.extra_topics):
            column = batch.column(name)
            columns[name] = column.cast(pa.binary()) if name in ("key", "value") else column
    if "partition" in columns:
        columns["partition"] = columns["partition"].cast(pa.int64())
    if options.bad_column is not None:
        columns["bad"] = batch.column(options.bad_column)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def check_schema(schema: Any, options: SinkOptions) -> None:
    """The columns that a writer gets. Spark's hash is computed by Spark, so before the writer."""
    types = {f.name: f.dataType.simpleString() for f in schema.fields}
    check_columns(types, options)
    if options.partitioner == HASH and "key" in types and "partition" not in types:
        raise ColumnError(
            'partitioner=hash needs a column partition: use semel.route(df, ..., partitioner="hash") before write'
        )
