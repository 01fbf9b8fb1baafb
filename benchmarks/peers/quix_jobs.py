"""Quix Streams as a peer in ordinary jobs (those of spark_jobs.py). It runs in a virtual environment of its own.

    python quix_jobs.py '{"brokers": ..., "id": ..., "work": "filter and re-key", "source": ..., "targets": [...],
        "commit_s": 1.0, "folder": ...}'

It says "first" when the first record is there, and runs until it is ended.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from quixstreams import Application  # type: ignore[import-not-found]
from quixstreams.models import Serializer  # type: ignore[import-not-found]

CURRENCIES = ("EUR", "USD", "GBP")
MINUTE_MS = 60_000
PRODUCTS = {number: f"product {number}" for number in range(1_000)}


class ValueOfPair(Serializer):  # type: ignore[misc]
    """Of (key, value, ...)."""

    def __call__(self, value: Any, ctx: Any) -> bytes:
        found: bytes = value[1]
        return found


def order_of(value: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "order_id" in found else None


def event_time(value: Any, headers: Any, timestamp_ms: int, kind: Any) -> int:
    order = order_of(value)
    return timestamp_ms if order is None else int(datetime.fromisoformat(order["at"]).timestamp() * 1000)


def record(order: dict[str, Any], *names: str) -> bytes:
    return json.dumps({name: order[name] for name in names if name in order}).encode()


def rekeyed(orders: Any, targets: list[Any]) -> None:
    kept = orders.filter(lambda order: order["amount"] >= 20)
    gross = kept.apply(lambda order: {**order, "gross": round(order["amount"] * 1.19, 2)})
    chosen = gross.apply(lambda o: (o["user"], record(o, "order_id", "user", "gross", "currency", "note")))
    sent(chosen, targets[0])


def counted(orders: Any, targets: list[Any]) -> None:
    counts = orders.group_by("user").tumbling_window(MINUTE_MS, grace_ms=MINUTE_MS).count().current()
    made = counts.apply(
        lambda window, user, *_: (
            user,
            json.dumps({"user": user, "minute": window["start"], "orders": window["value"]}).encode(),
        ),
        metadata=True,
    )
    sent(made, targets[0])


def joined(orders: Any, targets: list[Any]) -> None:
    known = orders.filter(lambda order: order["product"] in PRODUCTS)
    named = known.apply(lambda order: {**order, "name": PRODUCTS[order["product"]]})
    chosen = named.apply(lambda o: (str(o["product"] % 20), record(o, "order_id", "name", "amount", "note")))
    sent(chosen, targets[0])


def sent(pairs: Any, target: Any) -> None:
    """(key, value) of each to a topic."""
    pairs.to_topic(target, key=lambda pair: pair[0].encode())


def sorted_out(values: Any, targets: list[Any]) -> None:
    """A topic for each currency, the last one for what cannot be read."""
    by_currency = dict(zip(CURRENCIES, targets[:-1], strict=True))

    def where(pair: Any, *_: Any) -> Any:
        return targets[-1] if pair[2] is None else by_currency.get(pair[2].get("currency"), targets[-1])

    read = values.apply(lambda value, key, *_: (key, value, order_of(value)), metadata=True)
    read.to_topic(where, key=lambda pair: pair[0] if pair[2] is None else pair[2]["user"].encode())


JOBS: dict[str, Callable[[Any, list[Any]], None]] = {
    "filter and re-key": rekeyed,
    "windowed count": counted,
    "static join": joined,
}


def main(job: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    application = Application(
        broker_address=job["brokers"],
        consumer_group=job["id"],
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=job["commit_s"],
        loglevel=None,
        state_dir=job["folder"],
        consumer_extra_config={"isolation.level": "read_committed"},
    )
    source = application.topic(
        job["source"],
        key_deserializer="bytes",
        value_deserializer="bytes",
        timestamp_extractor=event_time if job["work"] == "windowed count" else None,
    )
    targets = [
        application.topic(name, key_serializer="bytes", value_serializer=ValueOfPair()) for name in job["targets"]
    ]
    begun: list[bool] = []

    def begin(value: bytes) -> None:
        if not begun:
            begun.append(True)
            print("first", flush=True)

    values = application.dataframe(source).update(begin)
    if job["work"] == "several topics":
        sorted_out(values, targets)
    else:
        orders = values.apply(order_of).filter(lambda order: order is not None)
        JOBS[job["work"]](orders, targets)
    application.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
