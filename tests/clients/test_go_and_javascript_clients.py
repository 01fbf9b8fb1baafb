"""Clients in Go and JavaScript that we did not write: franz-go, KafkaJS and @platformatic/kafka, at versions that
`go/go.sum` and `javascript/package-lock.json` fix.

Each is one program that writes idempotently, commits and aborts transactions over two topics, reads committed records,
moves offsets inside a transaction, and shares a group whose members come and go.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from semel.local.brokers import SemelBroker
from tests.support.broker import ROOT, Cluster
from tests.support.missing import skip_loudly
from tests.support.reading import committed_offset, create_topic, read_values

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
INSTALLED = ROOT / ".cache/clients"
NODE_SINCE = (20, 19)
PARTITIONS = 4


def run(words: list[str | Path], folder: Path, timeout_s: float = 240) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{words[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copied(name: str, *needed: str) -> Path:
    """The program's sources in a folder of .cache, where its dependencies go."""
    for program in needed:
        if shutil.which(program) is None:
            skip_loudly(f"there is no `{program}` on the PATH, so the clients in tests/clients/{name} cannot run")
    return Path(shutil.copytree(HERE / name, INSTALLED / name, dirs_exist_ok=True))


def franz_go() -> list[str | Path]:
    folder = copied("go", "go")
    run(["go", "build", "-o", "franz-go-client", "."], folder, timeout_s=500)
    return [folder / "franz-go-client"]


def javascript(program: str) -> list[str | Path]:
    folder = copied("javascript", "node", "npm")
    version = run(["node", "--version"], folder).strip()
    if tuple(map(int, version[1:].split(".")[:2])) < NODE_SINCE:
        skip_loudly(f"node is {version}; the clients in tests/clients/javascript need 20.19 or newer")
    if not (folder / "node_modules").exists():
        run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
    return ["node", folder / program]


CLIENTS: dict[str, Callable[[], list[str | Path]]] = {
    "franz-go": franz_go,
    "KafkaJS": lambda: javascript("kafkajs_client.js"),
    "platformatic": lambda: javascript("platformatic_client.js"),
}


class Played(NamedTuple):
    """What a client's program saw, and where it wrote."""

    cluster: Cluster
    topics: dict[str, str]
    prefix: str
    seen: dict[str, Any]

    def values(self, topic: str) -> list[str]:
        return [(value or b"").decode() for _, _, value in read_values(self.cluster.bootstrap, self.topics[topic])]


@pytest.fixture(scope="module", params=CLIENTS)
def played(request: pytest.FixtureRequest, shared_semel_broker: SemelBroker) -> Played:
    command = CLIENTS[request.param]()
    cluster = Cluster("semel", shared_semel_broker)
    prefix = cluster.unique("foreign")
    topics = {name: f"{prefix}-{name}" for name in ("idempotent", "one", "two", "transformed", "shared")}
    for name, topic in topics.items():
        create_topic(cluster.bootstrap, topic, PARTITIONS if name == "shared" else 1)
    job = {"brokers": cluster.bootstrap, "topics": topics, "prefix": prefix}
    return Played(cluster, topics, prefix, json.loads(run([*command, json.dumps(job)], INSTALLED)))


def values(*ranges: tuple[int, int]) -> list[str]:
    return [f"value-{number}" for first, end in ranges for number in range(first, end)]


def test_writes_idempotently(played: Played) -> None:
    assert played.values("idempotent") == values((0, 100))


def test_commits_and_aborts_over_two_topics(played: Played) -> None:
    assert played.values("one") == played.values("two") == values((0, 5), (10, 15))


def test_reads_committed_records_only(played: Played) -> None:
    assert played.seen["committed"] == values((0, 5), (10, 15))


def test_offsets_move_inside_a_transaction(played: Played) -> None:
    assert played.values("transformed") == [value.upper() for value in values((0, 100))]
    bootstrap, source = played.cluster.bootstrap, played.topics["idempotent"]
    assert committed_offset(bootstrap, f"{played.prefix}-transform", source) == 100


def test_members_share_a_group_and_take_over_from_each_other(played: Played) -> None:
    group = played.seen["group"]
    everything = list(range(PARTITIONS))
    assert sorted(group["alone"]) == everything
    assert sorted([*group["a"], *group["b"]]) == everything
    assert sorted(group["again"]) == everything
