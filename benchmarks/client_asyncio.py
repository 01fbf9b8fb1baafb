"""`semel.aio` side by side with aiokafka, on one Apache Kafka node: values of 100 bytes, a topic of one partition.

    produce, awaited       200 tasks, each of which waits for the acknowledgement of its record before it sends the next
    produce, gathered      records are sent one after the other, and all deliveries are awaited together
    consume one by one     `async for`
    consume batches        `poll` beside aiokafka's `getmany`, up to 2,000 records at a time
    transactions           one after the other, 20 records each

Both clients are idempotent. Where records are gathered they wait 5 ms for more of them (linger), elsewhere they do not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, NamedTuple

from benchmarks.harness import Report, compare, interleave
from semel.local.apache_kafka import ApacheKafka

TASKS = 200
ROWS_PER_TRANSACTION = 20
PER_POLL = 2000
VALUE = bytes(range(100))
WAIT_MS = 30_000
LINGER_MS = 5
_names = count(1)


class Load(NamedTuple):
    """How much of each case."""

    bootstrap: str
    awaited: int
    gathered: int
    read: int
    transactions: int


def run_asyncio(report: Report, kafka: ApacheKafka, quick: bool) -> None:
    """Every case."""
    share = 4 if quick else 1
    measure(report, Load(kafka.bootstrap, 20_000 // share, 40_000 // share, 200_000 // share, 400 // share), quick)


def measure(report: Report, load: Load, quick: bool, only: str = "") -> None:
    cases: dict[str, dict[str, Callable[[], Coroutine[Any, Any, float]]]] = {
        "produce, awaited": {
            "semel": lambda: awaited(load, semel_send),
            "aiokafka": lambda: awaited(load, aiokafka_send),
        },
        "produce, gathered": {"semel": lambda: gathered(load, True), "aiokafka": lambda: gathered(load, False)},
        "consume one by one": {"semel": lambda: semel_one_by_one(load), "aiokafka": lambda: aiokafka_one_by_one(load)},
        "consume batches": {"semel": lambda: semel_batches(load), "aiokafka": lambda: aiokafka_batches(load)},
        "transactions": {"semel": lambda: transactions(load, True), "aiokafka": lambda: transactions(load, False)},
    }
    for name, contestants in cases.items():
        if only in name:
            runs = {each: (lambda work=work: asyncio.run(work())) for each, work in contestants.items()}
            unit = "transactions/s" if name == "transactions" else "records/s"
            values = interleave(runs, runs=3 if quick else 5)
            compare(report, bench="client", case=f"asyncio: {name}", unit=unit, values=values)


# --- the contestants: each returns its rate ---


def semel_producer(load: Load, **options: Any) -> Any:
    from semel.aio import AsyncProducer

    return AsyncProducer(bootstrap_servers=load.bootstrap, **({"linger_ms": LINGER_MS} | options))


def aiokafka_producer(load: Load, **options: Any) -> Any:
    from aiokafka import AIOKafkaProducer

    settings = {"linger_ms": LINGER_MS, "enable_idempotence": True} | options
    return AIOKafkaProducer(bootstrap_servers=load.bootstrap, **settings)


async def semel_send(load: Load, topic: str, work: Callable[[Any], Coroutine[Any, Any, float]]) -> float:
    async with semel_producer(load, linger_ms=0) as producer:

        async def send() -> None:
            await (await producer.send(topic, VALUE))

        return await work(send)


async def aiokafka_send(load: Load, topic: str, work: Callable[[Any], Coroutine[Any, Any, float]]) -> float:
    async with aiokafka_producer(load, linger_ms=0) as producer:

        async def send() -> None:
            await producer.send_and_wait(topic, VALUE)

        return await work(send)


async def awaited(load: Load, sending: Any) -> float:
    async def work(send: Callable[[], Coroutine[Any, Any, None]]) -> float:
        await send()

        async def task() -> None:
            for _ in range(load.awaited // TASKS):
                await send()

        started_s = time.perf_counter()
        await asyncio.gather(*(task() for _ in range(TASKS)))
        return load.awaited / (time.perf_counter() - started_s)

    return float(await sending(load, await fresh_topic(load), work))


async def gathered(load: Load, ours: bool) -> float:
    topic = await fresh_topic(load)
    async with semel_producer(load) if ours else aiokafka_producer(load) as producer:
        await (await producer.send(topic, VALUE))
        started_s = time.perf_counter()
        deliveries = [await producer.send(topic, VALUE) for _ in range(load.gathered)]
        await asyncio.gather(*deliveries)
        return load.gathered / (time.perf_counter() - started_s)


async def transactions(load: Load, ours: bool) -> float:
    topic, name = await fresh_topic(load), f"bench-{time.time_ns()}"
    make = semel_producer if ours else aiokafka_producer
    async with make(load, transactional_id=name, linger_ms=0) as producer:
        if ours:
            await producer.init_transactions()
        started_s = 0.0
        for number in range(load.transactions + 1):
            async with producer.transaction():
                for _ in range(ROWS_PER_TRANSACTION):
                    await producer.send(topic, VALUE)
            started_s = started_s if number else time.perf_counter()
        return load.transactions / (time.perf_counter() - started_s)


async def semel_one_by_one(load: Load) -> float:
    from semel.aio import AsyncConsumer

    topic = await filled_topic(load)
    async with AsyncConsumer(bootstrap_servers=load.bootstrap, auto_offset_reset="earliest") as consumer:
        started_s, got = time.perf_counter(), 0
        consumer.assign([(topic, 0)])
        async for _ in consumer:
            got += 1
            if got == load.read:
                break
        return got / (time.perf_counter() - started_s)


async def semel_batches(load: Load) -> float:
    from semel.aio import AsyncConsumer

    topic = await filled_topic(load)
    async with AsyncConsumer(bootstrap_servers=load.bootstrap, auto_offset_reset="earliest") as consumer:
        started_s, got = time.perf_counter(), 0
        consumer.assign([(topic, 0)])
        while got < load.read:
            got += len(await consumer.poll(WAIT_MS, max_records=PER_POLL))
        return got / (time.perf_counter() - started_s)


def aiokafka_consumer(load: Load) -> Any:
    from aiokafka import AIOKafkaConsumer

    return AIOKafkaConsumer(
        bootstrap_servers=load.bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level="read_committed",
    )


async def aiokafka_one_by_one(load: Load) -> float:
    from aiokafka import TopicPartition

    topic = await filled_topic(load)
    async with aiokafka_consumer(load) as consumer:
        started_s, got = time.perf_counter(), 0
        consumer.assign([TopicPartition(topic, 0)])
        async for _ in consumer:
            got += 1
            if got == load.read:
                break
        return got / (time.perf_counter() - started_s)


async def aiokafka_batches(load: Load) -> float:
    from aiokafka import TopicPartition

    topic = await filled_topic(load)
    async with aiokafka_consumer(load) as consumer:
        started_s, got = time.perf_counter(), 0
        consumer.assign([TopicPartition(topic, 0)])
        while got < load.read:
            got += sum(map(len, (await consumer.getmany(timeout_ms=WAIT_MS, max_records=PER_POLL)).values()))
        return got / (time.perf_counter() - started_s)


# --- topics ---

_filled: dict[Load, str] = {}


async def fresh_topic(load: Load) -> str:
    from semel.aio import AsyncAdmin

    name = f"bench-asyncio-{time.time_ns()}-{next(_names)}"
    async with AsyncAdmin(bootstrap_servers=load.bootstrap) as admin:
        await admin.create_topic(name, 1)
    return name


async def filled_topic(load: Load) -> str:
    """The same for all runs."""
    if load not in _filled:
        _filled[load] = await fresh_topic(load)
        async with semel_producer(load) as producer:
            for _ in range(load.read):
                await producer.send(_filled[load], VALUE)
    return _filled[load]
