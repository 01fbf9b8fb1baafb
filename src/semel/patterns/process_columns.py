"""Many rows of a loop as tables, without an object for each of them: what `send_table` takes, at a fraction of the
price of as many calls of `send`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_, itemgetter
from typing import Any, NamedTuple

from semel.client.types import ConsumerRecord

TABLE_FROM_ROWS = 256  # so many rows become a table
LAST_TIME_MS = 2**53
PLAIN_BYTES = 8_192  # key and value of such a row together
PLAIN = {bytes, type(None)}
_key_of = itemgetter(ConsumerRecord._fields.index("key"))
# Columns of an input table that name its place there, not in the sink.
PLACE_COLUMNS = ("topic", "partition", "offset")
TARGET_COLUMN = "to_partition"


class Columns(NamedTuple):
    """Rows of one topic (None: the sink) that have no headers and whose partition their key says."""

    topic: str | None
    values: list[bytes | None]
    keys: list[bytes | None]
    times: list[int] | None  # None: now

    @property
    def row_count(self) -> int:
        return len(self.values)

    def goes_on(self, other: Columns) -> bool:
        return self.topic == other.topic and (self.times is None) == (other.times is None)

    def extend(self, other: Columns) -> None:
        self.values.extend(other.values)
        self.keys.extend(other.keys)
        if self.times is not None and other.times is not None:
            self.times.extend(other.times)

    def table(self) -> Any:
        import numpy as np
        import pyarrow as pa

        from semel.protocol.arrow_numbers import binaries, to_arrow

        columns = {"key": binaries(self.keys), "value": binaries(self.values)}
        if self.times is not None:
            columns["timestamp"] = to_arrow(np.array(self.times, np.int64))
        return pa.table(columns)


class Passed(NamedTuple):
    """Records that go to the sink as they were read."""

    topic: None
    batches: list[Any]

    @property
    def row_count(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def goes_on(self, other: Passed) -> bool:
        return True

    def extend(self, other: Passed) -> None:
        self.batches.extend(other.batches)

    def table(self) -> Any:
        import pyarrow as pa

        return sendable(pa.Table.from_batches(self.batches))


def piece_of(records: Sequence[ConsumerRecord], returned: Sequence[Any], batch: Any) -> Columns | Passed | None:
    """What a function returned for these records, if that is the same simple thing for all of them: a value, the record
    itself, or nothing for some. `batch` holds the records as columns."""
    kinds = {*map(type, returned)}
    if kinds == {type(None)}:
        return None
    if kinds <= PLAIN:
        keys: Iterable[Any] = map(_key_of, records)
        if type(None) in kinds:
            keys = compress(keys, [value is not None for value in returned])
            returned = [value for value in returned if value is not None]
        return _plain(None, [*returned], [*keys], None)
    if kinds <= {ConsumerRecord, type(None)}:
        return _passed(records, returned, batch)
    return None


def _passed(records: Sequence[ConsumerRecord], returned: Sequence[Any], batch: Any) -> Passed | None:
    import numpy as np

    from semel.protocol.arrow_numbers import to_arrow, to_numpy

    is_same = [*map(is_, records, returned)]
    if not all(is_same):
        if sum(is_same) + returned.count(None) < len(records):
            return None
        batch = batch.filter(to_arrow(np.array(is_same)))
    times = to_numpy(batch.column("timestamp"))
    if len(times) and not 0 <= times.min() <= times.max() <= LAST_TIME_MS:
        return None
    return Passed(None, [batch])


def columns_of(outputs: Sequence[Any]) -> Columns | None:
    """Rows of one topic as columns. None: they have what `send` has to look at (text, headers, a partition, sizes)."""
    values, keys, topics, partitions, timestamps, headers = zip(*outputs, strict=True)
    has_times = None not in timestamps
    if (  # the order matters: the last may be asked only where those before it do not hold
        any(headers)
        or len(set(topics)) > 1
        or any(partition is not None for partition in partitions)
        or set(map(type, timestamps)) != {int if has_times else type(None)}
        or (has_times and not 0 <= min(timestamps) <= max(timestamps) <= LAST_TIME_MS)
    ):
        return None
    return _plain(topics[0], [*values], [*keys], [*timestamps] if has_times else None)


def _plain(topic: str | None, values: list[Any], keys: list[Any], times: list[int] | None) -> Columns | None:
    is_plain = {*map(type, values), *map(type, keys)} <= PLAIN and _longest(values) + _longest(keys) <= PLAIN_BYTES
    return Columns(topic, values, keys, times) if is_plain else None


def _longest(values: Iterable[bytes | None]) -> int:
    return max(map(len, filter(None, values)), default=0)


def sendable(table: Any) -> Any:
    """A table for `send_table`: without the place of its input; `to_partition` says where rows go, else their keys."""
    dropped = {*PLACE_COLUMNS, TARGET_COLUMN}
    if "headers" in table.column_names and table.column("headers").null_count == table.num_rows:
        dropped.add("headers")
    chosen = table.select([name for name in table.column_names if name not in dropped])
    if TARGET_COLUMN in table.column_names:
        return chosen.append_column("partition", table.column(TARGET_COLUMN))
    return chosen
