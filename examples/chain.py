"""A chain of services, each exactly once, so exactly once from end to end: parse, price, bill.

python examples/chain.py                        # on a broker of its own
python examples/chain.py localhost:9092         # on yours; in production each service is a program of its own
semel consume calls.bills --exit                # one for each call that could be parsed
"""

from __future__ import annotations

import json
import sys
from typing import Any

import semel

CALLS, CENTS_PER_MINUTE = 120, 9


def parse(call: Any) -> str:
    caller, minutes = call.value.decode().split(",")
    return json.dumps({"caller": caller, "minutes": int(minutes)})


def price(call: Any) -> str:
    parsed = json.loads(call.value)
    return json.dumps({**parsed, "cents": parsed["minutes"] * CENTS_PER_MINUTE})


def bill(call: Any) -> semel.Output:
    priced = json.loads(call.value)
    return semel.Output(f"{priced['caller']} owes {priced['cents']}", priced["caller"])


SERVICES = {
    "parser": ("calls.raw", "calls.parsed", parse),
    "pricer": ("calls.parsed", "calls.priced", price),
    "biller": ("calls.priced", "calls.bills", bill),
}


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("calls.raw", "calls.parsed", "calls.priced", "calls.bills", "calls.bad"):
            admin.create_topic(topic, 2, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(CALLS):
            producer.send("calls.raw", f"caller {number % 9},{number % 5}" if number % 40 else "no call at all")
    for name, (source, sink, function) in SERVICES.items():
        options = {"application_id": name, "bootstrap_servers": brokers, "stop_at_end": True}
        stats = semel.process(source, sink, function, dead_letter_topic="calls.bad", **options)
        print(f"{name}: {stats.records_in} in, {stats.records_out} out, {stats.dead_letters} set aside")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
