"""A bank that books into a table and announces into a topic, with one decision: both commit or neither.

    python examples/topics_and_postgres.py localhost:9092 postgresql://bank:secret@localhost/ledger

Kill it at any moment and start it again: no booking without its announcement, none announced twice.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import psycopg

import semel

ACCOUNTS, DEPOSITS = 20, 500
BOOK = "UPDATE accounts SET cents = cents + %s WHERE id = %s"


def book(record: Any) -> list[Any]:
    """A row and a record. What is decided is in both; what is not, in neither."""
    deposit = json.loads(record.value)
    return [
        semel.Statement(BOOK, [deposit["cents"], deposit["account"]]),
        semel.Output(record.value, key=str(deposit["account"]), topic="booked"),
    ]


def main(brokers: str, dsn: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("deposits", "booked"):
            admin.create_topic(topic, 4, if_not_exists=True)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS accounts (id int PRIMARY KEY, cents bigint)")
        connection.execute(
            "INSERT INTO accounts SELECT id, 0 FROM generate_series(1, %s) AS id ON CONFLICT DO NOTHING", [ACCOUNTS]
        )
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(DEPOSITS):
            deposit = {"id": number, "account": random.randint(1, ACCOUNTS), "cents": random.randint(1, 10_000)}
            producer.send("deposits", json.dumps(deposit), str(deposit["account"]))
    sink = semel.Postgres(dsn, with_topics=True)
    stats = semel.process("deposits", sink, book, application_id="booking", bootstrap_servers=brokers, stop_at_end=True)
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT sum(cents) FROM accounts").fetchone()
    print(f"{stats.records_in} deposits, {row[0] if row else 0} cents in all accounts")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
