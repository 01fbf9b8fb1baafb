"""A member of a consume-process-produce group, as a program: confluent-kafka reads, writes and commits as one.

    python -m tests.guarantees.pipeline_member BOOTSTRAP NAME GROUP SOURCE TARGET [FREEZE_AFTER]

It copies records from the source to the target topic, a few in each transaction, with NAME as transactional id. With
FREEZE_AFTER it says `holding` when its open transaction has that many records, before it commits them, and waits for a
line on stdin; what becomes of a transaction is printed as `committed TOTAL` or `refused CODE`, and after the latter it
ends.
"""

from __future__ import annotations

import sys
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition


def main() -> None:
    bootstrap, name, group, source, target, *rest = sys.argv[1:]
    freeze_after = int(rest[0]) if rest else 0
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "client.id": name,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 300,
            "max.poll.interval.ms": 300_000,
        }
    )
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "transaction.timeout.ms": 60_000})
    producer.init_transactions(30)
    consumer.subscribe([source], on_assign=lambda _, parts: say("assigned", len(parts)))
    total = 0
    while True:
        records = [record for record in consumer.consume(5, 0.2) if record.error() is None]
        if records:
            total += len(records)
            hold = 0 < freeze_after <= total
            settle(producer, consumer, records, target, name, hold)
            say("committed", total)
            freeze_after = 0 if hold else freeze_after


def settle(producer: Any, consumer: Any, records: list[Message], target: str, name: str, hold: bool) -> None:
    """One transaction: output and positions, all or nothing."""
    producer.begin_transaction()
    for record in records:
        producer.produce(target, record.value(), name, partition=record.partition())
    producer.flush(30)
    positions = {record.partition(): record.offset() + 1 for record in records}
    metadata = consumer.consumer_group_metadata()
    if hold:
        say("holding", len(records))
        sys.stdin.readline()
    try:
        producer.send_offsets_to_transaction(
            [TopicPartition(records[0].topic(), *position) for position in positions.items()], metadata, 30
        )
        producer.commit_transaction(30)
    except KafkaException as error:
        say("refused", error.args[0].name())
        producer.abort_transaction(30)
        sys.exit(0)


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    main()
