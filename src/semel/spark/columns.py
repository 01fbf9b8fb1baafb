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


def prepared(df: Any, options: SinkOptions) -> Any:
    """Only what is written, in the types that tasks expect."""
    from pyspark.sql.functions import expr

    types = dict(df.dtypes)
    check_columns(types, options)
    chosen = [df[name].cast("binary").alias(name) for name in ("key", "value") if name in types]
    if options.partitioner == HASH and "key" in types:
        chosen.append(expr(HASH_OF_KEY).alias("hash"))
    if "headers" in types:
        chosen.append(df["headers"])
    if "topic" in types and options.extra_topics:
        chosen.append(df["topic"])
    if "partition" in types and types["partition"] in ("int", "bigint", "smallint", "tinyint"):
        chosen.append(df["partition"].cast("int").alias("partition"))
    if "timestamp" in types:
        chosen.append(df["timestamp"].cast("timestamp").alias("timestamp"))
    if options.bad_column is not None:
        chosen.append(df[options.bad_column].alias("bad"))
    return df.select(*chosen)


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
