"""Two addresses in front of the one simulated broker, so that leaders and the coordinator can move, and an address can
fail for good. A request to the wrong one gets NOT_LEADER_OR_FOLLOWER or NOT_COORDINATOR."""

from __future__ import annotations

from collections.abc import Callable

from semel.protocol.messages.cluster import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tests.simulation.world import PARTITIONS, TOPIC, SimulatedConnection, World

NODES = (0, 1)


class ClusterFront:
    def __init__(self, world: World) -> None:
        self._world = world
        self.leaders = [partition % 2 for partition in range(PARTITIONS)]
        self.coordinator = 0
        self._down: int | None = None
        self._connections: dict[int, list[SimulatedConnection]] = {node: [] for node in NODES}

    def connect(
        self, node: int, on_bytes: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> SimulatedConnection | None:
        if node == self._down:
            return None
        connection = self._world.broker.connect(on_bytes, on_lost)
        if connection is not None:
            self._connections[node].append(connection)
        return connection

    def metadata(self) -> MetadataResponse | None:
        """None: nobody responds."""
        if not self._world.broker.is_up or self._world.broker.is_frozen:
            return None
        parts = [
            MetadataResponsePartition(partition_index=index, leader_id=leader)
            for index, leader in enumerate(self.leaders)
        ]
        brokers = [MetadataResponseBroker(node, "broker", 9092 + node) for node in NODES]
        topic = MetadataResponseTopic(name=TOPIC, topic_id=self._world.broker.topic_id, partitions=parts)
        return MetadataResponse(brokers=brokers, topics=[topic])

    def find_coordinator(self) -> int | None:
        """None: nobody responds."""
        return self.coordinator if self._world.broker.is_up and not self._world.broker.is_frozen else None

    # --- faults ---

    def move_a_leader(self) -> None:
        partition = self._world.rng.randrange(PARTITIONS)
        if self._down is None:
            self.leaders[partition] = 1 - self.leaders[partition]
            self._world.fault(f"partition {partition} moves to node {self.leaders[partition]}")

    def move_the_coordinator(self) -> None:
        if self._down is None:
            self.coordinator = 1 - self.coordinator
            self._world.fault(f"the coordinator moves to node {self.coordinator}")

    def take_down(self, node: int) -> None:
        """Its connections break, no new one is accepted, and the other one has all that it had."""
        self.bring_up()
        self._down = node
        self._world.fault(f"node {node} is down")
        self.leaders = [1 - node] * PARTITIONS
        self.coordinator = 1 - node
        connections, self._connections[node] = self._connections[node], []
        for connection in connections:
            connection.cut()

    def bring_up(self) -> None:
        self._down = None
