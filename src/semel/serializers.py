"""Ready-made functions for `key_serializer`, `value_serializer`, `key_deserializer` and `value_deserializer`.

    from semel.serializers import from_json, to_json

    producer = semel.Producer(bootstrap_servers="localhost:9092", value_serializer=to_json)
    consumer = semel.Consumer(bootstrap_servers="localhost:9092", value_deserializer=from_json)

Any function of one argument will do as well. None, Kafka's tombstone, is never given to them.

Avro, JSON Schema and Protobuf with a schema registry are confluent-kafka's classes, which clients take as they are.
They can be imported from here, too, and are loaded when first used (`pip install 'semel[registry]'`):

    from semel.serializers import AvroSerializer, SchemaRegistryClient

    registry = SchemaRegistryClient({"url": "http://localhost:8081"})
    producer = semel.Producer(bootstrap_servers="localhost:9092", value_serializer=AvroSerializer(registry, schema))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient as SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer as AvroDeserializer
    from confluent_kafka.schema_registry.avro import AvroSerializer as AvroSerializer
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer as JSONDeserializer
    from confluent_kafka.schema_registry.json_schema import JSONSerializer as JSONSerializer
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer as ProtobufDeserializer
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer as ProtobufSerializer

_JSON = msgspec.json.Encoder()

_REGISTRY = "confluent_kafka.schema_registry"
_HOMES = {
    "SchemaRegistryClient": _REGISTRY,
    "AvroSerializer": f"{_REGISTRY}.avro",
    "AvroDeserializer": f"{_REGISTRY}.avro",
    "JSONSerializer": f"{_REGISTRY}.json_schema",
    "JSONDeserializer": f"{_REGISTRY}.json_schema",
    "ProtobufSerializer": f"{_REGISTRY}.protobuf",
    "ProtobufDeserializer": f"{_REGISTRY}.protobuf",
}


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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ImportError as missing:
        raise ImportError(
            f"{name} is a class of confluent-kafka and cannot be imported ({missing}): pip install 'semel[registry]'",
            name=missing.name,
        ) from missing
