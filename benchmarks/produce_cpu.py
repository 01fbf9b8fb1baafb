"""CPU time of the broker for one Produce request, in two checkouts of semel side by side:

    python -m benchmarks.produce_cpu --against PATH-OF-OTHER-CHECKOUT

Each checkout's broker runs as a process and gets the same requests over one connection; its CPU time is what the kernel
counts for all its threads. The checkouts take turns, so that a slow moment of the machine hits both. Requests have many
different batches: a broker that remembers the layout of the last batches does not meet the same one again.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import interleave, median
from benchmarks.peers.raw_client import RawClient
from semel.local.brokers import SEMEL, SemelBroker
from semel.protocol.api import api_of
from semel.protocol.messages.records import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.protocol.rows import Record, encode_batch

CHECKOUT = Path(__file__).resolve().parents[1]
FRAMES = 32  # different requests of one shape
VERSION = 8


class Shape(NamedTuple):
    """Batches of one kind. With `vary`, the values have between half and one and a half times the size."""

    records: int
    record_bytes: int
    vary: bool
    requests: int  # in one run

    @property
    def label(self) -> str:
        return f"{self.records:,} x {self.record_bytes:,} B{', lengths vary' if self.vary else ''}"


SHAPES = (
    Shape(1, 100, False, 2_000),
    Shape(16, 1_000, False, 1_000),
    Shape(16, 1_000, True, 1_000),
    Shape(160, 100, False, 1_000),
    Shape(160, 100, True, 1_000),
    Shape(8_500, 100, False, 50),
    Shape(8_500, 100, True, 50),
)


def frames_of(shape: Shape, topic: str) -> list[bytes]:
    chooser = random.Random(shape.label)
    frames = []
    for correlation_id in range(FRAMES if shape.records < 1_000 else 4):
        now_ms = time.time_ns() // 1_000_000
        sizes = [
            chooser.randint(shape.record_bytes // 2, shape.record_bytes * 3 // 2) if shape.vary else shape.record_bytes
            for _ in range(shape.records)
        ]
        records = [Record(number, now_ms, None, chooser.randbytes(size)) for number, size in enumerate(sizes)]
        data = PartitionProduceData(0, encode_batch(records))
        request = ProduceRequest(None, 1, 30_000, [TopicProduceData(topic, partition_data=[data])])
        frames.append(b"".join(api_of(0).frame_request(request, VERSION, correlation_id, "load")))
    return frames


def cpu_us(pid: int) -> float:
    """What the threads of a process have used, in microseconds."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1000


class Contestant:
    """The broker of one checkout, with one connection to it."""

    def __init__(self, checkout: Path) -> None:
        semel = ("env", f"PYTHONPATH={checkout / 'src'}", *SEMEL)
        self.node = SemelBroker(None, "--fsync", "os", semel=semel).start()
        self._topics = 0

    def cpu_per_request_us(self, shape: Shape) -> float:
        """In a topic of its own; the requests before the measurement are not counted."""
        self._topics += 1
        topic = f"cpu-{self._topics}"
        with RawClient(self.node.bootstrap) as client:
            client.create_topic(topic, 1)
        frames = frames_of(shape, topic)
        host, _, port = self.node.bootstrap.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _exchange(connection, frames, len(frames))
            assert self.node.process is not None
            before_us = cpu_us(self.node.process.pid)
            _exchange(connection, frames, shape.requests)
            return (cpu_us(self.node.process.pid) - before_us) / shape.requests


def _exchange(connection: socket.socket, frames: Sequence[bytes], requests: int) -> None:
    for number in range(requests):
        connection.sendall(frames[number % len(frames)])
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        response = connection.recv(size, socket.MSG_WAITALL)
        error = int.from_bytes(response[-30 - 4 : -28 - 4], "big")  # base offset, append time, start offset, throttle
        if len(response) != size or error:
            raise RuntimeError(f"the broker refused a request or closed the connection: error {error}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.produce_cpu", description=__doc__)
    parser.add_argument("--against", type=Path, action="append", default=[], help="another checkout, may be repeated")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    args = parser.parse_args(arguments)
    contestants = {str(path): Contestant(path.resolve()) for path in (*args.against, CHECKOUT)}
    try:
        print("us per request: " + ", ".join(contestants))
        for shape in SHAPES:
            if args.only not in shape.label:
                continue

            def measure(contestant: Contestant, shape: Shape = shape) -> Callable[[], float]:
                return lambda: contestant.cpu_per_request_us(shape)

            found = interleave({name: measure(each) for name, each in contestants.items()}, runs=args.runs)
            print(f"{shape.label:<28}" + "".join(f"{median(values):>10.1f}" for values in found.values()), flush=True)
    finally:
        for contestant in contestants.values():
            contestant.node.close()


if __name__ == "__main__":
    main(sys.argv[1:])
