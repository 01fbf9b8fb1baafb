"""What a processing function may return, and how that becomes records of the sink."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from typing import Any, NamedTuple

from semel.client.dead_letters import SIZE_HEADER, SOURCE_HEADER, reason_headers, reason_of
from semel.client.errors import ConfigError, FatalError, KafkaError
from semel.client.producer import Producer
from semel.client.producer.batches import RECORD_OVERHEAD_BYTES, RecordPacker
from semel.client.types import ConsumerRecord, number_of
from semel.patterns.process_columns import LAST_TIME_MS, PLAIN, TABLE_FROM_ROWS, columns_of, piece_of, sendable
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.errors import ErrorCode

HOPELESS = (  # a broker returns these for a record whenever it is sent
    ErrorCode.MESSAGE_TOO_LARGE,
    ErrorCode.RECORD_LIST_TOO_LARGE,
    ErrorCode.INVALID_RECORD,  # such as one without a key for a compacted topic
    ErrorCode.INVALID_TIMESTAMP,  # further from the broker's time than the topic allows
    ErrorCode.INVALID_TOPIC_EXCEPTION,
)

AT_ONCE = 200  # records that live together, and what becomes of them: fewer than start the garbage collector
_PACKER = RecordPacker(None, None, sys.maxsize)
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class Output(NamedTuple):
    """A record to write. Without a topic it goes to the sink; without a partition, where its key belongs."""

    value: bytes | str | None
    key: bytes | str | None = None
    topic: str | None = None
    partition: int | None = None
    timestamp: int | datetime | None = None
    headers: Iterable[tuple[str, bytes | None]] = ()


_SIMPLE = frozenset([type(None), bytes, ConsumerRecord, Output])
RowFunction = Callable[[ConsumerRecord], Any]
TableFunction = Callable[[Any], Any]
StateFunction = Callable[[Any, Any], Any]  # of a row or a table, and the state
OnError = Callable[[Any, Exception], Any]
Deliveries = list[Any]


class Made(NamedTuple):
    """What the function made of a batch: `Output` or tables; and the records that it could not take."""

    outputs: list[Any]
    dead_letters: list[Output]


class Sent(NamedTuple):
    records: int
    dead_letters: int
    deliveries: Deliveries


class RecordError(FatalError):
    """The function raised for a record (or a table, named by its first record); its own error is the cause."""

    def __init__(
        self, message: str, code: ErrorCode | None = None, topic: str = "", partition: int = -1, offset: int = -1
    ) -> None:
        super().__init__(message, code)
        self.topic, self.partition, self.offset = topic, partition, offset


@dataclass
class Emitter:
    """Applies the function to a batch and sends what it returns.

    What the function raises for a record goes to `on_error(record, error)`, which returns what to write instead (None:
    nothing), or raises; then the record is a dead letter; without a topic for these it is the end of the loop. Of a
    table, the rows that it fails with are found by halving. Errors of a Kafka client are not about a record: they are
    raised as they are."""

    function: Callable[..., Any]
    sink: str | None
    tables: bool
    dead_letter_topic: str | None = None
    on_error: OnError | None = None
    max_record_bytes: int | None = None  # a record whose output is larger counts as bad; None: the producer refuses it

    def __post_init__(self) -> None:
        self._rows_of: Callable[[Any, ConsumerRecord], Any] = rows_of
        self._as_it_is = _SIMPLE  # types that the function may return without a look at each value
        if self.max_record_bytes is not None:
            self._rows_of, self._as_it_is = self._checked_rows, frozenset([type(None)])

    # -- making --------------------------------------------------------------------------------------------------------
    def outputs(self, batch: Any) -> Made:
        """Everything that the function returns for a batch. Nothing is sent yet, so an error in it sends nothing."""
        made = Made([], [])
        if self.tables:
            self._add_table(batch, made)
        elif isinstance(batch, list) or len(batch) < TABLE_FROM_ROWS:
            self._add_rows([*batch], made)
        else:
            for part, records in batch.parts():
                for start in range(0, part.num_rows, AT_ONCE):
                    self._add_columns([*islice(records, AT_ONCE)], part.slice(start, AT_ONCE), made)
        return made

    def _add_rows(self, records: list[ConsumerRecord], made: Made) -> None:
        """One by one. `_add_columns` makes the same of many."""
        made.outputs.extend(_rows_of_all(records, self._returned(records, made)))

    def _add_columns(self, records: list[ConsumerRecord], part: Any, made: Made) -> None:
        returned = self._returned(records, made)
        piece: Any = piece_of(records, returned, part)
        if piece is None:
            rows = returned if {*map(type, returned)} == {Output} else _rows_of_all(records, returned)
            piece = columns_of(rows) if rows else None
            if piece is None:
                made.outputs.extend(rows)
                return
        last: Any = made.outputs[-1] if made.outputs else None
        if type(last) is type(piece) and last.goes_on(piece):
            last.extend(piece)
        else:
            made.outputs.append(piece)

    def _returned(self, records: list[ConsumerRecord], made: Made) -> list[Any]:
        """What the function returns for each of them; what needs a look, as a list of `Output`."""
        returned: list[Any] = []
        function, as_it_is, to_rows, add = self.function, self._as_it_is, self._rows_of, returned.append
        for record in records:
            try:
                given = function(record)
                add(given if type(given) in as_it_is else to_rows(given, record))
            except KafkaError:
                raise
            except Exception as error:
                add(self._instead(record, error, made))
        return returned

    def _instead(self, record: ConsumerRecord, error: Exception, made: Made) -> list[Output]:
        bad = Made([], made.dead_letters)
        self._add_bad(record, record, error, bad)
        return bad.outputs

    def _add_bad(self, given: Any, record: ConsumerRecord, error: Exception, made: Made) -> None:
        """What `on_error` makes of what the function was given, a record or a table of it; else a dead letter."""
        if self.on_error is not None:
            try:
                returned = self.on_error(given, error)
                if self.tables:
                    made.outputs.extend(self._checked_tables(returned))
                else:
                    made.outputs.extend(rows_of(self._rows_of(returned, record), record))
                return
            except KafkaError:
                raise
            except Exception as failure:
                error = failure
        self._add_dead_letter(record, error, made)

    def _checked_rows(self, returned: Any, record: ConsumerRecord) -> Any:
        assert self.max_record_bytes is not None
        if _plain_bytes(returned, record) <= self.max_record_bytes - OVERHEAD_BYTES:
            return returned  # nothing can be wrong with it
        return checked_rows(rows_of(returned, record), self.max_record_bytes)

    def _checked_tables(self, returned: Any) -> list[Any]:
        if returned is None:
            return []
        _refuse_other_than_tables(returned)
        if self.max_record_bytes is not None:
            check_tables(returned, self.max_record_bytes)
        return [returned]

    def _add_table(self, table: Any, made: Made) -> None:
        try:
            made.outputs.extend(self._checked_tables(self.function(table)))
        except KafkaError:
            raise
        except Exception as error:
            self._add_bad_table(table, error, made)

    def _add_bad_table(self, table: Any, error: Exception, made: Made) -> None:
        if self.on_error is None and self.dead_letter_topic is None:
            raise _record_error(_range_text(table), error, first_record(table)) from error
        if table.num_rows > 1:
            half = table.num_rows // 2
            self._add_table(table.slice(0, half), made)
            self._add_table(table.slice(half), made)
        else:
            self._add_bad(table, first_record(table), error, made)

    def _add_dead_letter(self, record: ConsumerRecord, error: Exception, made: Made) -> None:
        place = f"{record.topic}-{record.partition}"
        if self.dead_letter_topic is None:
            raise _record_error(f"{place} at offset {record.offset}", error, record) from error
        why = [*reason_headers(reason_of(error), self.sink), (SOURCE_HEADER, f"{place}@{record.offset}".encode())]
        headers = (*(record.headers or ()), *why)
        letter = Output(record.value, record.key, self.dead_letter_topic, None, _timestamp(record), headers)
        if self.max_record_bytes is not None and _size_bytes(letter) > self.max_record_bytes:
            letter = _beginning(letter, why, self.max_record_bytes)
        made.dead_letters.append(letter)

    # -- sending -------------------------------------------------------------------------------------------------------
    def send(self, producer: Producer, made: Made) -> Sent:
        dead = self.send_outputs(producer, made.dead_letters)
        if self.tables:
            count, deliveries = self._send_tables(producer, made.outputs)
        else:
            count, deliveries = self._send_rows(producer, made.outputs)
        return Sent(count, len(dead), deliveries + dead if dead else deliveries)

    def _send_rows(self, producer: Producer, outputs: list[Any]) -> tuple[int, Deliveries]:
        """Many plain rows of one topic are sent as a table, which costs a fifth of as many calls."""
        count, deliveries = 0, []
        for is_row, group in groupby(outputs, lambda piece: type(piece) is Output):
            pieces = [*group]
            if is_row:
                columns = columns_of(pieces) if len(pieces) >= TABLE_FROM_ROWS else None
                if columns is None:
                    deliveries += self.send_outputs(producer, pieces)
                    count += len(pieces)
                    continue
                pieces = [columns]
            for piece in pieces:
                deliveries.append(producer.send_table(piece.topic or self._target(), piece.table()))
                count += piece.row_count
        return count, deliveries

    def send_outputs(self, producer: Producer, outputs: list[Output]) -> Deliveries:
        deliveries: Deliveries = []
        for output in outputs:
            value, key, topic, partition, timestamp, headers = output
            target = topic or self._target()
            deliveries.append(producer.send(target, value, key, partition, timestamp, headers or None))
        return deliveries

    def _send_tables(self, producer: Producer, outputs: list[Any]) -> tuple[int, Deliveries]:
        count, deliveries = 0, []
        for returned in outputs:
            by_topic = returned if isinstance(returned, Mapping) else {self._target(): returned}
            for topic, table in by_topic.items():
                if table.num_rows:
                    deliveries.append(producer.send_table(topic, sendable(table)))
                    count += table.num_rows
        return count, deliveries

    def _target(self) -> str:
        if self.sink is None:
            raise ConfigError(
                "there is no sink topic: give process() one, or return Output(..., topic=...) or {topic: table}"
            )
        return self.sink


def _rows_of_all(records: list[ConsumerRecord], returned: list[Any]) -> list[Output]:
    return [row for given, record in zip(returned, records, strict=True) for row in rows_of(given, record)]


def _plain_bytes(returned: Any, record: ConsumerRecord) -> int:
    """The size of an output that is as `send` wants it; more than any limit if it must be looked at."""
    kind = type(returned)
    if kind is bytes:
        return len(returned) + len(record.key or b"")
    if kind is Output:
        value, key, topic, partition, timestamp, headers = returned
        is_plain = topic is partition is timestamp is None and headers == () and {type(value), type(key)} <= PLAIN
    else:
        value, key = record.value, record.key
        is_plain = returned is record and not record.headers and record.timestamp <= LAST_TIME_MS
    return len(value or b"") + len(key or b"") if is_plain else sys.maxsize


def rows_of(returned: Any, record: ConsumerRecord) -> list[Output]:
    """What a row function returned, as outputs. A bare value keeps the key of its input; a record passes as it is."""
    if returned is None:
        return []
    if isinstance(returned, Output):
        return [returned]
    if isinstance(returned, bytes | str):
        return [Output(returned, record.key)]
    if isinstance(returned, ConsumerRecord):
        return [Output(returned.value, returned.key, None, None, _timestamp(returned), returned.headers)]
    if isinstance(returned, Iterable) and not isinstance(returned, Mapping | bytearray | memoryview):
        return [output for part in returned for output in rows_of(part, record)]
    raise ConfigError(
        f"the function returned {type(returned).__name__}; expected None, bytes, str, Output, the record, or several "
        "of them in a list or generator"
    )


def _refuse_other_than_tables(returned: Any) -> None:
    import pyarrow as pa

    for table in returned.values() if isinstance(returned, Mapping) else [returned]:
        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise ConfigError(
                f"the function returned {type(table).__name__}; with tables=True expected None, a pyarrow.Table, or "
                "several by topic: {topic: table}"
            )


def _timestamp(record: ConsumerRecord) -> int | None:
    """None for a record that has none (-1): the producer would refuse that."""
    return record.timestamp if record.timestamp >= 0 else None


# -- bad records -------------------------------------------------------------------------------------------------------
def _record_error(where: str, error: Exception, record: ConsumerRecord) -> RecordError:
    return RecordError(
        f"{where}: the function raised {type(error).__name__}: {error}. Correct it, or say what happens to such "
        "records with dead_letter_topic= or on_error=",
        None,
        record.topic,
        record.partition,
        record.offset,
    )


def first_record(table: Any) -> ConsumerRecord:
    row = table.slice(0, 1).to_pylist()[0] if table.num_rows else {}
    headers = tuple((entry["key"], entry["value"]) for entry in row.get("headers") or ())
    return ConsumerRecord(
        row.get("topic", ""),
        row.get("partition", -1),
        row.get("offset", -1),
        row.get("timestamp", -1),
        row.get("key"),
        row.get("value"),
        headers,
    )


def _range_text(table: Any) -> str:
    ranges = table.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")])
    words = []
    for row in ranges.sort_by([("topic", "ascending"), ("partition", "ascending")]).to_pylist():
        low, high = row["offset_min"], row["offset_max"]
        offsets = f"offset {low}" if low == high else f"offsets {low} to {high}"
        words.append(f"{row['topic']}-{row['partition']} {offsets}")
    return ", ".join(words)


# Whether the outputs of a record can be written at all: what the producer would refuse, before anything is sent.
OVERHEAD_BYTES = RECORD_OVERHEAD_BYTES + HEADER_SIZE


class OutputTooLargeError(ValueError):
    """The function made a record that is larger than max.request.size."""


def check_rows(outputs: Iterable[Any], limit_bytes: int) -> None:
    for output in outputs:
        _check(_size_bytes(output), limit_bytes)


def checked_rows(outputs: Iterable[Output], limit_bytes: int) -> list[Output]:
    """Rows as they will be sent; an ordinary error, which is the record's, for one that the producer would refuse."""
    made = []
    for output in outputs:
        value, key, topic, partition, timestamp, headers = output
        if not (type(value) in PLAIN and type(key) in PLAIN and timestamp is None and headers == ()):
            try:
                row, _ = _PACKER.pack("", value, key, timestamp, headers, 0.0)
            except ConfigError as error:
                raise ValueError(str(error)) from error
            key, value, at_ms, headers = row
            timestamp = None if timestamp is None else at_ms
            output = Output(value, key, topic, partition, timestamp, headers)
        if topic is not None and not _is_topic_name(topic):
            raise ValueError(f"{topic!r} cannot name a topic; that takes 1-249 of the characters a-z A-Z 0-9 . _ -")
        if partition is not None:
            output = output._replace(partition=_partition(partition))
        made.append(output)
    check_rows(made, limit_bytes)
    return made


def _partition(given: Any) -> int:
    """Also of numpy's integers, which a hash or a column gives."""
    number = number_of(given)
    if number < 0:
        raise ValueError(f"partition is {given!r}; expected a number from 0 up")
    return number


def _is_topic_name(topic: Any) -> bool:
    return isinstance(topic, str) and _TOPIC_NAME.fullmatch(topic) is not None and topic not in (".", "..")


def check_tables(returned: Any, limit_bytes: int) -> None:
    for table in returned.values() if isinstance(returned, Mapping) else (returned,):
        if table.nbytes > limit_bytes - OVERHEAD_BYTES:  # else no row can be too large
            _check(OVERHEAD_BYTES + _longest_row(table), limit_bytes)


def _size_bytes(output: Iterable[Any]) -> int:
    value, key, _, _, _, headers = output
    size_bytes = OVERHEAD_BYTES + _length(value) + _length(key)
    return size_bytes + sum(10 + 3 * len(name) + _length(data) for name, data in headers or ())


def _beginning(letter: Output, why: Iterable[tuple[str, bytes]], limit_bytes: int) -> Output:
    """A dead letter that its own headers make too large: the beginning of key and value, as on Spark."""
    value, key = letter.value, letter.key
    return letter._replace(
        value=None if value is None else value[: limit_bytes // 2],
        key=None if key is None else key[: limit_bytes // 4],
        headers=(*why, (SIZE_HEADER, b"%d" % (_length(value) + _length(key)))),
    )


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
