"""A shop that sells and announces in one database transaction; a relay brings the announcements to a topic.

    python examples/outbox.py localhost:9092 postgresql://shop:secret@localhost/shop

What is sold is announced exactly once, what was rolled back never.
"""

from __future__ import annotations

import json
import random
import sys

import psycopg

import semel

STOCK, CUSTOMERS = 50, 80


def sell(connection: psycopg.Connection, outbox: semel.Outbox, customer: int) -> bool:
    """The stock and the announcement change together, or neither does."""
    sku = random.choice(("tea", "salt"))
    try:
        with connection.transaction():
            connection.execute("UPDATE stock SET n = n - 1 WHERE sku = %s", [sku])  # also locks the order of its key
            outbox.send(connection, "sold", json.dumps({"sku": sku, "customer": customer}), key=sku)
        return True
    except psycopg.errors.CheckViolation:  # sold out
        return False


def main(brokers: str, dsn: str) -> None:
    outbox = semel.Outbox(dsn, "shop", bootstrap_servers=brokers)
    outbox.init()
    with semel.Admin(bootstrap_servers=brokers) as admin:
        admin.create_topic("sold", 2, if_not_exists=True)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS stock (sku text PRIMARY KEY, n int CHECK (n >= 0))")
        connection.execute(
            "INSERT INTO stock VALUES ('tea', %(n)s), ('salt', %(n)s) ON CONFLICT (sku) DO UPDATE SET n = excluded.n",
            {"n": STOCK // 2},
        )
        sold = sum(sell(connection, outbox, customer) for customer in range(CUSTOMERS))
    stats = outbox.run(until_empty=True)  # in production: `semel outbox run`, a process of its own
    print(f"{sold} sold, {stats.rows} announced")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
