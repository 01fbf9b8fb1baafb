"""F5: events are appended only if an entity has the expected version; the loser gets a conflict.

Faults: kill -9 of the owner before and after its commit, under writers that go on; replies that nobody read, and the
same command again; commands that are none; partitions that were added.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ForeignProducer

from semel import AppendRefusedError, AppendUncertainError, ConflictError, Entities, StateError
from semel.client.admin import Admin
from semel.local.processes import Process
from semel.prove.injection import Injection, command
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import Seen, read_topic
from tests.support.waiting import PATIENCE_S, until

THREADS, EACH, ENTITIES = 6, 8, 3
semel_only = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
both = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)


@pytest.fixture
def entities(cluster: Cluster) -> Iterator[Entities]:
    with Entities(cluster.unique("accounts"), bootstrap_servers=cluster.bootstrap, source="test") as made:
        made.create(partitions=2)
        yield made


@contextmanager
def owning(entities: Entities, **options: Any) -> Iterator[None]:
    owner = entities.owner(**options)
    thread = threading.Thread(target=owner.run)
    thread.start()
    try:
        yield
    finally:
        owner.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def versions(bootstrap: str, name: str) -> dict[bytes | None, list[Seen]]:
    """The events of each entity, through a client that is not ours; versions count up from 1."""
    found: dict[bytes | None, list[Seen]] = {}
    for row in read_topic(bootstrap, name):
        found.setdefault(row.key, []).append(row)
    for key, rows in found.items():
        assert [int(dict(row.headers)["version"] or 0) for row in rows] == list(range(1, len(rows) + 1)), key
    return found


def start_owner(bootstrap: str, name: str, folder: Path, fault: str = "") -> Process:
    options = {
        "name": name,
        "partitions": 2,
        "bootstrap_servers": bootstrap,
        "instance": "a",
        "directory": str(folder),
        "consumer": {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300},
    }
    return Process(command(Injection(fault), "-m", "semel.prove.workers", "entity-owner", json.dumps(options)))


class Callers:
    """Threads that append numbers, each once, whatever their calls lead to."""

    def __init__(self, entities: Entities) -> None:
        self._entities = entities
        self.conflicts, self.uncertain = 0, 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=[number]) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, first: int) -> None:
        try:
            for number in range(first * EACH, (first + 1) * EACH):
                self._once(number)
        except BaseException as error:
            self.errors.append(error)

    def _once(self, number: int) -> None:
        version, tries = 0, 0
        while True:
            try:
                self._entities.append(
                    f"e{number % ENTITIES}",
                    version,
                    [b"%d" % number],
                    command_id=f"{number}.{tries}",
                    timeout_ms=3_000,
                )
                return
            except ConflictError as error:
                self.conflicts += 1
                version, tries = error.version, tries + 1
            except AppendUncertainError:  # the same command again
                self.uncertain += 1

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.errors == []


@both
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(["state.committed:kill:2"], id="after-its-commit"),
        pytest.param(["state.sent:kill:3", "state.committed:kill:3"], id="both", marks=pytest.mark.full),
    ],
)
def test_each_event_is_there_once_although_the_owner_is_killed(
    cluster: Cluster, entities: Entities, tmp_path: Path, faults: list[str]
) -> None:
    callers: Callers | None = None
    for fault in (*faults, ""):
        with start_owner(cluster.bootstrap, entities.name, tmp_path, fault) as owner:
            callers = callers or Callers(entities)
            if fault:
                owner.wait_for_line(f"^fault fired: {fault.partition(':')[0]}$", PATIENCE_S)
                owner.wait(PATIENCE_S)
            else:
                callers.join()
    assert callers is not None
    assert callers.conflicts > 0
    found = versions(cluster.bootstrap, entities.name)
    written = [row.value for rows in found.values() for row in rows]
    assert sorted(int(value or b"") for value in written) == list(range(THREADS * EACH))


@both
def test_exactly_one_of_many_that_expect_the_same_version_wins(cluster: Cluster, entities: Entities) -> None:
    with owning(entities):
        entities.append("e", 0, ["opened"])
        pending = [entities.submit("e", 1, [f"w{number}"]) for number in range(10)]
        outcomes = [outcome(each.result) for each in pending]
        with pytest.raises(ConflictError, match="'e' has version 2, expected 7") as conflict:
            entities.append("e", 7, [b"x"])
    assert sorted(outcomes) == [2] + [-2] * 9 or sorted(outcomes) == [-2] * 9 + [2]
    assert (conflict.value.entity, conflict.value.version) == ("e", 2)
    (rows,) = versions(cluster.bootstrap, entities.name).values()
    assert [row.value for row in rows] == [b"opened", b"w0"]
    assert dict(rows[1].headers)["source"] == b"test"


def outcome(result: Callable[[], Any]) -> int:
    """The version; below 0: that of a conflict."""
    try:
        return int(result().version)
    except ConflictError as error:
        return -error.version


@semel_only
def test_a_lost_reply_is_settled_by_the_command_id(entities: Entities, cluster: Cluster) -> None:
    with pytest.raises(AppendUncertainError, match="Is an owner running") as uncertain:
        entities.append("e", 0, [b"once"], timeout_ms=50)
    command_id = uncertain.value.command_id
    with owning(entities):
        until(lambda: read_topic(cluster.bootstrap, entities.name))
        with Entities(entities.name, bootstrap_servers=cluster.bootstrap) as another:
            for _ in range(2):
                done = another.append("e", 0, [b"once"], command_id=command_id)
                assert (done.version, done.token) == (1, "1@e")
            with pytest.raises(ConflictError):
                another.append("e", 0, [b"once"], command_id="another")
    (rows,) = versions(cluster.bootstrap, entities.name).values()
    assert [row.value for row in rows] == [b"once"]


@semel_only
def test_what_is_no_command_is_a_dead_letter(entities: Entities, cluster: Cluster) -> None:
    foreign = ForeignProducer({"bootstrap.servers": cluster.bootstrap})
    for value in (b"{", b"", b'{"id": "c"}', None):
        foreign.produce(f"{entities.name}.commands", value, key=b"e")
    assert foreign.flush(PATIENCE_S) == 0
    with owning(entities, fold=lambda _, event: event.decode()[10]):
        assert entities.append("e", 0, [b"0123456789a"]).version == 1
        with pytest.raises(AppendRefusedError, match="version 1, nothing was appended: IndexError"):
            entities.append("e", 1, [b"short"])
        letters = until(lambda: read_topic(cluster.bootstrap, f"{entities.name}.dead"))
    assert [letter.value for letter in letters] == [b"{", b"", b'{"id": "c"}', None]
    assert list(map(len, versions(cluster.bootstrap, entities.name).values())) == [1]


@semel_only
def test_partitions_that_were_added_are_refused_with_the_way_out(entities: Entities, cluster: Cluster) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        admin.create_partitions(f"{entities.name}.commands", 3)
    calls: list[Callable[[], Any]] = [entities.owner, entities.view, lambda: entities.append("e", 0, [b""])]
    for call in calls:
        with pytest.raises(StateError, match=r"same number of partitions.*under another name"):
            call()
    missing = Entities("no-such-entities", bootstrap_servers=cluster.bootstrap)
    with pytest.raises(StateError, match=r"no topic 'no-such-entities'.*create\(\)"):
        missing.append("e", 0, [b""])
