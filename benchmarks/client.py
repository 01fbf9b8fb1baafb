"""The client against confluent-kafka, kafka-python and aiokafka, on one Apache Kafka node with its own defaults.

Each side of the client has a file of its own: `client_produce`, `client_consume`, and `client_asyncio` for `semel.aio`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from benchmarks.harness import Report
from semel.local.apache_kafka import ApacheKafka

SIDES = ("produce", "consume", "asyncio")


def run(report: Report, quick: bool = False) -> None:
    with ApacheKafka(heap_mb=1024) as kafka:
        for side in SIDES:
            if find_spec(f"benchmarks.client_{side}") is not None:
                getattr(import_module(f"benchmarks.client_{side}"), f"run_{side}")(report, kafka, quick)
