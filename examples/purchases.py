"""Purchases joined with the profiles of their buyers: a stream with a table, both topics.

python examples/purchases.py                         # on a broker of its own
python examples/purchases.py localhost:9092          # on yours
semel consume shop.enriched --exit                   # each purchase once, with its buyer's city
"""

from __future__ import annotations

import json
import sys
from typing import Any

import semel

PROFILES = {"alice": "Lisbon", "bob": "Turku", "carol": "Graz"}
PURCHASES = 60


def enrich(purchase: Any, profile: bytes | None) -> str:
    """`profile` is the last one of this key when the purchase is processed; None if there is none."""
    city = None if profile is None else json.loads(profile)["city"]
    return json.dumps({**json.loads(purchase.value), "city": city})


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("shop.profiles", "shop.purchases", "shop.enriched"):
            admin.create_topic(topic, 2, if_not_exists=True)  # sources are partitioned alike
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for name, city in PROFILES.items():
            producer.send("shop.profiles", json.dumps({"city": city}), name)
    options = {"application_id": "enricher", "state": "profiles", "bootstrap_servers": brokers, "stop_at_end": True}
    join = semel.join_table(table="shop.profiles", join=enrich)
    semel.process(["shop.purchases", "shop.profiles"], "shop.enriched", join, **options)  # the profiles first
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(PURCHASES):
            buyer = ("alice", "bob", "carol", "nobody")[number % 4]
            producer.send("shop.purchases", json.dumps({"id": number, "cents": 100 + number}), buyer)
    semel.process(["shop.purchases", "shop.profiles"], "shop.enriched", join, **options)
    enriched = semel.read_table("shop.enriched", bootstrap_servers=brokers)["value"].to_pylist()
    cities = [json.loads(value)["city"] for value in enriched]
    print(f"{len(cities)} purchases, {cities.count('Turku')} from Turku, {cities.count(None)} from nobody knows where")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
