"""A producer as a program, to be frozen in the middle of its transaction.

    python -m tests.guarantees.frozen_producer BOOTSTRAP ID TOPIC TIMEOUT_MS

It opens a transaction, writes one record, says `open`, and waits for a line on stdin. Then it writes another record and
commits, and says `committed` or `refused CODE`; with the word abort it aborts, and the code is what comes of that.
"""

from __future__ import annotations

import sys

from confluent_kafka import KafkaException

from tests.support.transactional import code_of, transactional, write


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
        refusal = error.args[0]
        code = code_of(lambda: producer.abort_transaction(20)) if refusal.txn_requires_abort() else 0
        print("refused", code or refusal.code(), flush=True)
        return
    print("committed", flush=True)


if __name__ == "__main__":
    main()
