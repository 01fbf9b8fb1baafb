"""Ready-made functions for `key_serializer`, `value_serializer`, `key_deserializer` and `value_deserializer`.

    from semel.serializers import from_json, to_json

    producer = semel.Producer(bootstrap_servers="localhost:9092", value_serializer=to_json)
    consumer = semel.Consumer(bootstrap_servers="localhost:9092", value_deserializer=from_json)

Any function of one argument will do as well. None, Kafka's tombstone, is never given to them.
"""

from __future__ import annotations

from typing import Any

import msgspec

_JSON = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """JSON in UTF-8 without spaces; also of dataclasses, datetimes and msgspec's structs."""
    return _JSON.encode(value)


def from_json(data: bytes) -> Any:
    return msgspec.json.decode(data)


def to_text(value: str) -> bytes:
    """UTF-8."""
    return value.encode()


def from_text(data: bytes) -> str:
    return data.decode()
