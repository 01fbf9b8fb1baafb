"""semel's broker and Apache Kafka as contestants: both running on fresh data, and what either has to do."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Literal

from benchmarks.peers.raw_client import RawClient
from semel.local.apache_kafka import VERSION, ApacheKafka
from semel.local.brokers import SemelBroker

KAFKA = f"Apache Kafka {VERSION}"
PARTITIONS = 4
MB = 1_000_000
TOPIC_CONFIG = {"file_delete_delay_ms": "1000", "segment_bytes": str(128 << 20)}

Fsync = Literal["os", "commit"]
Node = SemelBroker | ApacheKafka
_names = itertools.count(1)


@contextmanager
def pair(fsync: Fsync = "os") -> Iterator[dict[str, Node]]:
    """Both brokers, running, with fresh data that goes away at the end."""
    with ExitStack() as stack:
        semel = SemelBroker(None, "--fsync", fsync, "--set", "log.retention.check.interval.ms=2000")
        nodes: dict[str, Node] = {"semel": semel, KAFKA: ApacheKafka(fsync=fsync)}
        for node in nodes.values():
            stack.callback(node.close)
            node.start()
        yield nodes


@contextmanager
def topic(node: Node, partitions: int = PARTITIONS) -> Iterator[str]:
    """A fresh topic that is deleted afterwards, so that the disk does not fill."""
    from confluent_kafka.admin import AdminClient

    name = f"bench-{next(_names)}"
    with RawClient(node.bootstrap) as client:
        client.create_topic(name, partitions, **TOPIC_CONFIG)
    try:
        yield name
    finally:
        admin = AdminClient({"bootstrap.servers": node.bootstrap, "log_level": 0})
        admin.delete_topics([name])[name].result(60)


def resident_mb(node: Node) -> float:
    assert node.process is not None
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(node.process.pid)], capture_output=True, text=True, check=True
    )
    return int(shown.stdout) * 1024 / MB


def start_to_metadata_s(node: Node, timeout_s: float = 120) -> float:
    """Asks from the first moment on, as an impatient client does, until a broker is named in the response."""
    with ThreadPoolExecutor(1) as pool:
        started = time.perf_counter()
        starting = pool.submit(node.start, timeout_ms=timeout_s * 1000)
        while not _answers_metadata(node.bootstrap):
            if time.perf_counter() - started > timeout_s or (starting.done() and starting.exception()):
                break
            time.sleep(0.002)
        took_s = time.perf_counter() - started
        starting.result()
        return took_s


def _answers_metadata(bootstrap: str) -> bool:
    from semel.protocol.messages.cluster import MetadataRequest

    try:
        with RawClient(bootstrap, timeout_s=5) as client:
            return bool(client.call(3, 8, MetadataRequest(topics=[])).brokers)
    except (OSError, EOFError):
        return False


def create_topics(node: Node, topics: int, partitions: int) -> list[str]:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": node.bootstrap, "log_level": 0})
    names = [f"many-{number}" for number in range(topics)]
    for first in range(0, topics, 50):
        wanted = [NewTopic(name, partitions, 1) for name in names[first : first + 50]]
        for future in admin.create_topics(wanted, request_timeout=60).values():
            future.result(120)
    return names


def write_to_all(node: Node, names: list[str], partitions: int) -> None:
    """A record into every partition."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": node.bootstrap, "log_level": 0, "linger.ms": 50})
    for name in names:
        for partition in range(partitions):
            producer.produce(name, b"used", partition=partition)
        producer.poll(0)
    left = producer.flush(300)
    if left:
        raise RuntimeError(f"{left} partitions did not get their record within five minutes")
