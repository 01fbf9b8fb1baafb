"""How fast a broker is through the eyes of a client: confluent-kafka, Kafka's performance tools, bare connections."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contestants import PARTITIONS, Node, topic
from semel.local.apache_kafka import tool_command

CHECKOUT = Path(__file__).resolve().parents[1]


class Rates(NamedTuple):
    produce: float
    consume: float


def with_confluent(node: Node, record_bytes: int, count: int) -> Rates:
    with topic(node) as name:
        produce_rate = confluent_produce(node, name, record_bytes, count)
        return Rates(produce_rate, confluent_consume(node, name, count))


def confluent_produce(node: Node, name: str, record_bytes: int, count: int) -> float:
    """Records per second until the last is acknowledged by all replicas, with the client's own defaults."""
    from confluent_kafka import Producer

    settings = {"queue.buffering.max.messages": 500_000, "queue.buffering.max.kbytes": 500_000, "log_level": 0}
    producer = Producer({"bootstrap.servers": node.bootstrap, **settings})
    producer.list_topics(name, timeout=30)
    value = bytes(record_bytes)
    started = time.perf_counter()
    for _ in range(count):
        while True:
            try:
                producer.produce(name, value)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(120)
    if left:
        raise RuntimeError(f"{left} of {count} records were not acknowledged within two minutes")
    return count / (time.perf_counter() - started)


def confluent_consume(node: Node, name: str, count: int, partitions: int = PARTITIONS, start: int = 0) -> float:
    """Records per second from the first one on."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"group.id": "bench", "enable.auto.commit": False, "log_level": 0, "check.crcs": True}
    # its default of 100,000 messages is 10 MB of small ones, and then it takes a break of up to a second
    settings |= {"queued.min.messages": 1_000_000}
    consumer = Consumer({"bootstrap.servers": node.bootstrap, **settings})
    try:
        consumer.assign([TopicPartition(name, partition, start) for partition in range(partitions)])
        got = first = len(consumer.consume(1, 60))
        started = time.perf_counter()
        while got < count:
            messages = consumer.consume(min(10_000, count - got), 0.5)
            got += len(messages)
            if not messages and time.perf_counter() - started > 120:
                raise RuntimeError(f"{got} of {count} records came within two minutes")
        return (got - first) / (time.perf_counter() - started)
    finally:
        consumer.close()


def with_kafkas_tools(node: Node, record_bytes: int, count: int) -> Rates:
    """ProducerPerformance and ConsumerPerformance as they come, but compiled as a long-running program would be."""
    with topic(node) as name:
        produced = perf_tool(
            "ProducerPerformance", node, name, "--record-size", str(record_bytes), "--throughput", "-1", count=count
        )
        consumed = perf_tool("ConsumerPerformance", node, name, "--timeout", "60000", count=count)
    (sent,) = [line for line in produced.splitlines() if line.startswith(f"{count} records sent")]
    # start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, rebalance.time.ms,
    # fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec
    fields = [field.strip() for field in consumed.splitlines()[-1].split(",")]
    return Rates(float(sent.split(",")[1].split()[0]), float(fields[9]))


def perf_tool(tool: str, node: Node, name: str, *words: str, count: int) -> str:
    command = tool_command(
        tool, "--bootstrap-server", node.bootstrap, "--topic", name, "--num-records", str(count), *words, heap_mb=1024
    )
    command.remove("-XX:TieredStopAtLevel=1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} ended with code {done.returncode}:\n{done.stdout[-2_000:]}\n{done.stderr[-2_000:]}")
    return done.stdout


def produce_load(mode: str, node: Node, name: str, **options: object) -> dict[str, Any]:
    """One run of the load generator in a process of its own."""
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "benchmarks.produce_load", mode, node.bootstrap, name, *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator failed:\n{done.stderr[-2_000:]}")
    return dict(json.loads(done.stdout))
