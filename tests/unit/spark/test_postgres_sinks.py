"""Several sinks for PostgreSQL in one process, without Spark and without a database."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from py4j.protocol import Py4JNetworkError

from semel.spark.base_sink import RefusedError
from semel.spark.checkpoint import QueryRun
from semel.spark.ledger import MicroBatch
from semel.spark.postgres_sink import PostgresSink

BATCH = MicroBatch("q", 0, [], [])


def run(is_active: Any) -> QueryRun:
    made = object.__new__(QueryRun)
    made._query = SimpleNamespace(isActive=is_active)  # Spark's own object
    return made


def refused_sink() -> Any:
    """One whose batch is refused before it takes anything over."""
    made = object.__new__(PostgresSink)
    made.options = SimpleNamespace(database=SimpleNamespace(where="here"), schema="semel", owner="payments")
    made.transaction, made._run = MagicMock(generation=None), None
    return made


@pytest.mark.parametrize(
    ("is_active", "closed"),
    [(lambda: True, False), (lambda: False, True), (MagicMock(side_effect=Py4JNetworkError("stopped")), True)],
)
def test_a_sink_of_the_same_id_is_closed_when_its_query_has_ended_and_only_then(is_active: Any, closed: bool) -> None:
    first, second = refused_sink(), refused_sink()
    with (
        patch("semel.spark.sink.TransactionalSink._batch", side_effect=RefusedError),
        patch.dict("semel.spark.postgres_sink._newest", clear=True),
    ):
        for sink in (first, second):
            with pytest.raises(RefusedError):
                sink._batch(MagicMock(), BATCH)
            sink._run = run(is_active)
    assert first.transaction.close.called == closed
    assert not second.transaction.close.called
