"""G3 with a database: the workloads of `semel prove` into tables, whose faults include the database's server, its
backends and connections that break at COMMIT; and the checker of tables, which must find what is planted."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from semel.local.apache_kafka import ApacheKafka
from semel.prove.checker.sinks import check_table
from tests.support.prove import held, prove

LOOPS = ("postgres", "postgres+topics", "inbox", "outbox")
SPARKS = ("spark-postgres", "spark-postgres+topics")
TWO_PHASE = "transaction.two.phase.commit.enable=true"
DATABASE_FAULTS = ("kill database", "restart database", "kill_backend database", "cut_before_commit database")


@pytest.mark.timeout(300)
def test_short_campaign_violates_nothing(tmp_path: Path, postgres_installation: Path) -> None:
    held(prove(tmp_path, "--workload", "postgres+topics", "--rounds", "1", "--seed", "5"), faults=3)


def workloads(*names: str) -> list[str]:
    return [word for name in names for word in ("--workload", name)]


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_long_campaign_violates_nothing_and_kills_the_database_too(tmp_path: Path, postgres_installation: Path) -> None:
    options = ("--rounds", "15", "--faults-per-round", "12", "--seed", "2024")
    proof = held(prove(tmp_path, *workloads(*LOOPS), *options, timeout_s=3_400), faults=500)
    for name in DATABASE_FAULTS:
        assert name in proof.told, f"the campaign had no {name}"


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_campaign_with_prepared_transactions_violates_nothing(tmp_path: Path, postgres_installation: Path) -> None:
    options = ("--rounds", "8", "--faults-per-round", "12", "--seed", "77", "--set", TWO_PHASE)
    held(prove(tmp_path, *workloads("postgres+topics"), *options, timeout_s=3_400), faults=60)


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("setting", [(), ("--set", TWO_PHASE)], ids=["with a copy", "two-phase"])
def test_campaign_on_spark_violates_nothing(
    tmp_path: Path, postgres_installation: Path, setting: tuple[str, ...]
) -> None:
    names = ("spark-postgres+topics",) if setting else SPARKS
    options = ("--rounds", "6", "--seed", "31", *setting)
    held(prove(tmp_path, *workloads(*names), *options, timeout_s=3_400), faults=15)


@pytest.mark.full
@pytest.mark.kafka
@pytest.mark.timeout(3_600)
def test_campaign_on_apache_kafka_violates_nothing(
    tmp_path: Path, postgres_installation: Path, apache_kafka: ApacheKafka
) -> None:
    """Faults of the network, of processes and of the database; the brokers are left alone."""
    options = ("--rounds", "4", "--seed", "9", "--brokers", apache_kafka.bootstrap, "--delete-topics")
    proof = held(prove(tmp_path, *workloads(*LOOPS), *options, timeout_s=3_400), faults=60)
    assert any(name in proof.told for name in DATABASE_FAULTS)


def test_the_checker_finds_what_is_planted_in_a_table(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE applied (value text)")
        connection.execute("INSERT INTO applied VALUES ('a'), ('b'), ('b'), ('stranger')")
    found = {each.record: each.kind.value for each in check_table(dsn, "applied", "value", {"a": 1, "b": 1, "c": 1})}
    assert found == {"b": "duplicated", "c": "lost", "stranger": "unexpected"}
