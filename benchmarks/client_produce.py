"""Producing to one Apache Kafka node: semel's tables and rows side by side with the other Python clients.

Every contestant writes the same values to a topic of one partition (a fresh topic for each run, so that nobody pays for
another's data) and its clock stops when the last acknowledgement is there. Values only, no keys; batches of about
400 KB for all, the size at which each of them was fastest here.

    plain          acks=1, no idempotence
    idempotent     acks=all
    transactional  acks=all, a transaction for every 100 ms of sending

"the broker's limit" is what the node takes from a client that does nothing but send the same encoded batches again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from benchmarks.harness import Report, compare, interleave
from semel.local.apache_kafka import ApacheKafka

BATCH_BYTES = 400 * 1024
TRANSACTION_S = 0.1
SIZES = {"100 B": 100, "1 KB": 1000}
MODES = ("plain", "idempotent", "transactional")
_names = count(1)
_used: list[str] = []  # the topic of the last run


class Case(NamedTuple):
    """What is written: `record_count` values of `value_bytes` each, in a mode; fewer for the slow ones."""

    bootstrap: str
    mode: str
    value_bytes: int
    record_count: int

    def fewer(self, divisor: int) -> Case:
        return self._replace(record_count=max(1000, self.record_count // divisor))

    def topic(self) -> str:
        """A fresh one. The one before it is done with and deleted: the disk would become the limit for all."""
        from semel.client.admin import Admin

        name = f"bench-{time.time_ns()}-{next(_names)}"
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            while _used:
                admin.delete_topics([_used.pop()])
            admin.create_topic(name, 1, configs={"file.delete.delay.ms": "100"})
        _used.append(name)
        return name

    @property
    def transactional_id(self) -> str | None:
        return f"bench-{next(_names)}-{time.time_ns()}" if self.mode == "transactional" else None


def run_produce(report: Report, kafka: ApacheKafka, quick: bool) -> None:
    """Every size and mode."""
    runs = 3 if quick else 5
    for size, value_bytes in SIZES.items():
        megabytes = 40 if quick else 100
        case = Case(kafka.bootstrap, "", value_bytes, megabytes * 1_000_000 // (value_bytes + 20))
        for mode in MODES:
            one = case._replace(mode=mode)
            tables = interleave(_contestants(one, semel_table), runs=runs)
            compare(report, bench="client", case=f"produce tables, {size}, {mode}", unit="records/s", values=tables)
            rows = interleave(_row_contestants(one, quick), runs=runs)
            compare(report, bench="client", case=f"produce rows, {size}, {mode}", unit="records/s", values=rows)


def _contestants(case: Case, ours: Callable[[Case], float]) -> dict[str, Callable[[], float]]:
    contestants: dict[str, Callable[[], float]] = {
        "semel": lambda: ours(case),
        "confluent-kafka": lambda: confluent(case.fewer(3)),
    }
    if case.mode != "transactional":
        contestants["the broker's limit"] = lambda: limit(case)
    return contestants


def _row_contestants(case: Case, quick: bool) -> dict[str, Callable[[], float]]:
    few = case._replace(record_count=20_000 if quick else 50_000)
    return {
        "semel": lambda: semel_rows(few),
        "confluent-kafka": lambda: confluent(few),
        "kafka-python": lambda: kafka_python(few),
        "aiokafka": lambda: aiokafka(few),
    }


# --- the contestants: each returns records per second ---


def _value(case: Case) -> bytes:
    import random

    return random.Random(case.value_bytes).randbytes(case.value_bytes)


def _semel(case: Case) -> Any:
    from semel.client.producer import Producer

    producer = Producer(
        bootstrap_servers=case.bootstrap,
        acks="1" if case.mode == "plain" else "all",
        transactional_id=case.transactional_id,
        batch_size=BATCH_BYTES,
    )
    if case.mode == "transactional":
        producer.init_transactions()
    return producer


def semel_table(case: Case) -> float:
    """Whole tables of 8 MB."""
    import pyarrow as pa

    rows = min(case.record_count, 8_000_000 // case.value_bytes)
    table = pa.table({"value": pa.array([_value(case)] * rows, pa.binary())})
    topic, producer = case.topic(), _semel(case)
    with producer:
        return _timed_rounds(
            case, rows, lambda: producer.send_table(topic, table), producer, producer.flush, lambda: producer.flush()
        )


def _timed_rounds(
    case: Case,
    rows: int,
    send: Callable[[], object],
    producer: Any,
    finish: Callable[[], object],
    warm: Callable[[], object],
) -> float:
    """Sends until the count is reached; in transactions of 100 ms where the case says so."""
    rounds = max(1, case.record_count // rows)
    if case.mode != "transactional":
        send()
        warm()
        started_s = time.perf_counter()
        for _ in range(rounds):
            send()
        finish()
        return rounds * rows / (time.perf_counter() - started_s)
    producer.begin_transaction()
    send()
    producer.commit_transaction()
    started_s = begun_s = time.perf_counter()
    producer.begin_transaction()
    for _ in range(rounds):
        send()
        if time.perf_counter() - begun_s >= TRANSACTION_S:
            producer.commit_transaction()
            producer.begin_transaction()
            begun_s = time.perf_counter()
    producer.commit_transaction()
    return rounds * rows / (time.perf_counter() - started_s)


ROWS_PER_ROUND = 2000


def semel_rows(case: Case) -> float:
    topic, value, producer = case.topic(), _value(case), _semel(case)

    def send() -> None:
        for _ in range(ROWS_PER_ROUND):
            producer.send(topic, value)

    with producer:
        return _timed_rounds(case, ROWS_PER_ROUND, send, producer, producer.flush, producer.flush)


def confluent(case: Case) -> float:
    from confluent_kafka import Producer

    options: dict[str, Any] = {
        "bootstrap.servers": case.bootstrap,
        "acks": "1" if case.mode == "plain" else "all",
        "enable.idempotence": case.mode != "plain",
        "batch.size": BATCH_BYTES,
        "linger.ms": 5,
        "queue.buffering.max.messages": 1_000_000,
        "log_level": 0,
    }
    if case.transactional_id:
        options["transactional.id"] = f"confluent-{time.time_ns()}"
    topic, value, producer = case.topic(), _value(case), Producer(options)
    if case.mode == "transactional":
        producer.init_transactions(30)

    def send() -> None:
        for _ in range(ROWS_PER_ROUND):
            while True:
                try:
                    producer.produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)

    return _timed_rounds(case, ROWS_PER_ROUND, send, producer, producer.flush, producer.flush)


def kafka_python(case: Case) -> float:
    from kafka import KafkaProducer

    options: dict[str, Any] = {"transactional_id": case.transactional_id} if case.mode == "transactional" else {}
    producer = KafkaProducer(
        bootstrap_servers=case.bootstrap,
        acks=1 if case.mode == "plain" else "all",
        enable_idempotence=case.mode != "plain",
        batch_size=BATCH_BYTES,
        linger_ms=5,
        max_request_size=2_000_000,
        **options,
    )
    if case.mode == "transactional":
        producer.init_transactions()
    topic, value = case.topic(), _value(case)

    def send() -> None:
        for _ in range(ROWS_PER_ROUND):
            producer.send(topic, value)

    try:
        return _timed_rounds(case, ROWS_PER_ROUND, send, producer, producer.flush, producer.flush)
    finally:
        producer.close(timeout=10)


def aiokafka(case: Case) -> float:
    import asyncio

    return asyncio.run(_aiokafka(case))


async def _aiokafka(case: Case) -> float:
    from aiokafka import AIOKafkaProducer

    options: dict[str, Any] = {"transactional_id": case.transactional_id} if case.mode == "transactional" else {}
    producer = AIOKafkaProducer(
        bootstrap_servers=case.bootstrap,
        acks=1 if case.mode == "plain" else "all",
        enable_idempotence=case.mode != "plain",
        max_batch_size=BATCH_BYTES,
        linger_ms=5,
        **options,
    )
    topic, value = case.topic(), _value(case)
    await producer.start()
    transactional = case.mode == "transactional"
    try:
        if transactional:
            await producer.begin_transaction()
        await (await producer.send(topic, value))
        started_s = begun_s = time.perf_counter()
        for number in range(case.record_count):
            await producer.send(topic, value)
            if transactional and number % 500 == 0 and time.perf_counter() - begun_s >= TRANSACTION_S:
                await producer.commit_transaction()
                await producer.begin_transaction()
                begun_s = time.perf_counter()
        await producer.flush()
        if transactional:
            await producer.commit_transaction()
        return case.record_count / (time.perf_counter() - started_s)
    finally:
        await producer.stop()


def limit(case: Case) -> float:
    """The same encoded batch over and over, five requests in flight: no client can be faster than this node."""
    from semel.client.cluster import Cluster
    from semel.client.cluster_calls import Leader
    from semel.client.settings import ClientSettings
    from semel.protocol.messages.records import PRODUCE, PartitionProduceData, ProduceRequest, TopicProduceData
    from semel.protocol.rows import Record, encode_batch

    rows = BATCH_BYTES // (case.value_bytes + 12)
    now_ms = int(time.time() * 1000)
    batch = encode_batch([Record(i, now_ms, None, _value(case)) for i in range(rows)])
    topic, acks = case.topic(), 1 if case.mode == "plain" else -1
    with Cluster(ClientSettings.of(bootstrap_servers=case.bootstrap)) as cluster:
        connection = cluster.connect(Leader(topic, 0), cluster.deadline(10))
        request = ProduceRequest(
            None, acks, 30_000, [TopicProduceData(topic, partition_data=[PartitionProduceData(0, batch)])]
        )

        def send() -> Any:
            return connection.send(PRODUCE, request, version=9)

        connection.wait(send())
        pending: list[Any] = []
        started_s = time.perf_counter()
        rounds = max(1, case.record_count // rows)
        for _ in range(rounds):
            pending.append(send())
            if len(pending) >= 5:
                connection.wait(pending.pop(0))
        for each in pending:
            connection.wait(each)
        return rounds * rows / (time.perf_counter() - started_s)
