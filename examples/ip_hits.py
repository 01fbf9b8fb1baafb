"""Fraud by IP hits: addresses with too many requests in a minute, by the time of the requests. Each alarm once.

python examples/ip_hits.py                        # on a broker of its own
python examples/ip_hits.py localhost:9092         # on yours
semel consume web.alarms --exit                   # address and number of hits
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import semel

MINUTE_MS, LIMIT = 60_000, 20
START_MS = 1_772_366_400_000  # 2026-03-01 12:00 UTC
hits = semel.windowed(size_ms=MINUTE_MS, add=lambda so_far, _: (so_far or 0) + 1, late="drop")


def alarm(request: Any, state: Any) -> Iterator[semel.Output]:
    """A window is written once, when a later request of its partition closes it; only suspicious ones are passed on."""
    for window in hits(request, state) or ():
        if int(window.value) > LIMIT:
            yield window


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("web.requests", "web.alarms"):
            admin.create_topic(topic, 1, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for minute in range(4):  # the last one stays open
            for address, requests in (("10.0.0.1", 5), ("10.0.0.2", 30 if minute == 1 else 3)):
                for number in range(requests):
                    at_ms = START_MS + minute * MINUTE_MS + number
                    producer.send("web.requests", b"GET /login", address, timestamp=at_ms)
    semel.process(
        "web.requests",
        "web.alarms",
        alarm,
        application_id="fraud",
        state="hits",
        bootstrap_servers=brokers,
        stop_at_end=True,
    )
    alarms = semel.read_table("web.alarms", bootstrap_servers=brokers).to_pylist()
    print("alarms:", ", ".join(f"{each['key'].decode()} with {int(each['value'])} hits" for each in alarms))


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
