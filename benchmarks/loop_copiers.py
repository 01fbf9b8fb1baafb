"""Copiers of the benchmark of loops that are Python programs: semel's loop by rows and by tables, and confluent-kafka's
consume, produce and commit written by hand. Each keeps keys and values, exactly once, and runs until it is ended.

    python -m benchmarks.loop_copiers '{"kind": "rows", "brokers": ..., "id": ..., "source": ..., "target": ...,
                                        "commit_ms": 100}'

It prints "first" when the first record is there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

CHUNK = 10_000  # messages of one call: more than that does not make confluent-kafka faster


class First:
    """Says it once."""

    def __init__(self) -> None:
        self._is_said = False

    def say(self) -> None:
        if not self._is_said:
            self._is_said = True
            print("first", flush=True)


def by_semel(job: dict[str, Any]) -> None:
    import semel

    first = First()

    def copy(batch: Any) -> Any:  # a record, or a table of them
        first.say()
        return batch

    semel.process(
        job["source"],
        job["target"],
        copy,
        application_id=job["id"],
        bootstrap_servers=job["brokers"],
        tables=job["kind"] == "tables",
        commit_interval_ms=job["commit_ms"],
    )


def by_hand(job: dict[str, Any]) -> None:
    """As confluent-kafka's own example of exactly-once does it, with messages taken by the chunk."""
    from confluent_kafka import Consumer, Producer

    brokers = {"bootstrap.servers": job["brokers"], "log_level": 0}
    consumer = Consumer(
        brokers
        | {
            "group.id": job["id"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "queued.min.messages": 1_000_000,
            "fetch.wait.max.ms": 10,
        }
    )
    producer = Producer(
        brokers
        | {
            "transactional.id": job["id"],
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )
    producer.init_transactions()
    consumer.subscribe([job["source"]])
    first, interval_s = First(), job["commit_ms"] / 1000
    while True:
        messages = consumer.consume(CHUNK, 0.001)
        if not messages:
            continue
        first.say()
        producer.begin_transaction()
        until_s = time.perf_counter() + interval_s
        while True:
            for message in messages:
                if (error := message.error()) is not None:
                    raise RuntimeError(error.str())
                producer.produce(job["target"], message.value(), message.key())
            producer.poll(0)
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                break
            messages = consumer.consume(CHUNK, min(left_s, 0.001))
        offsets = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(
            [each for each in offsets if each.offset >= 0], consumer.consumer_group_metadata()
        )
        producer.commit_transaction()


def main(job: dict[str, Any]) -> None:
    (by_hand if job["kind"] == "by hand" else by_semel)(job)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
