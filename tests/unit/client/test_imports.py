"""The client is loaded in every Spark worker: it must not bring along what it does not need."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CORES = [
    *(
        f"producer.{name}"
        for name in (
            "accumulator",
            "batches",
            "core",
            "identities",
            "transaction",
            "transaction_states",
        )
    ),
    *(
        f"group.{name}"
        for name in (
            "assignors",
            "consumer_protocol_core",
            "consumer_protocol_states",
            "core",
            "membership",
            "offset_requests",
            "states",
        )
    ),
    *(
        f"consumer.{name}"
        for name in (
            "assigned_partitions",
            "commits",
            "core",
            "fetcher",
            "fetching",
            "reader",
        )
    ),
    "metadata",
    "pauses",
    "wire",
]
NOT_IN_A_CORE = {"asyncio", "os", "random", "select", "socket", "ssl", "threading", "time"}
DRIVERS = {
    "cluster",
    "connection",
    "consumer.engine",
    "group.member",
    "group.offsets",
    "network",
    "producer.coordinator",
    "producer.deliveries",
    "producer.sender",
    "timing",
    "waiting",
}


def loaded_by(statement: str) -> set[str]:
    script = (
        f"import json, sys, threading\n{statement}\nprint(json.dumps([sorted(sys.modules), threading.active_count()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    modules, threads = json.loads(done.stdout)
    assert threads == 1, "importing starts no thread"
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize(
    "statement",
    [
        "import semel.client",
        "from semel.client import Producer; Producer(bootstrap_servers='localhost:1').close()",
        "from semel.client import TransactionHandle, TransactionOwner",
    ],
)
def test_numpy_and_pyarrow_are_loaded_only_when_tables_are_written(statement: str) -> None:
    assert not {"numpy", "pyarrow", "asyncio", "confluent_kafka"} & loaded_by(statement)


def test_the_broker_brings_no_metadata_of_what_is_installed() -> None:
    """The package crc32c reads its own version, which takes a parser of mail."""
    assert "email" not in loaded_by("import semel.broker.broker")


def test_every_public_name_can_be_loaded() -> None:
    import semel.client

    for name in semel.client.__all__:
        assert getattr(semel.client, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = semel.client.no_such_name


@pytest.mark.parametrize("name", CORES)
def test_a_core_has_no_thread_socket_clock_or_driver(name: str) -> None:
    spec = find_spec(f"semel.client.{name}")
    assert spec is not None
    assert spec.origin is not None
    imported = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert imported
    assert not {module.split(".")[0] for module in imported} & NOT_IN_A_CORE
    assert not imported & {f"semel.client.{driver}" for driver in DRIVERS}
