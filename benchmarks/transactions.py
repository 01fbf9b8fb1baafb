"""Transactions beside Apache Kafka: how long a small one takes, what they cost, and 500 producers at once.

Both brokers leave the disk to the operating system (fsync=os), as a stock Kafka node does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Report, compare
from benchmarks.peers.raw_client import RETRIABLE, RawClient, eventually
from benchmarks.transaction_frames import TransactionFrames
from semel.local.apache_kafka import ApacheKafka, tool_command
from semel.local.brokers import SemelBroker
from semel.protocol.api import api_of
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.transactions import InitProducerIdRequest, InitProducerIdResponse

BENCH = "transactions"
KAFKA = "Apache Kafka 4.3.1"
PRODUCERS = 500
BACKOFF_S = 0.001
CROWD_BACKOFF_S = 0.02
TRANSACTION_MS = 100

Brokers = Mapping[str, SemelBroker | ApacheKafka]


def run(report: Report, quick: bool = False) -> None:
    with both_brokers() as brokers:
        _latency(report, brokers, runs=2 if quick else 5, count=100 if quick else 400)
        _many_producers(report, brokers, runs=1 if quick else 3, seconds=3 if quick else 8)
        _cost(report, brokers, runs=3 if quick else 8, records=100_000 if quick else 400_000)


@contextlib.contextmanager
def both_brokers() -> Iterator[Brokers]:
    with SemelBroker(None, "--fsync", "os") as semel, ApacheKafka(None) as kafka:
        yield {"semel": semel, KAFKA: kafka}


def in_turns(brokers: Brokers, runs: int, measure: Callable[[SemelBroker | ApacheKafka], Any]) -> dict[str, list[Any]]:
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
        measured = in_turns(brokers, runs, partial(_transactions, count=count, is_v2=generation == 2))
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
        owner = eventually(lambda: client.init(id_, version=5), done=lambda o: o.error is ErrorCode.NONE)
        producer_id, epoch, sequence = owner.producer_id, owner.epoch, 0
        frames = TransactionFrames(id_, (topic, 0), is_v2=is_v2)
        for _ in range(count):
            frames.stamp(producer_id, epoch, sequence)
            started = time.perf_counter()
            if not is_v2:
                _again(lambda: frames.add_error(client.ask(frames.add)))
            _again(lambda: frames.produce_error(client.ask(frames.produce)))
            ended = frames.ended(client.ask(frames.end))
            times.append((time.perf_counter() - started) * 1000)
            if ended.error is not ErrorCode.NONE:
                raise RuntimeError(f"a commit was refused: {ended.error.name}")
            if is_v2:
                producer_id, epoch = ended.producer_id, ended.epoch
            else:
                sequence += 1
    return times


def _again(ask: Callable[[], ErrorCode]) -> None:
    while (code := ask()) in RETRIABLE:
        time.sleep(BACKOFF_S)
    if code is not ErrorCode.NONE:
        raise RuntimeError(f"a request of a transaction was refused: {code.name}")


# --- 500 producers ---


def _many_producers(report: Report, brokers: Brokers, runs: int, seconds: float) -> None:
    measured = in_turns(brokers, runs, lambda broker: asyncio.run(_crowd(broker.bootstrap, seconds)))
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
        owner = await self._own()
        self._producer_id, self._epoch = owner.producer_id, owner.producer_epoch

    def close(self) -> None:
        self._writer.close()

    async def work(self, ready: asyncio.Event) -> None:
        frames = TransactionFrames(self._id, self._partition, is_v2=True)
        await ready.wait()
        while True:
            frames.stamp(self._producer_id, self._epoch, 0)
            while (code := frames.produce_error(await self._ask(frames.produce))) in RETRIABLE:
                await asyncio.sleep(CROWD_BACKOFF_S)
            ended = frames.ended(await self._ask(frames.end))
            if code is not ErrorCode.NONE or ended.error is not ErrorCode.NONE:
                raise RuntimeError(f"{self._id} was refused: {code.name}, {ended.error.name}")
            self._producer_id, self._epoch = ended.producer_id, ended.epoch
            self.done += 1

    async def _own(self) -> InitProducerIdResponse:
        request = InitProducerIdRequest(self._id, 60_000)
        while True:
            frame = b"".join(api_of(22).frame_request(request, 5, 1, "crowd"))
            response: InitProducerIdResponse = api_of(22).read_response(await self._ask(frame), 5)[1]
            error = ErrorCode.of(response.error_code)
            if error is ErrorCode.NONE:
                return response
            if error not in RETRIABLE:
                raise RuntimeError(f"{self._id} was refused: {error.name}")
            await asyncio.sleep(CROWD_BACKOFF_S)

    async def _ask(self, frame: bytes | bytearray) -> bytes:
        self._writer.write(frame)
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return await self._reader.readexactly(size)


# --- what transactions cost ---


def _cost(report: Report, brokers: Brokers, runs: int, records: int) -> None:
    """Kafka's ProducerPerformance with transactions of 100 ms and without, in turns.

    What counts is the share in each pair, as the machine is not equally fast at all times.
    """
    pairs = in_turns(brokers, runs, partial(_pair, records=records))
    rates = {name: [with_ for _, with_ in found] for name, found in pairs.items()}
    compare(report, bench=BENCH, case="1 KB records in 100 ms transactions", unit="records/s", values=rates)
    shares = {name: [with_ / without for without, with_ in found] for name, found in pairs.items()}
    case = "1 KB records in 100 ms transactions, share of the rate without them"
    compare(report, bench=BENCH, case=case, unit="share", values={**shares, "limit": [0.97]})


def _pair(broker: SemelBroker | ApacheKafka, records: int) -> tuple[float, float]:
    """(records/s without transactions, with them)"""
    topic = f"cost-{time.time_ns()}"
    with RawClient(broker.bootstrap) as client:
        client.create_topic(topic, segment_bytes=str(128 << 20), retention_bytes=str(256 << 20))
    return _performance(broker, topic, records), _performance(broker, topic, records, TRANSACTION_MS)


def _performance(broker: SemelBroker | ApacheKafka, topic: str, records: int, transaction_ms: int = 0) -> float:
    words = ["--topic", topic, "--num-records", str(records), "--record-size", "1024", "--throughput", "-1"]
    words += ["--producer-props", f"bootstrap.servers={broker.bootstrap}"]
    if transaction_ms:
        words += [f"transactional.id={topic}", "--transaction-duration-ms", str(transaction_ms)]
    command = tool_command("org.apache.kafka.tools.ProducerPerformance", *words, heap_mb=1024)
    command.remove("-XX:TieredStopAtLevel=1")  # it runs for long enough to be compiled well
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.findall(r"records sent, ([\d.]+) records/sec", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"ProducerPerformance failed:\n{done.stdout[-2_000:]}\n{done.stderr[-2_000:]}")
    return float(found[-1])
