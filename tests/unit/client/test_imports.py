"""The client is loaded in every Spark worker: it must not bring along what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


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


def test_every_public_name_can_be_loaded() -> None:
    import semel.client

    for name in semel.client.__all__:
        assert getattr(semel.client, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = semel.client.no_such_name
