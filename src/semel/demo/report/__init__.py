"""The page at the end of a demo: one HTML file, nothing from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from semel.demo.play import Story
from semel.demo.report.page import Facts, page
from semel.demo.stage import Stage
from semel.demo.workloads import Outcome


def write(path: Path, stage: Stage, outcomes: list[Outcome], story: Story, seed: int) -> Path:
    """Writes the page beside its place first, so that a reader never finds half of it."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(page(Facts(stage.workload, stage.engine, seed, outcomes, story)))
    aside.replace(path)
    return path
