"""D7: keyed state, its changelog, output and offsets of the processing loop commit in one transaction.

Faults: kill -9 of an instance between any two steps of a commit, before and after its local store is written; SIGSTOP
of one that comes back as a zombie. The workload `state` of `semel prove` and the simulator have all others.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from semel.prove.injection import Injection, command
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually

KEYS, COUNT = 5, 400


class Counter:
    """Instances of an application that counts the records of each key, as programs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.bootstrap = cluster.bootstrap
        self._folder = folder
        stem = cluster.unique("state")
        self._source = create_topic(self.bootstrap, f"{stem}.in", partitions=2)
        self._sink = create_topic(self.bootstrap, f"{stem}.out", partitions=2)
        self._application = f"{stem}-app"
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for number in range(COUNT):
                producer.send(self._source, b"%d" % number, key=b"k%d" % (number % KEYS))

    def start(self, instance: str, fault: str = "", **more: Any) -> Process:
        options = {
            "source": self._source,
            "sink": self._sink,
            "application_id": self._application,
            "bootstrap_servers": self.bootstrap,
            "instance": instance,
            "delay_ms": 0,
            "max_records": 20,
            "directory": str(self._folder / instance),
            "consumer": {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300},
            **more,
        }
        words = ("-m", "semel.prove.workers", "counting-loop", json.dumps(options))
        return Process(command(Injection(fault), *words))

    def counted(self) -> int:
        return len(read_topic(self.bootstrap, self._sink))

    def check(self) -> None:
        """Each count of each key is there once, in order, and the changelog has the last ones."""
        found: dict[bytes | None, list[int]] = {}
        for row in read_topic(self.bootstrap, self._sink):
            found.setdefault(row.key, []).append(int(row.value or 0))
        assert found == {b"k%d" % key: list(range(1, COUNT // KEYS + 1)) for key in range(KEYS)}
        changelog = read_topic(self.bootstrap, f"{self._application}.counts.changelog")
        last = {row.key: int.from_bytes(row.value or b"", "big") for row in changelog if (row.key or b"")[:1] == b"k"}
        assert last == {b"k%d" % key: COUNT // KEYS for key in range(KEYS)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_state_is_what_was_committed_after_kill_9_between_any_two_steps(cluster: Cluster, tmp_path: Path) -> None:
    counter = Counter(cluster, tmp_path)
    for point in ("state.sent:kill:3", "state.committed:kill:3", "state.write:kill:1"):
        with counter.start("a", point, stop_at_end=point.startswith("state.write")) as instance:
            instance.wait_for_line(f"^fault fired: {point.partition(':')[0]}$", PATIENCE_S)
            instance.wait(PATIENCE_S)
        assert counter.counted() < COUNT or "write" in point
    with counter.start("a", stop_at_end=True) as last:
        assert last.wait(PATIENCE_S) == 0
    counter.check()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_a_zombie_adds_nothing_to_the_state(cluster: Cluster, tmp_path: Path) -> None:
    counter = Counter(cluster, tmp_path)
    with counter.start("zombie", "state.sent:stop:3", consumer={"session_timeout_ms": 6000}) as zombie:
        zombie.wait_for_line("^fault fired: state.sent$", PATIENCE_S)
        with counter.start("second") as second:
            eventually(counter.counted, lambda count: count == COUNT, timeout_s=PATIENCE_S)
            os.kill(zombie.pid, signal.SIGCONT)
            zombie.wait_for_line("(?i)going back|lost|fenced|refused|not be finished", PATIENCE_S)
            assert second.terminate() == 0
        zombie.terminate()
    with counter.start("last", stop_at_end=True) as last:
        assert last.wait(PATIENCE_S) == 0
    counter.check()


def test_a_local_copy_that_is_lost_is_restored(semel_broker: SemelBroker, tmp_path: Path) -> None:
    """The same after the disk of the instance and the process of the broker are gone."""
    counter = Counter(Cluster("semel", semel_broker), tmp_path / "state")
    with counter.start("a", "state.committed:kill:4") as instance:
        instance.wait_for_line("^fault fired: state.committed$", PATIENCE_S)
    semel_broker.kill()
    semel_broker.start()
    with counter.start("another", stop_at_end=True) as last:
        assert last.wait(PATIENCE_S) == 0
    counter.check()
