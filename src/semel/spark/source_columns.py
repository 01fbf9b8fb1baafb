"""The columns of the source: those of Spark's own Kafka source, or the ones that a query asks for.

Spark does not tell a Python source which columns a query uses, and makes rows of all that it gets. Columns that nobody
reads cost a third of the source's time; the option `columns` leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.spark.planning import Range

TYPES = {
    "key": "BINARY",
    "value": "BINARY",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "timestampType": "INT",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
}
HEADERS = "headers"


def chosen_columns(options: Mapping[str, Any]) -> tuple[str, ...]:
    """What the options `columns` and `includeHeaders` ask for; unknown names are left to the caller."""
    given = {str(name).lower(): str(value) for name, value in options.items()}
    names = {name.lower(): name for name in TYPES}
    if "columns" in given:
        words = [word.strip() for word in given["columns"].split(",") if word.strip()]
        return tuple(dict.fromkeys(names.get(word.lower(), word) for word in words))
    wants_headers = given.get("includeheaders", "false").lower() == "true"
    return tuple(name for name in TYPES if name != HEADERS or wants_headers)


def schema_of(columns: Sequence[str]) -> str:
    return ", ".join(f"{name} {TYPES[name]}" for name in columns)


def spark_columns(table: Any, wanted: Range, columns: Sequence[str]) -> Any:
    """A decoded table as Spark's source would give it."""
    import pyarrow as pa

    return pa.table({name: _column(pa, table, wanted, name) for name in columns})


def _column(pa: Any, table: Any, wanted: Range, name: str) -> Any:
    rows = table.num_rows
    match name:
        case "topic":
            one = pa.array([wanted.topic])
            return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), rows), one).cast(pa.string())
        case "partition":
            return pa.repeat(pa.scalar(wanted.partition, pa.int32()), rows)
        case "timestamp":
            return table.column("timestamp").cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC"))
        case "timestampType":
            return table.column("timestamp_type").cast(pa.int32())
        case _:
            return table.column(name)
