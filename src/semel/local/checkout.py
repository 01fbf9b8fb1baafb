"""The checkout that this semel is imported from. Benchmarks and deliberate bugs are there, not in the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def module(name: str) -> ModuleType | None:
    """A module of the checkout, such as `benchmarks.harness`; None where semel is installed without one."""
    if not (ROOT / f"{name.replace('.', '/')}.py").is_file():
        return None
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return import_module(name)
