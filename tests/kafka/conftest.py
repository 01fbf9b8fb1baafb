"""Every test in this folder needs Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(autouse=True)
def _needs_apache_kafka(kafka_installation: Path) -> None:
    """Skips, loudly, where there is no Apache Kafka."""
