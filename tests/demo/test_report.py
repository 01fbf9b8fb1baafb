"""The page of a demo is one file that needs nothing else, and shows every fault and every guarantee."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from semel.demo.program import FAULTS, GUARANTEES
from semel.demo.report import Facts, Scale, page, picture
from semel.demo.testbed import Moment, RunHistory
from semel.demo.workloads import WORKLOADS, Outcome, Part

START_S = 1_700_000_000.0
HISTORY = RunHistory(
    START_S,
    START_S + 60,
    [
        Moment(START_S + 1, "broker", "up", "broker is up"),
        Moment(START_S + 8, "driver", "up", "Spark is up"),
        Moment(START_S + 20, "driver", "killed", "kill -9: the driver, <in> the middle"),
        Moment(START_S + 27, "driver", "up", "Spark is up again"),
        Moment(START_S + 40, "broker", "killed", "kill -9: the broker"),
        Moment(START_S + 41, "broker", "up", "broker is up again"),
        Moment(START_S + 59, "driver", "down", "done"),
    ],
    [(fault.name, guarantee, fault.points[guarantee]) for fault in FAULTS for guarantee in GUARANTEES],
    [],
)


def outcome(guarantee: str, lost: int, duplicated: int) -> Outcome:
    series = [(int(START_S * 1000) + number * 500, 100) for number in range(100)]
    parts = [Part("acc-01", 5_000, 5_000 - lost), Part("acc-02", -200, -200)]
    return Outcome(
        guarantee, 100, 3, 100 - lost + duplicated, lost, duplicated, 4_800, 4_800 - lost, parts, series, series
    )


def facts(workload: str, broken: bool = False) -> Facts:
    outcomes = [outcome("at_most_once", 7, 0), outcome("at_least_once", 0, 9), outcome("exactly_once", int(broken), 0)]
    return Facts(WORKLOADS[workload], "spark", 1, outcomes, HISTORY)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(workload: str) -> None:
    text = page(facts(workload))
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", text)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 1 + 3 * len(GUARANTEES)
    for drawing in drawings:
        ElementTree.fromstring(drawing)  # well formed
        assert "nan" not in drawing
    assert text.count("kill -9: the broker") >= 1 + 2 * len(GUARANTEES)
    assert "&lt;in&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_the_headline_says_what_was_found() -> None:
    assert "nothing lost, nothing doubled" in page(facts("bank"))
    assert "Exactly once was violated: 1 lost" in page(facts("bank", broken=True))


def test_the_picture_is_an_image_of_its_own(tmp_path: Path) -> None:
    drawing = picture(facts("bank"))
    ElementTree.fromstring(drawing)
    assert 'xmlns="http://www.w3.org/2000/svg"' in drawing
    assert "prefers-color-scheme: dark" in drawing


def test_scales_have_round_ticks_inside_their_range() -> None:
    assert Scale(0, 97, 0, 1).ticks(5) == [0, 20, 40, 60, 80]
    assert Scale(-30, 30, 0, 1).ticks(3) == [-20, 0, 20]
    assert Scale(0, 1.05, 100, 0)(0) == 100
