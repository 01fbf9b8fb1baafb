"""A producer as a program, to be frozen in the middle of its transaction.

    python -m tests.guarantees.frozen_producer BOOTSTRAP ID TOPIC TIMEOUT_MS

It opens a transaction, writes one record, says `open`, and waits for a line on stdin. Then it writes another record and
commits, and says `committed` or `refused CODE`.
"""

from __future__ import annotations

import sys

from confluent_kafka import KafkaException

from tests.support.transactional import transactional, write


def main() -> None:
    bootstrap, id_, topic, timeout_ms = sys.argv[1:]
    producer = transactional(bootstrap, id_, **{"transaction.timeout.ms": int(timeout_ms)})
    producer.begin_transaction()
    write(producer, [b"frozen"], topic)
    print("open", flush=True)
    sys.stdin.readline()
    try:
        producer.produce(topic, b"late", partition=0)
        producer.flush(20)
        producer.commit_transaction(20)
    except KafkaException as error:
        print("refused", error.args[0].code(), flush=True)
        return
    print("committed", flush=True)


if __name__ == "__main__":
    main()
