"""A produce load over bare connections, made to run in a process of its own: `python -m benchmarks.produce_load ...`.

open: requests leave at a steady rate, whatever the broker does. A request's latency counts from the moment at which it
was due, so that a stall is felt by every request that it held up, also by those that could not even be sent.

closed: every connection keeps a few requests under way. It finds out how much the broker takes.

Frames are built in advance and responses are only counted and checked for an error, so that the generator takes a small
part of one core and is the same load on every broker.
"""

from __future__ import annotations

import argparse
import gc
import json
import select
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

VERSION = 8  # of Produce: the last one whose response has its error code at a fixed place
_SIZE = struct.Struct(">i")
_ERROR = struct.Struct(">h")


class Load(NamedTuple):
    """What to send: one batch for each request, connection n to partition n modulo the number of partitions."""

    bootstrap: str
    topic: str
    partitions: int
    connections: int
    records: int  # of a batch
    record_bytes: int
    acks: int = -1


class BrokerRefused(Exception):
    """A produce request came back with an error."""


class Connection:
    """A socket, the one request that it sends again and again, and when the ones without a response were due."""

    def __init__(self, load: Load, partition: int) -> None:
        host, _, port = load.bootstrap.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frame = _frame(load, partition)
        self.error_at = 4 + 4 + 4 + 2 + len(load.topic.encode()) + 4 + 4
        self.due: deque[float] = deque()
        self._rest = b""

    def send(self, due_s: float) -> None:
        self.due.append(due_s)
        self.socket.sendall(self.frame)

    def receive(self) -> int:
        """Reads what is there; the number of responses in it."""
        data = self._rest + self.socket.recv(1 << 16)
        if len(data) == len(self._rest):
            raise BrokerRefused("the broker closed the connection")
        at = count = 0
        while len(data) - at >= 4:
            (size,) = _SIZE.unpack_from(data, at)
            if len(data) - at - 4 < size:
                break
            (code,) = _ERROR.unpack_from(data, at + self.error_at)
            if code:
                raise BrokerRefused(f"the broker refused a produce request with error {code}")
            at += 4 + size
            count += 1
        self._rest = data[at:]
        return count


def _frame(load: Load, partition: int) -> bytes:
    from semel.protocol.api import api_of
    from semel.protocol.messages.records import PartitionProduceData, ProduceRequest, TopicProduceData
    from semel.protocol.rows import Record, encode_batch

    now_ms = time.time_ns() // 1_000_000
    records = [Record(number, now_ms, None, bytes(load.record_bytes)) for number in range(load.records)]
    data = PartitionProduceData(partition, encode_batch(records))
    request = ProduceRequest(None, load.acks, 30_000, [TopicProduceData(load.topic, partition_data=[data])])
    return b"".join(api_of(0).frame_request(request, VERSION, 1, "load"))


def connect(load: Load) -> list[Connection]:
    return [Connection(load, number % load.partitions) for number in range(load.connections)]


# --- open ---


def open_loop(load: Load, rate: float, seconds: float, warmup_s: float = 1.0) -> list[float]:
    """Latencies in seconds of all requests after the warm-up, sorted."""
    connections = connect(load)
    by_socket = {each.socket: each for each in connections}
    latencies: list[float] = []
    started = time.perf_counter()
    counted_from = started + warmup_s
    total = int(rate * (warmup_s + seconds))
    sent = answered = 0
    while answered < total:
        now = time.perf_counter()
        while sent < total and started + sent / rate <= now:
            connections[sent % len(connections)].send(started + sent / rate)
            sent += 1
        # select, not epoll: its timeout is in microseconds, and there are few connections
        wait_s = max(0.0, started + sent / rate - time.perf_counter()) if sent < total else 10.0
        readable, _, _ = select.select(by_socket, [], [], wait_s)
        if not readable and sent == total:
            raise BrokerRefused(f"{total - answered} of {total} requests had no response within 10 s")
        for each in readable:
            connection = by_socket[each]
            count = connection.receive()
            now = time.perf_counter()
            answered += count
            for _ in range(count):
                due = connection.due.popleft()
                if due >= counted_from:
                    latencies.append(now - due)
    return sorted(latencies)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


# --- closed ---


def closed_loop(load: Load, requests: int, in_flight: int = 5) -> float:
    """Requests per second, with so many under way on every connection."""
    connections = connect(load)
    poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
    by_fd = {each.socket.fileno(): each for each in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    started = time.perf_counter()
    sent = answered = 0
    for _ in range(in_flight):
        for connection in connections:
            if sent < requests:
                connection.send(0)
                sent += 1
    while answered < requests:
        ready = poll.poll(10_000)
        if not ready:
            raise BrokerRefused(f"{requests - answered} of {requests} requests had no response within 10 s")
        for fd, _ in ready:
            connection = by_fd[fd]
            count = connection.receive()
            answered += count
            for _ in range(min(count, requests - sent)):
                connection.send(0)
                sent += 1
    return requests / (time.perf_counter() - started)


# --- as a program ---


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.produce_load", description=__doc__)
    parser.add_argument("mode", choices=("open", "closed"))
    parser.add_argument("bootstrap")
    parser.add_argument("topic")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--records", type=int, default=1)
    parser.add_argument("--record-bytes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=5_000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=5)
    args = parser.parse_args(arguments)
    load = Load(args.bootstrap, args.topic, args.partitions, args.connections, args.records, args.record_bytes)
    gc.disable()
    if args.mode == "open":
        latencies = open_loop(load, args.rate, args.seconds)
        result = {f"p{percent:g}": percentile(latencies, percent) * 1000 for percent in (50, 99, 99.9)}
        result |= {"mean": statistics.fmean(latencies) * 1000, "max": latencies[-1] * 1000}
    else:
        result = {"requests_per_s": closed_loop(load, args.requests, args.in_flight)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
