"""Keys and values of rows through the functions that a program gave. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from semel.client.serde import InContext
from semel.client.types import ConsumerRecord, DeserializationError, TopicPartition

Deserializer = Callable[[bytes], Any] | InContext


class Deserializers(NamedTuple):
    key: Deserializer | None = None
    value: Deserializer | None = None

    def apply(self, records: Sequence[ConsumerRecord]) -> tuple[list[ConsumerRecord], DeserializationError | None]:
        """The records up to the first that cannot be read, and why it cannot."""
        of_key, of_value = self
        made: list[ConsumerRecord] = []
        part, data = "key", None
        for record in records:
            topic, partition, offset, timestamp, key, value, headers = record
            try:
                part, data = "key", key
                if of_key is not None and key is not None:
                    key = of_key(key, topic, list(headers)) if isinstance(of_key, InContext) else of_key(key)
                part, data = "value", value
                if of_value is not None and value is not None:
                    value = (
                        of_value(value, topic, list(headers)) if isinstance(of_value, InContext) else of_value(value)
                    )
            except Exception as error:
                return made, _failed(record, part, data, error)
            made.append(ConsumerRecord(topic, partition, offset, timestamp, key, value, headers))
        return made, None


def _failed(record: ConsumerRecord, part: str, data: bytes | None, error: Exception) -> DeserializationError:
    partition = TopicPartition(record.topic, record.partition)
    failure = DeserializationError(
        f"{partition}: the {part} at offset {record.offset} ({len(data or b'')} bytes) cannot be deserialized: "
        f"{type(error).__name__}: {error}; poll again to retry it, or pass over it with "
        f"seek({partition!r}, {record.offset + 1})",
        None,
        partition,
        record.offset,
        record,
    )
    failure.__cause__ = error
    return failure
