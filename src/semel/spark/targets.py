"""Where rows may go: every partition of every output topic gets one number, so that a row's way is one integer."""

from __future__ import annotations

from typing import NamedTuple

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError

TOPIC_PATIENCE_S = 5.0


class TargetError(ValueError):
    """A topic that rows are sent to and the cluster does not have."""


class Topic(NamedTuple):
    name: str
    first: int  # number of its partition 0
    partitions: int


class Targets:
    """Topics and partitions as numbers, in a fixed order. Small and picklable: it goes to every task."""

    def __init__(self, partitions_by_topic: dict[str, int]) -> None:
        self.topics: list[Topic] = []
        first = 0
        for name, count in partitions_by_topic.items():
            self.topics.append(Topic(name, first, count))
            first += count
        self.count = first
        self._by_name = {topic.name: index for index, topic in enumerate(self.topics)}

    def index(self, name: str | None) -> int:
        """Which of `topics`; -1 if it is none of them."""
        return self._by_name.get(name, -1) if name is not None else -1

    def place(self, number: int) -> tuple[str, int]:
        """(topic, partition) of a number."""
        topic = next(t for t in reversed(self.topics) if t.first <= number)
        return topic.name, number - topic.first

    def places(self) -> list[tuple[str, int]]:
        return [(topic.name, p) for topic in self.topics for p in range(topic.partitions)]

    @classmethod
    def of(cls, cluster: Cluster, topics: list[str]) -> Targets:
        """How many partitions each topic has, by metadata that is requested again when it is older than
        metadata.max.age.ms. A topic that was created just now is waited for."""
        found = {}
        for name in dict.fromkeys(topics):
            try:
                found[name] = len(cluster.partitions(name, TOPIC_PATIENCE_S))
            except KafkaError as error:
                raise TargetError(
                    f"output topic {name!r} cannot be written: {error}. Create it first (`semel topic create "
                    f"{name}`), or correct the option that names it (topic, topics, dead_letter_topic)"
                ) from error
        return cls(found)
