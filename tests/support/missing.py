"""Skips that nobody overlooks: tests that this machine cannot run are listed in a banner at the end of the run."""

from __future__ import annotations

from typing import NoReturn

import pytest

MARK = "CANNOT RUN HERE: "


def skip_loudly(reason: str) -> NoReturn:
    """Skips the test and has the reason repeated in the last lines of the run."""
    pytest.skip(f"{MARK}{reason}")
