"""G3 with a database: `semel prove --workload outbox`, whose faults include the database's server, its backends and
connections that break at COMMIT; and the checker of tables, which must find what is planted."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from semel.prove.checker.tables import check_table
from tests.support.prove import Proof, prove

LONG_ROUNDS = 45
DATABASE_FAULTS = ("kill database", "restart database", "kill_backend database", "cut_before_commit database")


def held(proof: Proof, faults: int) -> Proof:
    assert proof.violations == [], proof.told
    assert proof.code == 0, proof.told
    assert proof.result["faults_fired"] >= faults, proof.told
    return proof


@pytest.mark.timeout(300)
def test_short_campaign_violates_nothing(tmp_path: Path, postgres_installation: Path) -> None:
    held(prove(tmp_path, "--workload", "outbox", "--rounds", "1", "--seed", "5"), faults=3)


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_long_campaign_violates_nothing_and_kills_the_database_too(tmp_path: Path, postgres_installation: Path) -> None:
    options = ("--workload", "outbox", "--rounds", str(LONG_ROUNDS), "--faults-per-round", "12", "--seed", "2024")
    proof = held(prove(tmp_path, *options, timeout_s=3_400), faults=500)
    for name in DATABASE_FAULTS:
        assert name in proof.told, f"the campaign had no {name}"


def test_the_checker_finds_what_is_planted_in_a_table(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE applied (value text)")
        connection.execute("INSERT INTO applied VALUES ('a'), ('b'), ('b'), ('stranger')")
    found = {each.record: each.kind.value for each in check_table(dsn, "applied", "value", {"a": 1, "b": 1, "c": 1})}
    assert found == {"b": "duplicated", "c": "lost", "stranger": "unexpected"}
