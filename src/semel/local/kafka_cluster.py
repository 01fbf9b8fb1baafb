"""Several nodes of Apache Kafka on this machine, each a broker and a controller: leaders and coordinators can move.

with KafkaCluster(folder) as cluster:
    cluster.move_leader("orders", 0)              # by an election
    cluster.leader_of("orders", 0).kill()         # the hard way
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from semel.client.admin.admin import Admin
from semel.client.admin.calls import PartitionInfo
from semel.client.cluster_calls import NodeTarget
from semel.client.errors import error_of
from semel.client.immediate import run
from semel.client.timing import Deadline
from semel.local.apache_kafka import ApacheKafka, Quorum, new_cluster_id, quick_jvm
from semel.local.processes import ProcessFailed, free_ports
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import topics as messages
from semel.protocol.partitioning import coordinator_partition

PREFERRED = 0  # the kind of election that follows the order of replicas
HEAP_MB = 400
LOOK_EVERY_S = 0.2


class NoOtherReplicaError(Exception):
    """There is no replica in sync that could lead."""


class KafkaCluster:
    """Nodes 1 to `nodes`. Ports and data stay over restarts of a node. Use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        transaction_version: Literal[0, 1, 2] = 2,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        numbers = range(1, nodes + 1)
        quorum = Quorum(new_cluster_id(), dict(zip(numbers, free_ports(nodes), strict=True)))
        self.nodes = {
            number: ApacheKafka(
                directory / f"node-{number}",
                node_id=number,
                quorum=quorum,
                transaction_version=transaction_version,
                heap_mb=HEAP_MB,
                jvm=quick_jvm(),
                properties=properties,
            )
            for number in numbers
        }

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes.values())

    def start(self) -> Self:
        """Returns when every node takes requests."""
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.await_ready()
        return self

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- leaders ---
    def leader_of(self, topic: str, partition: int) -> ApacheKafka:
        """The node that leads a partition; those of the internal topics are led by the coordinators."""
        return self.nodes[self.partitions(topic)[partition].leader]

    def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            (info,) = admin.describe_topics([topic])
            return {part.partition: part for part in info.partitions}

    def partition_of(self, topic: str, owner: str, number: int = 0) -> int:
        """The partition of an internal topic that a group or transactional id belongs to; of another topic, any."""
        count = len(self.partitions(topic))
        return coordinator_partition(owner, count) if owner else number % count

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            admin.alter_configs(settings, topic=topic)

    def await_in_sync(self, timeout_s: float) -> None:
        """Waits until every replica of every partition is in sync."""
        deadline = Deadline(timeout_s)
        while behind := self._behind():
            if deadline.expired:
                raise ProcessFailed(f"replicas of {', '.join(behind[:5])} are not in sync after {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def _behind(self) -> list[str]:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            return [
                f"{topic.name}-{part.partition}"
                for topic in admin.describe_topics()
                for part in topic.partitions
                if len(part.in_sync) < len(part.replicas)
            ]

    def move_leader(self, topic: str, partition: int) -> int:
        """Has another replica that is in sync elected; the number of the new leader."""
        before = self.partitions(topic)[partition]
        others = [replica for replica in before.replicas if replica != before.leader]
        chosen = next((replica for replica in others if replica in before.in_sync), None)
        if chosen is None:
            raise NoOtherReplicaError(f"{topic}-{partition} has no other replica in sync: {before}")
        self.prefer(topic, partition, chosen)
        self.elect(topic, partition, chosen)
        return chosen

    def prefer(self, topic: str, partition: int, chosen: int) -> None:
        """Puts this replica first, so that it is the one to be elected."""
        others = [each for each in self.partitions(topic)[partition].replicas if each != chosen]
        moved = messages.ReassignableTopic(topic, [messages.ReassignablePartition(partition, [chosen, *others])])
        request = messages.AlterPartitionReassignmentsRequest(topics=[moved])
        response = self._call(chosen, messages.ALTER_PARTITION_REASSIGNMENTS, request)
        for result in response.responses[0].partitions if response.responses else ():
            _check(result.error_code, f"reassigning {topic}-{partition}: {result.error_message}")

    def elect(self, topic: str, partition: int, preferred: int) -> None:
        """Has the preferred replica lead, if it is in sync."""
        request = messages.ElectLeadersRequest(PREFERRED, [messages.PartitionsOfTopic(topic, [partition])])
        response = self._call(preferred, messages.ELECT_LEADERS, request)
        for result in response.replica_election_results[0].partition_result:
            if result.error_code != ErrorCode.ELECTION_NOT_NEEDED:
                _check(result.error_code, f"electing a leader of {topic}-{partition}: {result.error_message}")

    def _call(self, node: int, api: Api[Any, Any], request: Any) -> Any:
        """Of a node that can be reached: it passes on what is for the controller."""
        with Admin(bootstrap_servers=self.nodes[node].bootstrap) as admin:
            return run(admin.calls.cluster.call(NodeTarget(node), api, request, timeout_s=60.0))


def _check(code: int, what: str) -> None:
    if code:
        raise error_of(code, what)
