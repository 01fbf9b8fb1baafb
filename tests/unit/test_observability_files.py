"""The dashboard and the alert rules name only metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from semel.broker.metrics import METRICS
from semel.patterns.process import LoopMetrics
from semel.spark.base_sink import SinkMetrics

FOLDER = Path(__file__).parents[2] / "observability"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "alert-rules.yml").read_text(encoding="utf-8"))

HISTOGRAMS = {name for name, metric in METRICS.items() if metric.kind == "histogram"}
NAMES = (
    {name for name in METRICS if name not in HISTOGRAMS}
    | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    | {f"{table.prefix}{field}" for table in (SinkMetrics.TABLE, LoopMetrics.TABLE) for field in table.help}
)
LABELS = {
    *("api", "le", "state", "outcome", "reason", "topic", "partition", "group"),  # of the broker
    *(SinkMetrics.TABLE.labels + LoopMetrics.TABLE.labels),
    *("stage", "instance"),  # the last one is Prometheus' own
}
METRIC = re.compile(r"\b(?:semel|process|kafka)_\w+")


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from [inner] if name in ("expr", "query") and isinstance(inner, str) else expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


def check(texts: list[str]) -> set[str]:
    used = {name for text in texts for name in METRIC.findall(text)}
    assert used <= NAMES, f"there is no metric {sorted(used - NAMES)}"
    for text in texts:
        matched = {name for braces in re.findall(r"{(.*?)}", text) for name in re.findall(r"(\w+)\s*[=!]", braces)}
        grouped = {name.strip() for by in re.findall(r"by \((.*?)\)", text) for name in by.split(",")}
        assert matched | grouped <= LABELS, text
        assert text.count("(") == text.count(")"), text
        for name in METRIC.findall(text):  # counters are only of use as rates, gauges only as they are
            is_counter = name.endswith(("_total", "_bucket", "_count"))
            is_rated = re.search(rf"\b(rate|increase)\({name}\b", text) is not None
            assert is_counter == is_rated, f"{name} in {text}"
    return used


def test_every_panel_shows_metrics_that_exist() -> None:
    used = check([text for text in expressions(DASHBOARD) if text != "prometheus"])
    assert len(used) > 30
    legends = {label for text in re.findall(r"{{(\w+)}}", json.dumps(DASHBOARD)) for label in [text]}
    assert legends <= LABELS


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_rule_names_metrics_that_exist_and_says_what_to_do() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    check([rule["expr"] for rule in rules])
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= LABELS


def test_what_operators_are_paged_for_is_on_the_dashboard() -> None:
    alerted = {name for rule in expressions(RULES) for name in METRIC.findall(rule)}
    shown = {name for text in expressions(DASHBOARD) for name in METRIC.findall(text)}
    assert alerted - shown <= {"semel_sink_error_total"}


def test_the_page_about_metrics_has_every_metric() -> None:
    page = (FOLDER.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.kind} | {metric.text} |" in page
    for table in (SinkMetrics.TABLE, LoopMetrics.TABLE):
        for field, text in table.help.items():
            assert f"| `{table.prefix}{field}` | {text} |" in page
