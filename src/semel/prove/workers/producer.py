"""Fills the source in transactions: `python -m semel.prove.workers.producer JSON`.

Each transaction has a number and numbered records; some are preceded by one that is aborted. It notes in a file which
one was acknowledged last, as an application does in its database, and never sends it again: what is acknowledged must
be there. After a crash it also looks in the topic, through a client that is not ours, for what was committed without an
response, and goes on from there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from semel.client.errors import KafkaError
from semel.client.producer import Producer
from semel.prove.checker import Seen, read
from semel.prove.inputs import ABORT_EVERY, aborted_records, records_of, tag_of, transaction_of

PATIENCE = 5


def main(options: dict[str, Any]) -> int:
    failures = 0
    while True:
        committed = max(map(_number, read(options["direct"], [options["topic"]])), default=-1)
        done = max(committed, _acknowledged(options["state"]))
        if done + 1 >= options["upto"]:
            print(f"fed {done + 1}", flush=True)
            return 0
        try:
            _feed(options, done + 1)
        except KafkaError as error:
            failures += 1
            print(f"again after {type(error).__name__}: {error}", flush=True)
            if failures > PATIENCE:
                return 3
            time.sleep(0.2)


def _number(seen: Seen) -> int:
    return transaction_of(seen) or 0


def _acknowledged(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except FileNotFoundError:
        return -1


def _acknowledge(path: str, number: int) -> None:
    aside = Path(path + ".new")
    aside.write_text(str(number))
    aside.rename(path)


def _feed(options: dict[str, Any], first: int) -> None:
    """From a transaction on, in order. An error leaves it to the next start to see what is committed."""
    producer = Producer(
        bootstrap_servers=options["brokers"],
        transactional_id=options["transactional_id"],
        transaction_timeout_ms=10_000,
        client_id="producer",
        request_timeout_ms=2_500,
        linger_ms=0,
    )
    try:
        producer.init_transactions(30)
        print("working", flush=True)
        for number in range(first, options["upto"]):
            if number % ABORT_EVERY == ABORT_EVERY - 1:
                _transaction(producer, options["topic"], number, aborted_records(number), commit=False)
            _transaction(producer, options["topic"], number, records_of(number), commit=True)
            _acknowledge(options["state"], number)
            time.sleep(options["pace_ms"] / 1000)
    finally:
        producer.close(5)


def _transaction(producer: Producer, topic: str, number: int, records: list[tuple[bytes, bytes]], commit: bool) -> None:
    producer.begin_transaction()
    for key, value in records:
        producer.send(topic, value, key, headers=[("txn", tag_of(number).encode())])
    if commit:
        producer.commit_transaction(20)
    else:
        producer.flush(20)
        producer.abort_transaction(20)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
