"""The functions that a program gives a client as serializers and deserializers, as the client calls them.

Most take one argument. Those of confluent-kafka, which work with a schema registry, also take a context: the topic, key
or value, and the headers. A program that has one of them has imported that package, so they are recognised without
importing it here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from semel.client.errors import ConfigError

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
