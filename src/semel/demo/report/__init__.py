"""The page at the end of a demo: one HTML file, nothing from elsewhere; and a picture of it."""

from __future__ import annotations

import os
from pathlib import Path

from semel.demo.report.page import Facts, page, picture

__all__ = ["Facts", "page", "picture", "write"]


def write(path: Path, facts: Facts) -> Path:
    """Writes the page beside its place first, so that a reader never finds half of it."""
    path = path.absolute()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(page(facts))
    aside.replace(path)
    return path
