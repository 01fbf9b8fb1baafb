"""semel's broker as a real process, and "a cluster": semel's or Apache Kafka's, so that one test runs on both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from benchmarks.peers.apache_kafka import ApacheKafka
from semel.local.semel_broker import SemelBroker, semel_command

__all__ = ["Cluster", "SemelBroker", "semel_command"]

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running broker shared by many tests: take names from `unique`, and never kill it."""

    name: str  # "semel" or "apache_kafka"
    broker: SemelBroker | ApacheKafka

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    def unique(self, stem: str) -> str:
        """A name for a topic, group or transactional id that no other test of this session uses."""
        return f"{stem}-{next(_numbers)}"
