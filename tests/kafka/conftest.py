"""Tests on Apache Kafka or with its tools, and the same tests on semel's broker, which run without Apache Kafka too."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from semel.local.apache_kafka import KafkaMissing
from tests.support.missing import skip_loudly

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = {"apache_kafka", "kafka_installation"} & set(getattr(item, "fixturenames", ()))
        if needed and HERE in item.path.parents:
            item.add_marker(pytest.mark.kafka)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skipping())


def _skipping() -> Generator[None, object, object]:
    """A test on semel's broker that wants one of Kafka's tools is skipped, loudly, where there are none."""
    try:
        return (yield)
    except KafkaMissing as missing:
        skip_loudly(str(missing))
