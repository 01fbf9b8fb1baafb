"""Consuming from one Apache Kafka node: semel's tables and rows side by side with the other Python clients.

A topic of four partitions is written once for each size and mode; then the contestants read it from its start in turns,
without a group. The clock runs from the moment at which the partitions are assigned (some clients begin to fetch then,
in the background) to the last record, so it has connecting in it, which the amount of data makes small. It must also be
many times what such a client keeps ready (64 MB), or the start is all that is measured.

    plain          as any producer writes, read_uncommitted
    transactional  written in transactions of 100 ms, read_committed

"in place" leaves keys and values in the memory that they were received in (`views=True`).

confluent-kafka hands out messages whose keys and values are not Python's yet: nobody looks at them here, which is the
best case for it. "as a table" is what a program does that wants what `poll_table` returns: it asks each message for its
offset, time, key and value, and makes an Arrow table of them.

"the broker's limit" is what the node gives to a client that fetches the same bytes and looks at nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.client_produce import SIZES, TRANSACTION_S
from benchmarks.harness import Report, compare, interleave
from semel.local.apache_kafka import ApacheKafka

PARTITIONS = 4
MODES = ("plain", "transactional")
DIFFERENT_VALUES = 997
WAIT_MS = 10_000
FEWER = 20  # those who read ten times slower read a twentieth


class Case(NamedTuple):
    """What is read: a topic with `record_count` values, of which the slow contestants read fewer."""

    bootstrap: str
    mode: str
    value_bytes: int
    record_count: int
    topic: str = ""

    def fewer(self, divisor: int) -> Case:
        return self._replace(record_count=max(1000, self.record_count // divisor))

    @property
    def isolation(self) -> str:
        return "read_committed" if self.mode == "transactional" else "read_uncommitted"


def run_consume(report: Report, kafka: ApacheKafka, quick: bool) -> None:
    """Every size and mode."""
    runs = 3 if quick else 5
    for size, value_bytes in SIZES.items():
        megabytes = 200 if quick else 1000
        for mode in MODES:
            case = filled(Case(kafka.bootstrap, mode, value_bytes, megabytes * 1_000_000 // (value_bytes + 20)))
            tables = interleave(
                {
                    "semel": lambda case=case: semel_tables(case),  # type: ignore[misc]
                    "semel in place": lambda case=case: semel_tables(case, views=True),  # type: ignore[misc]
                    "confluent-kafka": lambda case=case: confluent(case.fewer(FEWER)),  # type: ignore[misc]
                    "confluent-kafka, tuned": lambda case=case: confluent(case, TUNED),  # type: ignore[misc]
                    "confluent-kafka, tuned, as a table": lambda case=case: confluent(  # type: ignore[misc]
                        case.fewer(2), TUNED, lambda messages: table_of(messages).num_rows
                    ),
                    "the broker's limit": lambda case=case: limit(case),  # type: ignore[misc]
                },
                runs=runs,
            )
            in_place = {"semel": tables.pop("semel in place")}
            in_place |= {name: tables[name] for name in ("confluent-kafka, tuned", "the broker's limit")}
            name = f"consume tables, {size}, {mode}"
            compare(report, bench="client", case=name, unit="records/s", values=tables)
            compare(report, bench="client", case=f"{name}, in place", unit="records/s", values=in_place)
            few = case.fewer(FEWER)
            rows = interleave(
                {
                    "semel": lambda few=few: semel_rows(few),  # type: ignore[misc]
                    "confluent-kafka": lambda few=few: confluent(few),  # type: ignore[misc]
                    "kafka-python": lambda few=few: kafka_python(few),  # type: ignore[misc]
                    "aiokafka": lambda few=few: aiokafka(few),  # type: ignore[misc]
                },
                runs=runs,
            )
            compare(report, bench="client", case=f"consume rows, {size}, {mode}", unit="records/s", values=rows)


# --- the topic ---


def filled(case: Case) -> Case:
    """The case with a topic that holds its records, spread evenly."""
    import pyarrow as pa

    from semel.client.admin import Admin
    from semel.client.producer import Producer

    name = f"bench-consume-{time.time_ns()}"
    with Admin(bootstrap_servers=case.bootstrap) as admin:
        admin.create_topic(name, PARTITIONS)
    rng = random.Random(case.value_bytes)
    values = [rng.randbytes(case.value_bytes) for _ in range(DIFFERENT_VALUES)]
    rows = min(case.record_count, 4_000_000 // case.value_bytes)
    table = pa.table(
        {
            "value": pa.array([values[number % DIFFERENT_VALUES] for number in range(rows)], pa.binary()),
            "partition": pa.array([number * PARTITIONS // rows for number in range(rows)], pa.int32()),
        }
    )
    options = {"transactional_id": name} if case.mode == "transactional" else {}
    with Producer(bootstrap_servers=case.bootstrap, **options) as producer:
        for _ in _rounds(producer, case, rows):
            producer.send_table(name, table)
    return case._replace(topic=name, record_count=_round_count(case, rows) * rows)


def _round_count(case: Case, rows: int) -> int:
    return max(1, case.record_count // rows)


def _rounds(producer: Any, case: Case, rows: int) -> Iterator[int]:
    """Each round of sending; in transactions of 100 ms where the case says so."""
    if case.mode == "plain":
        yield from range(_round_count(case, rows))
        producer.flush()
        return
    producer.init_transactions()
    producer.begin_transaction()
    begun_s = time.perf_counter()
    for number in range(_round_count(case, rows)):
        yield number
        if time.perf_counter() - begun_s >= TRANSACTION_S:
            producer.commit_transaction()
            producer.begin_transaction()
            begun_s = time.perf_counter()
    producer.commit_transaction()


# --- the contestants: each returns records per second ---


def _timed(case: Case, started_s: float, read: Callable[[int], int]) -> float:
    """Reads until the count is reached; `read` gets how many are left."""
    got = 0
    while got < case.record_count:
        count = read(case.record_count - got)
        if not count:
            raise RuntimeError(f"only {got} of {case.record_count} records came")
        got += count
    return got / (time.perf_counter() - started_s)


def _semel(case: Case) -> tuple[Any, float]:
    """A consumer, and when it began."""
    from semel.client.consumer import Consumer

    consumer = Consumer(bootstrap_servers=case.bootstrap, auto_offset_reset="earliest", isolation_level=case.isolation)
    started_s = time.perf_counter()
    consumer.assign([(case.topic, number) for number in range(PARTITIONS)])
    return consumer, started_s


def semel_tables(case: Case, views: bool = False) -> float:
    consumer, started_s = _semel(case)
    with consumer:
        return _timed(case, started_s, lambda _: consumer.poll_table(WAIT_MS, views=views).num_rows)


def semel_rows(case: Case) -> float:
    consumer, started_s = _semel(case)
    with consumer:
        return _timed(case, started_s, lambda _: len(consumer.poll(WAIT_MS, max_records=2000)))


# By default it keeps 100,000 records ready, which is 10 MB of small ones, and then takes a break of up to a second.
TUNED = {"queued.min.messages": 1_000_000, "fetch.queue.backoff.ms": 10}


def table_of(messages: list[Any]) -> Any:
    """What `poll_table` returns, but for topic and partition."""
    import pyarrow as pa

    return pa.table(
        {
            "offset": pa.array([message.offset() for message in messages], pa.int64()),
            "timestamp": pa.array([message.timestamp()[1] for message in messages], pa.int64()),
            "key": pa.array([message.key() for message in messages], pa.binary()),
            "value": pa.array([message.value() for message in messages], pa.binary()),
        }
    )


def confluent(
    case: Case, more: Mapping[str, object] = MappingProxyType({}), count: Callable[[list[Any]], int] = len
) -> float:
    """`count` may do more with the messages than count them."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": case.bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "isolation.level": case.isolation,
            "check.crcs": True,  # as semel does
            "log_level": 0,
            **more,
        }
    )
    started_s = time.perf_counter()
    consumer.assign([TopicPartition(case.topic, number, 0) for number in range(PARTITIONS)])
    try:
        return _timed(case, started_s, lambda left: count(consumer.consume(min(10_000, left), WAIT_MS / 1000)))
    finally:
        consumer.close()


def kafka_python(case: Case) -> float:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=case.bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level=case.isolation,
    )
    started_s = time.perf_counter()
    consumer.assign([TopicPartition(case.topic, number) for number in range(PARTITIONS)])
    try:
        return _timed(
            case, started_s, lambda _: sum(map(len, consumer.poll(timeout_ms=WAIT_MS, max_records=2000).values()))
        )
    finally:
        consumer.close()


def aiokafka(case: Case) -> float:
    import asyncio

    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def read() -> float:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=case.bootstrap,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level=case.isolation,
        )
        await consumer.start()
        try:
            started_s, got = time.perf_counter(), 0
            consumer.assign([TopicPartition(case.topic, number) for number in range(PARTITIONS)])
            while got < case.record_count:
                got += sum(map(len, (await consumer.getmany(timeout_ms=WAIT_MS, max_records=2000)).values()))
            return got / (time.perf_counter() - started_s)
        finally:
            await consumer.stop()

    return asyncio.run(read())


def limit(case: Case) -> float:
    """Fetches everything as semel does and drops it unread; in records, counted from the offsets."""
    consumer, started_s = _semel(case)
    with consumer:
        fetching = consumer._engine.fetching
        offsets = {"read": 0}

        def read(_: int) -> int:
            from semel.client.immediate import run
            from semel.client.timing import Deadline

            deadline, before = Deadline(WAIT_MS / 1000), offsets["read"]
            while not deadline.expired:
                run(consumer._engine.turn())
                while (chunk := fetching.fetcher.take()) is not None:
                    offsets["read"] += chunk.next_offset - chunk.start
                if offsets["read"] > before:
                    fetching.send(draining=True)
                    break
                run(consumer._engine.wait(deadline))
            return offsets["read"] - before

        return _timed(case, started_s, read)
