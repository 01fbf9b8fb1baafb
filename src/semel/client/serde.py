"""The functions that a program gives a client as serializers and deserializers, as the client calls them.

Most take one argument. Those of confluent-kafka, which work with a schema registry, also take a context: the topic, key
or value, and the headers. A program that has one of them has imported that package, so they are recognised without
importing it here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord, DeserializationError, TopicPartition

_CONTEXTS = "confluent_kafka.serialization"
_ASYNC = "confluent_kafka.schema_registry.serde"


class InContext:
    """A serializer or deserializer of confluent-kafka, for the keys or the values of one client."""

    __slots__ = ("_context", "_field", "_function")

    def __init__(self, function: Any, part: str) -> None:
        contexts = sys.modules[_CONTEXTS]
        self._function = function
        self._context = contexts.SerializationContext
        self._field = contexts.MessageField(part)

    def __call__(self, data: Any, topic: str, headers: list[Any]) -> Any:
        """A serializer may add to the headers."""
        return self._function(data, self._context(topic, self._field, headers))


def checked(**functions: Any) -> Iterable[Any]:
    """Each of `key_serializer`, `value_deserializer` and so on as it is called: None, a function of one argument, or
    `InContext`. Raises if it cannot be called so; the names of Java's classes cannot."""
    return [_checked(name, function) for name, function in functions.items()]


def _checked(name: str, function: Any) -> Any:
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"{name} is {function!r}; it must be a function, such as semel.serializers.to_json")
    part, role = name.split("_")
    roles = _roles(function)
    if not roles:
        return function
    kind = type(function).__name__
    if role not in roles:
        raise ConfigError(f"{name} is an instance of {kind}, which is a {roles[0]}; give it as {part}_{roles[0]}")
    if _must_be_awaited(function):
        raise ConfigError(
            f"{name} is an instance of {kind}, whose result must be awaited: give {kind.removeprefix('Async')} "
            "instead, or await it in the program and send or read bytes"
        )
    return InContext(function, part)


def _roles(function: Any) -> list[str]:
    """What one of confluent-kafka's is: a serializer or a deserializer; nothing for a function of the program."""
    contexts = sys.modules.get(_CONTEXTS)
    if contexts is None:
        return []
    kinds = {"serializer": contexts.Serializer, "deserializer": contexts.Deserializer}
    return [role for role, kind in kinds.items() if isinstance(function, kind)]


def _must_be_awaited(function: Any) -> bool:
    kind = getattr(sys.modules.get(_ASYNC), "AsyncBaseSerde", None)
    return kind is not None and isinstance(function, kind)


# --- Keys and values of rows through the functions that a program gave. No I/O ---


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
