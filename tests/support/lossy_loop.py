"""A loop with state whose commits get lost, and that starts again on an empty disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import semel
from semel.client.producer import Producer
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import Seen, create_topic, read_topic

BASE_MS = 1_700_000_000_000


def run_with_faults(
    cluster: Cluster,
    function: Callable[..., Any],
    feed: Callable[[Producer, list[str]], None],
    sources: int = 1,
    stem: str = "",
) -> list[Seen]:
    """Feeds twice and runs the loop after each, through a network that loses commits. Returns the output."""
    stem = stem or cluster.unique("d8")
    topics = [create_topic(cluster.bootstrap, f"{stem}.{number}", partitions=2) for number in range(sources)]
    sink = create_topic(cluster.bootstrap, f"{stem}.out", partitions=2)
    with Proxy(cluster.bootstrap) as proxy:
        lost = [proxy.add(Rule(END_TXN, effect, nth=3)) for effect in (Effect.DROP_REQUEST, Effect.DROP_RESPONSE)]
        for _ in range(2):
            with Producer(bootstrap_servers=cluster.bootstrap) as producer:
                feed(producer, topics)
            semel.process(
                topics,
                sink,
                function,
                application_id=stem,
                state="memory",
                bootstrap_servers=proxy.bootstrap,
                max_records=25,
                stop_at_end=True,
            )
        for rule in lost:
            rule.assert_fired()
    return read_topic(cluster.bootstrap, sink)
