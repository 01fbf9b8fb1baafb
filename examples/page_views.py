"""Page views per user: counts in state, which commits with the output and the offsets.

python examples/page_views.py                            # on a broker of its own
python examples/page_views.py localhost:9092             # on yours; each run adds its views
semel consume views.per_user --exit                      # every count of every user, once
"""

from __future__ import annotations

import random
import sys
from typing import Any

import semel

VIEWS = 500


def count(view: Any, state: Any) -> bytes:
    total = state.get(view.key, 0) + 1
    state.put(view.key, total)
    return b"%d" % total


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("views", "views.per_user"):
            admin.create_topic(topic, 2, if_not_exists=True)
    luck = random.Random(7)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for _ in range(VIEWS):
            producer.send("views", b"/index.html", luck.choice(("alice", "bob", "carol")))
    totals = semel.KeyedState("totals", format="int64")
    semel.process(
        "views",
        "views.per_user",
        count,
        application_id="page-views",
        state=totals,
        bootstrap_servers=brokers,
        stop_at_end=True,
    )
    counted = semel.read_table("views.per_user", bootstrap_servers=brokers)
    last = dict(zip(counted["key"].to_pylist(), map(int, counted["value"].to_pylist()), strict=True))
    print(", ".join(f"{user.decode()} {views}" for user, views in sorted(last.items())), "of", sum(last.values()))


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
