"""What a processing function may return, and how that becomes records of the sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from semel.client.consumer_types import ConsumerRecord
from semel.client.errors import ConfigError
from semel.client.producer import Producer

# Columns of an input table that name its place there, not in the sink.
PLACE_COLUMNS = ("topic", "partition", "offset")
TARGET_COLUMN = "to_partition"


class Output(NamedTuple):
    """A record to write. Without a topic it goes to the sink; without a partition, where its key belongs."""

    value: bytes | str | None
    key: bytes | str | None = None
    topic: str | None = None
    partition: int | None = None
    timestamp: int | None = None
    headers: Iterable[tuple[str, bytes | None]] = ()


RowFunction = Callable[[ConsumerRecord], Any]
TableFunction = Callable[[Any], Any]
Deliveries = list[Any]


class Emitter:
    """Applies the function to a batch and sends what it returns."""

    def __init__(self, function: RowFunction | TableFunction, sink: str | None, tables: bool) -> None:
        self._function = function
        self._sink = sink
        self._tables = tables

    def outputs(self, batch: Any) -> list[Any]:
        """Everything that the function returns for a batch. Nothing is sent yet, so an error in it sends nothing."""
        if self._tables:
            returned = self._function(batch)
            return [] if returned is None else [returned]
        made: list[Output] = []
        for record in batch:
            made += rows_of(self._function(record), record)
        return made

    def send(self, producer: Producer, outputs: list[Any]) -> tuple[int, Deliveries]:
        """(how many records, their deliveries)."""
        if self._tables:
            return self._send_tables(producer, outputs)
        deliveries: Deliveries = []
        for output in outputs:
            value, key, topic, partition, timestamp, headers = output
            target = topic or self._target()
            deliveries.append(producer.send(target, value, key, partition, timestamp, headers or None))
        return len(deliveries), deliveries

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
        if self._sink is None:
            raise ConfigError(
                "there is no sink topic: give process() one, or return Output(..., topic=...) or {topic: table}"
            )
        return self._sink


def rows_of(returned: Any, record: ConsumerRecord) -> list[Output]:
    """What a row function returned, as outputs. A bare value keeps the key of its input; a record passes as it is."""
    if returned is None:
        return []
    if isinstance(returned, Output):
        return [returned]
    if isinstance(returned, bytes | str):
        return [Output(returned, record.key)]
    if isinstance(returned, ConsumerRecord):
        return [Output(returned.value, returned.key, None, None, returned.timestamp, returned.headers)]
    if isinstance(returned, Iterable) and not isinstance(returned, Mapping | bytearray | memoryview):
        return [output for part in returned for output in rows_of(part, record)]
    raise ConfigError(
        f"the function returned {type(returned).__name__}; expected None, bytes, str, Output, the record, or several "
        "of them in a list or generator"
    )


def sendable(table: Any) -> Any:
    """A table for `send_table`: without the place of its input; `to_partition` says where rows go, else their keys."""
    dropped = {*PLACE_COLUMNS, TARGET_COLUMN}
    if "headers" in table.column_names and table.column("headers").null_count == table.num_rows:
        dropped.add("headers")
    chosen = table.select([name for name in table.column_names if name not in dropped])
    if TARGET_COLUMN in table.column_names:
        return chosen.append_column("partition", table.column(TARGET_COLUMN))
    return chosen
