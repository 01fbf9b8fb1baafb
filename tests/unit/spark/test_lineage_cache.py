"""What the sink remembers of the plans of a query's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from semel.spark import in_place


def batch(ids: str) -> Any:
    plan = SimpleNamespace(output=lambda: SimpleNamespace(mkString=lambda _: ids))
    execution = SimpleNamespace(analyzed=lambda: plan)
    return SimpleNamespace(_jdf=SimpleNamespace(queryExecution=lambda: execution), sparkSession=None)


def test_plans_that_are_new_in_every_batch_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that calls the sink with a projection of its own makes new columns for each batch."""
    looks: list[Any] = []
    query = SimpleNamespace(lastExecution=lambda: SimpleNamespace(analyzed=lambda: None))
    monkeypatch.setattr(in_place, "running_query", lambda _: query)
    monkeypatch.setattr(in_place, "origins", lambda *arguments: looks.append(arguments) or {"key": "key"})
    guesses = in_place.InPlace(None)  # type: ignore[arg-type]
    for number in range(1_000):
        assert guesses._origins(batch(f"key#{number}"), ("key",)) == {"key": "key"}
        assert guesses._origins(batch(f"key#{number}"), ("key",)) == {"key": "key"}
    assert len(looks) == 1_000
    assert len(guesses._unchanged) <= in_place.KEPT_PLANS
