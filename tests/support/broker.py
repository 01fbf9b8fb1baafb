"""semel's broker as a real process, and "a cluster": semel's or Apache Kafka's, so that one test runs on both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.prove.injection import Injection, Patch, command

_numbers = count(1)
ROOT = Path(__file__).resolve().parents[2]
# For the parameter `cluster`, where a test takes long and another one shows the same on Apache Kafka.
KAFKA_IN_FULL = pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])


def faulty_semel(faults: str = "", *, control: Path | str = "", power_cut: bool = False, mutant: str = "") -> list[str]:
    """The command `semel` with faults (see `semel.prove.injection`), for `SemelBroker(..., semel=...)`."""
    patch = Patch(str(ROOT), "tests.mutants", mutant) if mutant else None
    return command(Injection(faults, str(control), power_cut, patch), "-m", "semel")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running broker shared by many tests: take names from `unique`, and never kill it."""

    name: str  # "semel" or "apache_kafka"
    broker: SemelBroker | ApacheKafka

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    def unique(self, stem: str) -> str:
        """A name for a topic, group or transactional id that no other test of this run uses, in whichever process."""
        return f"{stem}-{os.environ.get('PYTEST_XDIST_WORKER', '')}{next(_numbers)}"
