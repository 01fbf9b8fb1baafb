"""A bank whose accounts are a table: transfers come from a topic, balances and offsets commit together.

    python examples/bank_to_postgres.py localhost:9092 postgresql://bank:secret@localhost/ledger

Kill it at any moment and start it again: the total stays the same to the cent.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import psycopg

import semel

ACCOUNTS, START_CENTS, TRANSFERS = 20, 10_000, 1_000
MOVE = "UPDATE accounts SET cents = cents + %s WHERE id = %s"


def transfer(record: Any) -> list[semel.Statement]:
    """Both sides of a transfer. An account that would be overdrawn refuses: the record becomes a dead letter."""
    order = json.loads(record.value)
    return [
        semel.Statement(MOVE, [-order["cents"], order["from"]]),
        semel.Statement(MOVE, [order["cents"], order["to"]]),
    ]


def main(brokers: str, dsn: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        admin.create_topic("transfers", 4, if_not_exists=True)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS accounts (id int PRIMARY KEY, cents int CHECK (cents >= 0))")
        connection.execute(
            "INSERT INTO accounts SELECT id, %s FROM generate_series(1, %s) AS id ON CONFLICT DO NOTHING",
            [START_CENTS, ACCOUNTS],
        )
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for _ in range(TRANSFERS):
            one, other = random.sample(range(1, ACCOUNTS + 1), 2)
            order = {"from": one, "to": other, "cents": random.randrange(1, 2_000)}
            producer.send("transfers", json.dumps(order), str(one))
    sink = semel.Postgres(dsn, dead_letters=True)
    stats = semel.process(
        "transfers", sink, transfer, application_id="bank", bootstrap_servers=brokers, stop_at_end=True
    )
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT sum(cents) FROM accounts").fetchone()
    print(f"{stats.records_in} transfers, {stats.dead_letters} refused, {row[0] if row else 0} cents in all accounts")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
