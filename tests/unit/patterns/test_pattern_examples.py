"""The examples of docs/entities.md and docs/sagas.md run as they stand, and fit on a screen."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from semel.local.brokers import SemelBroker

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("entities.py", "100 were withdrawn, 0 are left"),
        ("saga.py", "4 orders done, 4 undone"),
    ],
)
def test_an_example_runs(
    shared_semel_broker: SemelBroker, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    path = EXAMPLES / name
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))["main"](shared_semel_broker.bootstrap)
    assert told in capsys.readouterr().out
