"""G2: windows of ad views under the same faults: every view is in one window, every window is written once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from semel.demo.program import FAULTS
from semel.local.brokers import Broker
from semel.prove.checker.reading import read
from tests.support.demo import run_demo

ALL = [fault.name for fault in FAULTS]


def _checked(result: dict[str, Any]) -> None:
    assert len(result["held"]) == 3 * len(result["faults"])  # every fault hit all three pipelines
    exact, least, most = (result["guarantees"][name] for name in ("exactly_once", "at_least_once", "at_most_once"))
    assert (exact["lost"], exact["duplicated"], exact["wrong_campaigns"]) == (0, 0, 0)
    assert exact["total_after"] == exact["total_before"] > 300
    assert least["duplicated"] > 0
    assert least["lost"] == 0
    assert most["lost"] > 0
    assert most["duplicated"] == 0


@pytest.mark.timeout(400)
def test_views_are_counted_once_under_kills_without_spark(tmp_path: Path) -> None:
    _checked(run_demo(tmp_path, "ads", "--engine", "process"))


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("faults", [["broker", "committed"], ALL], ids=["broker-driver", "all"])
def test_every_window_is_written_once_under_kills(tmp_path: Path, faults: list[str]) -> None:
    result = run_demo(tmp_path, "ads", "--engine", "spark", "--faults", ",".join(faults))
    assert len(result["faults"]) == len(faults)
    _checked(result)
    with Broker(Path(result["kept"]) / "broker") as broker:
        windows = Counter(
            (count["start"], count["campaign"])
            for count in (json.loads(r.value or b"") for r in read(broker.bootstrap, ["demo-ads.exactly_once.out"]))
        )
    assert set(windows.values()) == {1}
    assert len(windows) > 20
