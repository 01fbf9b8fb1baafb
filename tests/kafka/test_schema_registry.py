"""Avro, JSON Schema and Protobuf with a schema registry: clients take confluent-kafka's serializers as they are, and
what the one writes, the other reads. The registry is confluent-kafka's own stand-in for one, in memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import confluent_kafka
import pytest
from confluent_kafka.schema_registry import header_schema_id_serializer
from confluent_kafka.serialization import (
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
    StringSerializer,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import semel
from semel.aio import AsyncConsumer, AsyncProducer
from semel.client import Producer, TopicPartition
from semel.serializers import (
    AvroDeserializer,
    AvroSerializer,
    JSONDeserializer,
    JSONSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
    SchemaRegistryClient,
)
from tests.support.broker import Cluster
from tests.support.polling import read, reader
from tests.support.reading import create_topic, read_topic

PATIENCE_MS = 60_000

ORDER = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]})
ORDER_WITH_COUNTRY = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "int"}, {"name": "country", "type": "string", "default": "unknown"}],
    }
)
JSON_ORDER = json.dumps(
    {"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("registered"), partitions=1)


@pytest.fixture
def registry() -> SchemaRegistryClient:
    return SchemaRegistryClient.new_client({"url": "mock://"})


@functools.cache
def order_message() -> Any:
    """The class that protoc would make of: message Order { int32 id = 1; }"""
    file = descriptor_pb2.FileDescriptorProto(name="semel_tests_order.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Order")
    message.field.add(name="id", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


class Format(NamedTuple):
    serializer: Callable[[SchemaRegistryClient], Any]
    deserializer: Callable[[SchemaRegistryClient], Any]
    order: Callable[[int], Any]


FORMATS = {
    "avro": Format(lambda client: AvroSerializer(client, ORDER), AvroDeserializer, lambda number: {"id": number}),
    "json": Format(
        lambda client: JSONSerializer(JSON_ORDER, client),
        lambda client: JSONDeserializer(JSON_ORDER, schema_registry_client=client),
        lambda number: {"id": number},
    ),
    "protobuf": Format(
        lambda client: ProtobufSerializer(order_message(), client),
        lambda client: ProtobufDeserializer(order_message(), schema_registry_client=client),
        lambda number: order_message()(id=number),
    ),
}


def in_context(topic: str, headers: list[Any] | None = None, field: str = MessageField.VALUE) -> SerializationContext:
    return SerializationContext(topic, field, headers)


# --- both directions ---


@pytest.mark.parametrize("name", FORMATS)
def test_what_semel_writes_confluent_kafka_reads(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient, name: str
) -> None:
    serializer, deserializer, order = FORMATS[name]
    with Producer(
        bootstrap_servers=cluster.bootstrap, key_serializer=serializer(registry), value_serializer=serializer(registry)
    ) as producer:
        producer.send(topic, order(7), key=order(1))
        producer.send(topic, None, key=order(2))
    subjects = {subject for subject in registry.get_subjects() if subject.rpartition("-")[0] == topic}
    assert subjects == {f"{topic}-key", f"{topic}-value"}, "each in the context of its field"
    first, second = read_topic(cluster.bootstrap, topic)
    assert deserializer(registry)(first.key, in_context(topic, field=MessageField.KEY)) == order(1)
    assert deserializer(registry)(first.value, in_context(topic)) == order(7)
    assert (second.key is None, second.value) == (False, None), "a tombstone stays one"


@pytest.mark.parametrize("name", FORMATS)
def test_what_confluent_kafka_writes_semel_reads(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient, name: str
) -> None:
    serializer, deserializer, order = FORMATS[name]
    other = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
    key = StringSerializer()("a")
    other.produce(topic, serializer(registry)(order(7), in_context(topic)), key)
    other.produce(topic, None, key)
    assert other.flush(PATIENCE_MS / 1000) == 0
    with reader(cluster, topic, value_deserializer=deserializer(registry)) as consumer:
        assert [(record.key, record.value) for record in read(consumer, 2)] == [(b"a", order(7)), (b"a", None)]


def test_a_schema_may_evolve_while_records_of_both_versions_are_read(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient
) -> None:
    orders = [(ORDER, {"id": 1}), (ORDER_WITH_COUNTRY, {"id": 2, "country": "LV"})]
    for schema, order in orders:
        with Producer(bootstrap_servers=cluster.bootstrap, value_serializer=AvroSerializer(registry, schema)) as writer:
            writer.send(topic, order)
    assert sorted(registry.get_versions(f"{topic}-value")) == [1, 2]
    expected = {
        None: [order for _, order in orders],  # each by the schema that it was written with
        ORDER: [{"id": 1}, {"id": 2}],
        ORDER_WITH_COUNTRY: [{"id": 1, "country": "unknown"}, {"id": 2, "country": "LV"}],
    }
    for schema, values in expected.items():
        with reader(cluster, topic, value_deserializer=AvroDeserializer(registry, schema)) as consumer:
            assert [record.value for record in read(consumer, 2)] == values


def test_schema_ids_in_headers_are_written_and_read(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient
) -> None:
    order = {"id": 1, "country": "Latvia"}  # the deserializer refuses less than 6 bytes
    in_headers = {"schema.id.serializer": header_schema_id_serializer}
    serializer = AvroSerializer(registry, ORDER_WITH_COUNTRY, conf=in_headers)
    pairs, mapping = [("trace", b"7")], {"trace": b"7"}
    with Producer(bootstrap_servers=cluster.bootstrap, value_serializer=serializer) as producer:
        for given in (None, pairs, mapping):
            producer.send(topic, order, headers=given)
    assert (pairs, mapping) == ([("trace", b"7")], {"trace": b"7"}), "what the program gave is left as it was"
    seen = read_topic(cluster.bootstrap, topic)
    names = [[name for name, _ in record.headers] for record in seen]
    assert names == [["__value_schema_id"], *2 * [["trace", "__value_schema_id"]]]
    assert [AvroDeserializer(registry)(one.value, in_context(topic, one.headers)) for one in seen] == 3 * [order]
    with reader(cluster, topic, value_deserializer=AvroDeserializer(registry)) as consumer:
        assert [record.value for record in read(consumer, 3)] == 3 * [order]


# --- what cannot be serialized or deserialized ---


def test_a_bad_value_sends_nothing_and_its_transaction_goes_on(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient
) -> None:
    with Producer(
        bootstrap_servers=cluster.bootstrap,
        transactional_id=cluster.unique("registered"),
        key_serializer=IntegerSerializer(),
        value_serializer=AvroSerializer(registry, ORDER),
    ) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, {"id": 1}, key=1)
        with pytest.raises(semel.SerializationError, match=rf"'{topic}' with the key 2: the value .* nothing of it"):
            producer.send(topic, {"id": "not a number"}, key=2)
        with pytest.raises(semel.SerializationError, match="the key cannot be serialized"):
            producer.send(topic, {"id": 3}, key="not a number")
        producer.send(topic, {"id": 4}, key=4)
        producer.commit_transaction()
        with contextlib.suppress(semel.SerializationError), producer.transaction() as txn:  # which aborts
            txn.send(topic, {"id": 5}, key=5)
            txn.send(topic, {}, key=6)
        with producer.transaction() as txn:
            txn.send(topic, {"id": 7}, key=7)
    with reader(
        cluster, topic, key_deserializer=IntegerDeserializer(), value_deserializer=AvroDeserializer(registry)
    ) as consumer:
        assert [(record.key, record.value["id"]) for record in read(consumer, 3)] == [(1, 1), (4, 4), (7, 7)]


def test_records_that_no_schema_fits_are_named_and_can_be_passed_over(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient
) -> None:
    serializer, deserializer, order = FORMATS["avro"]
    good = [serializer(registry)(order(number), in_context(topic)) for number in (0, 4)]
    bad = {
        b"no schema id": "magic byte",
        b"": "total data size is 0 bytes",
        b"\0\0\0\x03\xe7\x0e": "SchemaRegistryError: .*code 404",  # an id that the registry does not have
    }
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for value in (good[0], *bad, good[1]):
            producer.send(topic, value)
    with reader(cluster, topic, value_deserializer=deserializer(registry)) as consumer:
        assert [record.value for record in read(consumer, 1)] == [order(0)]
        for offset, (value, reason) in enumerate(bad.items(), 1):
            with pytest.raises(
                semel.DeserializationError, match=f"{topic}-0: the value at offset {offset} .*{reason}"
            ) as caught:
                consumer.poll(PATIENCE_MS)
            assert (caught.value.partition, caught.value.offset) == (TopicPartition(topic, 0), offset)
            assert caught.value.record is not None
            assert caught.value.record.value == value
            consumer.seek((topic, 0), offset + 1)
        assert [record.value for record in read(consumer, 1)] == [order(4)]


# --- the other faces ---


def test_asyncio_takes_them_too(cluster: Cluster, topic: str, registry: SchemaRegistryClient) -> None:
    async def write_and_read() -> list[Any]:
        async with AsyncProducer(
            bootstrap_servers=cluster.bootstrap, value_serializer=AvroSerializer(registry, ORDER)
        ) as producer:
            await producer.send(topic, {"id": 1})
            with pytest.raises(semel.SerializationError, match="nothing of it was sent"):
                await producer.send(topic, {})
            await producer.send(topic, None)
        async with AsyncConsumer(
            bootstrap_servers=cluster.bootstrap,
            auto_offset_reset="earliest",
            value_deserializer=AvroDeserializer(registry),
        ) as consumer:
            consumer.assign([(topic, 0)])
            found: list[Any] = []
            while len(found) < 2:
                found += [record.value for record in await consumer.poll(PATIENCE_MS)]
            return found

    assert asyncio.run(write_and_read()) == [{"id": 1}, None]


def test_a_processing_loop_calls_them_in_its_function(
    cluster: Cluster, topic: str, registry: SchemaRegistryClient
) -> None:
    serialize, deserialize = AvroSerializer(registry, ORDER), AvroDeserializer(registry)
    doubled = create_topic(cluster.bootstrap, cluster.unique("doubled"))
    dead = create_topic(cluster.bootstrap, cluster.unique("dead"))
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for value in (serialize({"id": 1}, in_context(topic)), b"no schema id"):
            producer.send(topic, value)

    def double(record: semel.client.ConsumerRecord) -> bytes | None:
        order = deserialize(record.value, in_context(record.topic, list(record.headers)))
        return serialize({"id": 2 * order["id"]}, in_context(doubled))

    semel.process(
        topic,
        doubled,
        double,
        application_id=cluster.unique("doubler"),
        bootstrap_servers=cluster.bootstrap,
        stop_at_end=True,
        dead_letter_topic=dead,
    )
    with reader(cluster, doubled, value_deserializer=AvroDeserializer(registry)) as consumer:
        assert [record.value for record in read(consumer, 1)] == [{"id": 2}]
    (letter,) = read_topic(cluster.bootstrap, dead)
    assert letter.value == b"no schema id"
