"""Which transaction of Kafka a database transaction has decided to commit, and who may say so."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from semel.sinks.postgres.decisions import DECISIONS, DecisionsTable
from semel.sinks.postgres.offsets import PartitionTakenError
from semel.sinks.postgres.tables import install


def test_a_generation_does_not_come_back_when_its_row_was_removed(dsn: str) -> None:
    """One that was frozen before its id was settled and removed must not pass for the next owner of the name."""
    table = DecisionsTable("semel", "app", "test")

    def run(work: Any) -> Any:
        with psycopg.connect(dsn) as connection:
            return work(connection)

    run(lambda connection: install(connection, "semel", DECISIONS))
    frozen, _ = run(lambda connection: table.claim(connection, "app-the one", as_owner=True))
    run(lambda connection: table.claim(connection, "app-the one", as_owner=False))
    run(lambda connection: table.finish(connection, "app-the one", remove=True))
    with pytest.raises(PartitionTakenError):
        run(lambda connection: table.hold(connection, "app-the one", frozen))
    now, _ = run(lambda connection: table.claim(connection, "app-the one", as_owner=True))
    run(lambda connection: table.hold(connection, "app-the one", now))
    with pytest.raises(Exception, match="another one"):
        run(lambda connection: table.hold(connection, "app-the one", frozen))
