from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.storage.helpers import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "data")
    yield made
    made.data_dir.crash()
