"""The customers of examples/bank.py: each transaction opens an account or moves money, and is there as a whole.

python examples/bank_producer.py                    # on a broker of its own
python examples/bank_producer.py localhost:9092     # on yours; then examples/bank.py there
semel consume bank.transfers --exit                 # what was ordered
"""

from __future__ import annotations

import json
import random
import sys

import semel

ACCOUNTS, TRANSFERS, START_CENTS = 12, 500, 100_000


def orders(luck: random.Random) -> list[dict]:
    accounts = [f"acc-{number:02d}" for number in range(ACCOUNTS)]
    opened = [{"kind": "deposit", "to": account, "cents": START_CENTS} for account in accounts]
    moved = []
    for _ in range(TRANSFERS):
        one, other = luck.sample(accounts, 2)
        moved.append({"kind": "transfer", "from": one, "to": other, "cents": luck.randrange(1, 5_000)})
    return [{"id": number, **order} for number, order in enumerate(opened + moved)]


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("bank.transfers", "bank.statements", "bank.rejected"):
            admin.create_topic(topic, 4, if_not_exists=True)
    made = orders(random.Random(7))
    with semel.Producer(bootstrap_servers=brokers, transactional_id="bank-customers") as producer:
        producer.init_transactions()
        for first in range(0, len(made), 50):
            with producer.transaction():  # an exception in here aborts
                for order in made[first : first + 50]:
                    producer.send("bank.transfers", json.dumps(order), order.get("from", order["to"]))
    print(f"{len(made)} orders, {ACCOUNTS * START_CENTS} cents in all accounts")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
