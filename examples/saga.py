"""Orders that take stock and charge a customer, each of which may refuse: a saga does both, or undoes what was done.

    python examples/saga.py localhost:9092

Run a broker with `semel broker`. `semel saga list order --all` shows what became of each order.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import semel

STOCK, CREDIT = 5, 30


def take(call: Any) -> None:
    left = call.state.get(call.data["sku"], STOCK)
    if not left:
        raise semel.StepFailedError("sold out")
    call.state.put(call.data["sku"], left - 1)


def put_back(call: Any) -> None:
    call.state.put(call.data["sku"], call.state.get(call.data["sku"]) + 1)


def charge(call: Any) -> int:
    left: int = call.state.get(call.data["customer"], CREDIT) - call.data["price"]
    if left < 0:
        raise semel.StepFailedError("no credit")
    call.state.put(call.data["customer"], left)
    return left


def main(brokers: str) -> None:
    steps = [
        semel.SagaStep("take", take, put_back, service="stock", key=lambda data: data["sku"]),
        semel.SagaStep("charge", charge, service="credit", key=lambda data: data["customer"]),
    ]
    orders = semel.Sagas("order", steps, bootstrap_servers=brokers)
    orders.create(partitions=2)
    loops = [orders.orchestrator(), orders.participant("stock"), orders.participant("credit")]
    threads = [threading.Thread(target=loop.run) for loop in loops]  # in production: processes of their own
    for thread in threads:
        thread.start()
    for number in range(8):
        orders.start(f"o-{number}", {"sku": "tea", "customer": ("ada", "bob")[number % 2], "price": 15})
    ends = [orders.wait(f"o-{number}").status for number in range(8)]
    for loop, thread in zip(loops, threads, strict=True):
        loop.stop()
        thread.join()
    orders.close()
    print(f"{ends.count('done')} orders done, {ends.count('compensated')} undone")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 2 else sys.exit(__doc__)
