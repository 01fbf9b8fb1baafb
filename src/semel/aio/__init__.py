"""The client for asyncio: the same options, errors and guarantees as `semel.Producer`, `semel.Consumer`, `semel.Admin`.

    async with AsyncProducer(bootstrap_servers="localhost:9092") as producer:
        delivery = await producer.send("orders", b"an order")
        print((await delivery).offset)

    async with AsyncConsumer(bootstrap_servers="localhost:9092", group_id="billing") as consumer:
        consumer.subscribe(["orders"])
        async for record in consumer:
            print(record.offset, record.value)

admin       `AsyncAdmin`                         producer    `AsyncProducer`, its transactions and deliveries
consumer    `AsyncConsumer` and its network      sender      drives a producer's core
cluster     connections by broker and lane       connection  one connection in an event loop

What a client decides is shared with `semel.client`: the cores, and the calls that are written as coroutines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.aio.admin import AsyncAdmin as AsyncAdmin
    from semel.aio.consumer import AsyncConsumer as AsyncConsumer
    from semel.aio.producer import AsyncProducer as AsyncProducer
    from semel.aio.producer import AsyncProducerTransaction as AsyncProducerTransaction
    from semel.aio.sender import AsyncDelivery as AsyncDelivery
    from semel.aio.sender import AsyncTableDelivery as AsyncTableDelivery

_HOMES = {
    "AsyncAdmin": "admin",
    "AsyncConsumer": "consumer",
    "AsyncDelivery": "sender",
    "AsyncProducer": "producer",
    "AsyncProducerTransaction": "producer",
    "AsyncTableDelivery": "sender",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'semel.aio' has no attribute {name!r}")
    value = getattr(import_module(f"semel.aio.{home}"), name)
    globals()[name] = value
    return value
