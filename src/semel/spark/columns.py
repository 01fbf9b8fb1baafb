"""The columns that a sink writes: checked by name and type before anything runs."""

from __future__ import annotations

from typing import Any

from semel.spark.options import OptionError
from semel.spark.sink_options import HASH, SinkOptions

KNOWN = ("key", "value", "headers", "topic", "partition", "timestamp")
BINARY = {"binary", "string"}
HASH_OF_KEY = "if(key IS NULL, NULL, xxhash64(cast(key AS BINARY)))"  # Spark's own, computed in the JVM


class ColumnError(OptionError):
    """A column that is missing or has a type that cannot be written."""


# In this order, and as these types (None: as it is).
WRITTEN_AS = {
    "key": "binary",
    "value": "binary",
    "headers": None,
    "topic": None,
    "partition": "int",
    "timestamp": "timestamp",
}


def prepared(df: Any, options: SinkOptions) -> Any:
    """Only what is written, in the types that tasks expect. A DataFrame that is like that already stays as it is: each
    step costs every row, and every question to the JVM costs a small batch."""
    types = dict(df.dtypes)
    check_columns(types, options)
    chosen = []
    for name, kind in WRITTEN_AS.items():
        if name in types and (name != "topic" or options.extra_topics):
            chosen.append(name if kind in (None, types[name]) else f"cast({name} AS {kind}) AS {name}")
    if options.partitioner == HASH and "key" in types:
        chosen.append(f"{HASH_OF_KEY} AS hash")
    if options.bad_column is not None:
        chosen.append(f"`{options.bad_column.replace('`', '``')}` AS bad")
    return df if chosen == df.columns else df.selectExpr(*chosen)


def check_columns(types: dict[str, str], options: SinkOptions) -> None:
    if "value" not in types:
        raise ColumnError(
            f"the DataFrame has no column 'value' (it has {', '.join(types) or 'none'}); select what to write, "
            'such as df.selectExpr("to_json(struct(*)) AS value")'
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
    if options.bad_column is not None and types.get(options.bad_column) not in ("boolean", "string"):
        found = types.get(options.bad_column, "not there")
        raise ColumnError(f"bad_column {options.bad_column!r} is {found}, expected a boolean or string column")
