"""Transactions beside Apache Kafka: how long a small one takes, what they cost, and 500 producers at once.

Both brokers leave the disk to the operating system (fsync=os), as a stock Kafka node does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from semel.bench.harness import Report, compare
from semel.bench.peers.apache_kafka import ApacheKafka, java_tool
from semel.bench.peers.raw_client import RawClient, patiently
from semel.local.semel_broker import SemelBroker
from semel.protocol.apis import api_of
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.end_txn import EndTxnRequest
from semel.protocol.messages.init_producer_id import InitProducerIdRequest
from semel.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.protocol.rows import Record, encode_batch
from semel.protocol.schema import Struct

BENCH = "transactions"
KAFKA = "Apache Kafka 4.3.1"
PRODUCERS = 500
COME_AGAIN = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)
BACKOFF_S = 0.001

Brokers = Mapping[str, SemelBroker | ApacheKafka]


def run(report: Report, quick: bool = False) -> None:
    with _brokers() as brokers:
        _latency(report, brokers, runs=2 if quick else 5, count=100 if quick else 400)
        _many_producers(report, brokers, runs=1 if quick else 3, seconds=3 if quick else 8)
        _cost(report, brokers, runs=1 if quick else 3, records=30_000 if quick else 100_000)


@contextlib.contextmanager
def _brokers() -> Iterator[Brokers]:
    with SemelBroker(None, "--fsync", "os") as semel, ApacheKafka(None) as kafka:
        yield {"semel": semel, KAFKA: kafka}


def _in_turns(brokers: Brokers, runs: int, measure: Callable[[SemelBroker | ApacheKafka], Any]) -> dict[str, list[Any]]:
    """One unmeasured round, then the brokers take turns; every second round goes backwards."""
    values: dict[str, list[Any]] = {name: [] for name in brokers}
    for number in range(-1, runs):
        for name in list(brokers) if number % 2 == 0 else list(brokers)[::-1]:
            value = measure(brokers[name])
            if number >= 0:
                values[name].append(value)
    return values


# --- one record in a transaction ---


def _latency(report: Report, brokers: Brokers, runs: int, count: int) -> None:
    for generation in (1, 2):
        measured = _in_turns(brokers, runs, partial(_transactions, count=count, is_v2=generation == 2))
        for name, share in (("p50", 50), ("p99", 99)):
            compare(
                report,
                bench=BENCH,
                case=f"one record, TV{generation}, {name}",
                unit="ms",
                values={broker: [_percentile(run, share) for run in runs] for broker, runs in measured.items()},
                better="lower",
            )


def _percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def _transactions(broker: SemelBroker | ApacheKafka, count: int, is_v2: bool) -> list[float]:
    """Milliseconds of each of a row of transactions, the wait for the one before it included."""
    id_ = topic = f"latency-{time.time_ns()}"
    times = []
    with RawClient(broker.bootstrap) as client:
        client.create_topic(topic)
        client.ready(id_, id_)
        owner = patiently(lambda: client.init(id_, version=5), until=lambda o: o.error is ErrorCode.NONE)
        producer_id, epoch, sequence = owner.producer_id, owner.epoch, 0
        for _ in range(count):
            started = time.perf_counter()
            if not is_v2:
                _again(partial(_add, client, id_, producer_id, epoch, topic))
            _again(partial(_write, client, id_, producer_id, epoch, topic, sequence, 12 if is_v2 else 11))
            ended = client.end(id_, producer_id, epoch, commit=True, version=5 if is_v2 else 3)
            times.append((time.perf_counter() - started) * 1000)
            if ended.error is not ErrorCode.NONE:
                raise RuntimeError(f"a commit was refused: {ended.error.name}")
            sequence = 0 if is_v2 else sequence + 1
            producer_id, epoch = ended.producer_id, ended.epoch
    return times


def _add(client: RawClient, id_: str, producer_id: int, epoch: int, topic: str) -> ErrorCode:
    return client.add_partitions(id_, producer_id, epoch, [(topic, 0)])[topic, 0]


def _write(
    client: RawClient, id_: str, producer_id: int, epoch: int, topic: str, sequence: int, version: int
) -> ErrorCode:
    value = b"x" * 100
    return client.produce(id_, producer_id, epoch, (topic, 0), [value], sequence=sequence, version=version).error


def _again(ask: Callable[[], ErrorCode]) -> None:
    while (code := ask()) in COME_AGAIN:
        time.sleep(BACKOFF_S)
    if code is not ErrorCode.NONE:
        raise RuntimeError(f"a request of a transaction was refused: {code.name}")


# --- 500 producers ---


def _many_producers(report: Report, brokers: Brokers, runs: int, seconds: float) -> None:
    measured = _in_turns(brokers, runs, lambda broker: asyncio.run(_crowd(broker.bootstrap, seconds)))
    rates = {name: [sum(counts) / seconds for counts in runs] for name, runs in measured.items()}
    compare(report, bench=BENCH, case=f"{PRODUCERS} producers at once", unit="transactions/s", values=rates)
    slowest = {
        name: [max(min(counts), 0.001) / statistics.median(counts) for counts in runs]
        for name, runs in measured.items()
    }
    case = f"{PRODUCERS} producers at once, the slowest one's share of the median"
    compare(report, bench=BENCH, case=case, unit="share", values=slowest)


async def _crowd(bootstrap: str, seconds: float) -> list[int]:
    """How many transactions each of many producers completes in a time."""
    topic = f"crowd-{time.time_ns()}"
    with RawClient(bootstrap) as client:
        client.create_topic(topic, 8)
        client.ready(topic, topic)
    ready = asyncio.Event()
    members = [_Member(bootstrap, f"{topic}-{n}", (topic, n % 8)) for n in range(PRODUCERS)]
    for chunk in range(0, PRODUCERS, 25):  # a stock Kafka node takes 50 connections into its backlog
        await asyncio.gather(*(member.open() for member in members[chunk : chunk + 25]))
    tasks = [asyncio.ensure_future(member.work(ready)) for member in members]
    ready.set()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for member in members:
        member.close()
    if failures:
        raise RuntimeError(f"{len(failures)} producers failed: {failures[0]!r}")
    return [member.done for member in members]


class _Member:
    """One producer of the crowd: TV2, one record in each transaction, all over one connection."""

    def __init__(self, bootstrap: str, id_: str, partition: tuple[str, int]) -> None:
        self._address = bootstrap.rsplit(":", 1)
        self._id, self._partition = id_, partition
        self.done = 0

    async def open(self) -> None:
        host, port = self._address
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        owner = await self._again(22, 5, InitProducerIdRequest(self._id, 60_000))
        self._producer_id, self._epoch = owner.producer_id, owner.producer_epoch

    def close(self) -> None:
        self._writer.close()

    async def work(self, ready: asyncio.Event) -> None:
        await ready.wait()
        while True:
            await self._again(0, 12, self._batch(), lambda a: a.responses[0].partition_responses[0].error_code)
            ended = await self._again(26, 5, EndTxnRequest(self._id, self._producer_id, self._epoch, True))
            self._producer_id, self._epoch = ended.producer_id, ended.producer_epoch
            self.done += 1

    def _batch(self) -> ProduceRequest:
        name, index = self._partition
        batch = encode_batch(
            [Record(0, time.time_ns() // 1_000_000, None, b"x" * 100)],
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=0,
            transactional=True,
        )
        data = TopicProduceData(name, partition_data=[PartitionProduceData(index, batch)])
        return ProduceRequest(self._id, -1, 30_000, [data])

    async def _again(
        self, key: int, version: int, request: Struct, code: Callable[[Any], int] = lambda a: a.error_code
    ) -> Any:
        while True:
            self._writer.write(b"".join(api_of(key).frame_request(request, version, 1, "crowd")))
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            answer = api_of(key).read_response(await self._reader.readexactly(size), version)[1]
            error = ErrorCode.of(code(answer))
            if error is ErrorCode.NONE:
                return answer
            if error not in COME_AGAIN:
                raise RuntimeError(f"{self._id} was refused: {error.name}")
            await asyncio.sleep(0.02)


# --- what transactions cost ---


def _cost(report: Report, brokers: Brokers, runs: int, records: int) -> None:
    """Kafka's own load generator with and without transactions of 100 ms."""
    measured = _in_turns(brokers, runs, lambda broker: (_rate(broker, records, 0), _rate(broker, records, 100)))
    compare(
        report,
        bench=BENCH,
        case="1 KB records in 100 ms transactions",
        unit="records/s",
        values={name: [with_ for _, with_ in runs] for name, runs in measured.items()},
    )
    compare(
        report,
        bench=BENCH,
        case="1 KB records in 100 ms transactions, share of the rate without them",
        unit="share",
        values={name: [with_ / without for without, with_ in runs] for name, runs in measured.items()},
    )


def _rate(broker: SemelBroker | ApacheKafka, records: int, transaction_ms: int) -> float:
    topic = f"cost-{time.time_ns()}"
    with RawClient(broker.bootstrap) as client:
        client.create_topic(topic)
    options = ["--transaction-duration-ms", str(transaction_ms), "--transactional-id", topic] if transaction_ms else []
    done = java_tool(
        "ProducerPerformance",
        "--topic", topic, "--num-records", str(records), "--record-size", "1024", "--throughput", "-1", *options,
        "--producer-props", f"bootstrap.servers={broker.bootstrap}", "acks=all",
        timeout_s=120,
    )  # fmt: skip
    rates = re.findall(r"([\d.]+) records/sec", done.stdout)
    return float(rates[-1])
