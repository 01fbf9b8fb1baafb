"""Whether the outputs of a record can be written at all: what the producer would refuse, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from semel.client.batches import RECORD_OVERHEAD_BYTES
from semel.protocol.batch import HEADER_SIZE

OVERHEAD_BYTES = RECORD_OVERHEAD_BYTES + HEADER_SIZE


class OutputTooLargeError(ValueError):
    """The function made a record that is larger than max.request.size."""


def check_rows(outputs: Iterable[Any], limit_bytes: int) -> None:
    for value, key, _, _, _, headers in outputs:
        size_bytes = OVERHEAD_BYTES + _length(value) + _length(key)
        size_bytes += sum(10 + 3 * len(name) + _length(data) for name, data in headers or ())
        _check(size_bytes, limit_bytes)


def check_tables(returned: Any, limit_bytes: int) -> None:
    for table in returned.values() if isinstance(returned, Mapping) else (returned,):
        if table.nbytes > limit_bytes - OVERHEAD_BYTES:  # else no row can be too large
            _check(OVERHEAD_BYTES + _longest_row(table), limit_bytes)


def _check(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise OutputTooLargeError(f"the output takes about {size_bytes} bytes; max.request.size is {limit_bytes}")


def _length(data: bytes | str | None) -> int:
    return 0 if data is None else len(data.encode()) if isinstance(data, str) else len(data)


def _longest_row(table: Any) -> int:
    """Key and value together."""
    import pyarrow as pa
    import pyarrow.compute as pc

    total: Any = None
    for name in ("key", "value"):
        if name in table.column_names and not pa.types.is_null(table.column(name).type):
            column = table.column(name).cast(pa.large_binary())
            lengths = pc.fill_null(pc.binary_length(column), 0)
            total = lengths if total is None else pc.add(total, lengths)
    longest = None if total is None else pc.max(total).as_py()
    return longest or 0
