"""Which serializers and deserializers a client takes, and that confluent-kafka is only loaded by those who use it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka.schema_registry import AsyncSchemaRegistryClient
from confluent_kafka.schema_registry.avro import AsyncAvroDeserializer, AsyncAvroSerializer
from confluent_kafka.serialization import StringDeserializer, StringSerializer

import semel
from semel import serializers
from semel.client.serde import InContext, checked

PLACE = {"bootstrap_servers": "localhost:1"}


def test_functions_of_the_program_are_called_with_the_data_alone() -> None:
    assert list(checked(key_serializer=str.encode, value_serializer=None)) == [str.encode, None]


@pytest.mark.parametrize("part", ["key", "value"])
def test_those_of_confluent_kafka_get_topic_field_and_headers(part: str) -> None:
    seen: list[Any] = []

    class Noted(StringSerializer):
        def __call__(self, obj: Any, ctx: Any = None) -> bytes:
            seen.append((obj, ctx.topic, ctx.field, ctx.headers))
            return b"made"

    (made,) = checked(**{f"{part}_serializer": Noted()})
    assert isinstance(made, InContext)
    headers = [("a", b"1")]
    assert made("data", "orders", headers) == b"made"
    assert seen == [("data", "orders", part, headers)]
    assert seen[0][3] is headers, "it may add to them"


def test_a_deserializer_for_a_producer_is_refused() -> None:
    with pytest.raises(semel.ConfigError, match=r"value_serializer is .*StringDeserializer.* give it as value_deser"):
        semel.Producer(**PLACE, value_serializer=StringDeserializer())
    with pytest.raises(semel.ConfigError, match=r"key_deserializer is .*StringSerializer.* give it as key_serializer"):
        semel.Consumer(**PLACE, key_deserializer=StringSerializer())


def test_those_that_must_be_awaited_are_refused_with_the_way_out() -> None:
    async def make() -> tuple[Any, Any]:
        client = AsyncSchemaRegistryClient.new_client({"url": "mock://"})
        return await AsyncAvroSerializer(client, '"string"'), await AsyncAvroDeserializer(client)

    serializer, deserializer = asyncio.run(make())
    for kind in (semel.Producer, semel.AsyncProducer):
        with pytest.raises(semel.ConfigError, match=r"value_serializer .*awaited: give AvroSerializer instead"):
            kind(**PLACE, value_serializer=serializer)
    for kind in (semel.Consumer, semel.AsyncConsumer):
        with pytest.raises(semel.ConfigError, match=r"key_deserializer .*awaited: give AvroDeserializer instead"):
            kind(**PLACE, key_deserializer=deserializer)


# --- the extra ---


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_clients_with_plain_serializers_load_nothing_of_confluent_kafka() -> None:
    code = (
        "import sys, semel\n"
        "from semel.serializers import from_json, to_json\n"
        "with semel.Producer(bootstrap_servers='localhost:1', value_serializer=to_json): pass\n"
        "with semel.Consumer(bootstrap_servers='localhost:1', value_deserializer=from_json): pass\n"
        "print(*(name for name in sys.modules if name.startswith(('confluent_kafka', 'fastavro'))))\n"
    )
    assert run(code) == ""


@pytest.mark.parametrize("name", serializers._HOMES)
def test_the_registry_can_be_imported_from_serializers(name: str) -> None:
    assert getattr(serializers, name).__module__.startswith("confluent_kafka.")


@pytest.mark.parametrize("missing", ["confluent_kafka", "attrs", "fastavro"])
def test_a_missing_extra_is_an_error_with_the_command(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"  # as if it was not installed
        "try:\n"
        "    from semel.serializers import AvroSerializer\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    message = run(code)
    assert missing in message
    assert "pip install 'semel[registry]'" in message


def test_a_wrong_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="AvroSerialiser"):
        serializers.AvroSerialiser  # noqa: B018
