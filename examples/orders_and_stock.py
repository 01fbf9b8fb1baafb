"""An order changes two topics, shipments and stock, in one transaction: readers see both or neither.

python examples/orders_and_stock.py                     # on a broker of its own
python examples/orders_and_stock.py localhost:9092      # on yours
semel consume store.shipments --exit                    # one for each order that could be served
"""

from __future__ import annotations

import json
import sys
from typing import Any

import semel

STOCK, ORDERS = 30, 50


def serve(order: Any, stock: Any) -> list[semel.Output]:
    """What is left is state, by article; what was asked for in vain changes nothing."""
    wanted, article = json.loads(order.value), order.key
    left = stock.get(article, STOCK) - wanted["pieces"]
    if left < 0:
        return [semel.Output(order.value, article, "store.refused")]
    stock.put(article, left)
    return [
        semel.Output(json.dumps({"order": wanted["id"], "pieces": wanted["pieces"]}), article, "store.shipments"),
        semel.Output(b"%d" % left, article, "store.stock"),
    ]


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("store.orders", "store.shipments", "store.stock", "store.refused"):
            admin.create_topic(topic, 2, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(ORDERS):
            order = json.dumps({"id": number, "pieces": 1 + number % 3})
            producer.send("store.orders", order, ("tea", "salt")[number % 2])
    left = semel.KeyedState("left", format="int64")
    options = {"application_id": "store", "bootstrap_servers": brokers, "stop_at_end": True}
    semel.process("store.orders", None, serve, state=left, **options)
    shipped = semel.read_table("store.shipments", bootstrap_servers=brokers)["value"].to_pylist()
    stock = semel.read_table("store.stock", bootstrap_servers=brokers).to_pylist()
    last = {each["key"]: int(each["value"]) for each in stock}
    pieces = sum(json.loads(value)["pieces"] for value in shipped)
    print(f"{pieces} pieces shipped, {sum(last.values())} left, of {STOCK * len(last)}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
