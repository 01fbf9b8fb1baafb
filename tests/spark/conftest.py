"""A Spark session for tests that need one in their own process: started once per process, with short jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import semel

    made = semel.spark_session(
        "tests",
        master="local[2]",
        spark__ui__enabled="false",
        spark__sql__shuffle__partitions="2",
        spark__local__dir=str(tmp_path_factory.mktemp("spark-local")),
        spark__sql__warehouse__dir=str(tmp_path_factory.mktemp("spark-warehouse")),
    )
    made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()
