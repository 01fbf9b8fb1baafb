"""A cluster of several nodes under a campaign: its leaders and coordinators move, by elections and because nodes go.

One node is down at a time, and the next outage waits until every replica is in sync again: what three copies are for.
Leaders and coordinators also move while a node is down.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from semel.client.admin.risks import MIN_IN_SYNC
from semel.client.errors import KafkaError
from semel.client.timing import Deadline
from semel.local.apache_kafka import ApacheKafka, KafkaMissing
from semel.local.kafka_cluster import KafkaCluster, NoOtherReplicaError
from semel.local.processes import ProcessFailed
from semel.prove.proxy import Proxy
from semel.prove.schedule import Fault

RETRY_S = 0.2
RESTORED_S = 180.0
SETTINGS = {"group.min.session.timeout.ms": "500"}
AT_ANY_TIME = ("move_leader",)  # also while a node is down


class NodesError(Exception):
    """The cluster cannot be started, or does not come back."""


class Outage:
    """One fault on its way: it waits for its turn, happens, and ends when every replica is in sync again."""

    def __init__(self, inflict: Callable[[Outage], None]) -> None:
        self.fired = threading.Event()
        self._ending = threading.Event()
        self._inflict = inflict
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.is_ending:
            try:
                self._inflict(self)
                return
            except (KafkaError, NoOtherReplicaError):
                self.wait(RETRY_S)  # the cluster is busy with something else
            except (ProcessFailed, NodesError) as error:
                self.error = error
                return

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def wait(self, seconds: float) -> None:
        self._ending.wait(seconds)

    def end(self) -> None:
        """Takes back what has not happened, and waits for the end of what has."""
        self._ending.set()
        self._thread.join(2 * RESTORED_S)
        if self.error is not None:
            raise NodesError(f"a node of the cluster does not come back: {self.error}")


def _generation(version: str) -> Literal[0, 1, 2]:
    known: dict[str, Literal[0, 1, 2]] = {"0": 0, "1": 1, "2": 2}
    if version not in known:
        raise NodesError(f"transaction.version is {version!r}; expected 0, 1 or 2")
    return known[version]


class Nodes:
    def __init__(self, folder: Path, count: int, settings: tuple[str, ...] = ()) -> None:
        given = dict(setting.split("=", 1) for setting in settings)
        version = given.pop("transaction.version", "2")
        self.proxy: Proxy | None = None
        self._lock = threading.Lock()
        try:
            self.cluster = KafkaCluster(
                folder / "nodes", count, transaction_version=_generation(version), properties={**SETTINGS, **given}
            )
            self.cluster.start()
        except (KafkaMissing, ProcessFailed) as error:
            raise NodesError(str(error)) from error

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap

    def close(self) -> None:
        self.cluster.close()

    def begin(self, fault: Fault, topic: str, owner: str) -> Outage:
        """`owner`: the group or transactional id whose partition of an internal topic is meant."""

        turn = contextlib.nullcontext() if fault.what in AT_ANY_TIME else self._lock

        def inflict(outage: Outage) -> None:
            with turn:
                if not outage.is_ending:
                    place = topic, self.cluster.partition_of(topic, owner, fault.seed)
                    _ACTS[fault.what](self, outage, fault, place)

        return Outage(inflict)

    # --- what happens, one at a time ---
    def _move(self, outage: Outage, _: Fault, place: tuple[str, int]) -> None:
        self.cluster.move_leader(*place)
        outage.fired.set()

    def _kill(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        node = self.cluster.leader_of(*place)
        node.kill()
        outage.fired.set()
        outage.wait(fault.for_ms / 1000)
        self._start(node)

    def _stop(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        node = self.cluster.leader_of(*place)
        node.pause()
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            node.resume()
        self.cluster.await_in_sync(RESTORED_S)

    def _restart(self, outage: Outage, _: Fault, place: tuple[str, int]) -> None:
        self._restart_node(outage, self.cluster.leader_of(*place))

    def _roll(self, outage: Outage, _: Fault, __: tuple[str, int]) -> None:
        for node in self.cluster.nodes.values():
            self._restart_node(outage, node)

    def _restart_node(self, outage: Outage, node: ApacheKafka) -> None:
        """In order: it hands its partitions over before it ends."""
        node.stop()
        outage.fired.set()
        self._start(node)

    def _start(self, node: ApacheKafka) -> None:
        node.start()
        self.cluster.await_in_sync(RESTORED_S)

    def _cut_off(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        """Clients do not reach it; the other nodes do, so it goes on leading."""
        assert self.proxy is not None
        self.proxy.refuse(self.cluster.leader_of(*place).bootstrap)
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            self.proxy.admit()

    def _require_too_many(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        """A write needs more replicas in sync than there are."""
        topic = place[0]
        self.cluster.configure(topic, {MIN_IN_SYNC: str(len(self.cluster.nodes) + 1)})
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            self._take_back(topic, {MIN_IN_SYNC: str(len(self.cluster.nodes) // 2 + 1)})

    def _take_back(self, topic: str, settings: dict[str, str]) -> None:
        """However busy the cluster is: with the setting left as it was, nothing could be written any more."""
        deadline = Deadline(RESTORED_S)
        while True:
            try:
                return self.cluster.configure(topic, settings)
            except KafkaError as error:
                if deadline.expired:
                    raise NodesError(f"{settings} could not be set on topic {topic!r}: {error}") from error
                time.sleep(RETRY_S)


_ACTS: dict[str, Callable[[Nodes, Outage, Fault, tuple[str, int]], None]] = {
    "move_leader": Nodes._move,
    "kill": Nodes._kill,
    "stop": Nodes._stop,
    "restart": Nodes._restart,
    "rolling_restart": Nodes._roll,
    "cut_off": Nodes._cut_off,
    "too_few_replicas": Nodes._require_too_many,
}
