"""Several DataFrames of one micro-batch as one: what a sink writes in one transaction must come in one call."""

from __future__ import annotations

from typing import Any

from semel.spark.columns import WRITTEN_AS, check_columns
from semel.spark.options import OptionError
from semel.spark.sink_options import SinkOptions


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
    for name, kind in WRITTEN_AS.items():
        if name in types:
            chosen.append(name if kind in (None, types[name]) else f"cast({name} AS {kind}) AS {name}")
        elif name == "timestamp" and name in names:
            chosen.append("current_timestamp() AS timestamp")
    if options.bad_column is not None:
        chosen.append(f"`{options.bad_column.replace('`', '``')}`")
    return frame.selectExpr(*chosen)
