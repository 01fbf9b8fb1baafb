"""The source's column `json`: values that are JSON, read by the task that fetches them.

Spark's `from_json` is an expression. The optimizer moves filters on what it returns below it, and each field that a
filter names becomes a `from_json` of its own: a query that filters parses every value two or three times. A column of
the source is parsed once. Each value is read on its own, strictly: one that is not an object with fields of these types
is null, and so is the column of a record without a value.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from operator import attrgetter
from typing import Annotated, Any, TypedDict

import msgspec

from semel.spark.options import OptionError

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
