"""Both at once on Spark: the rows are computed by one job, and written by two others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from semel.spark import postgres_sink
from semel.spark.postgres_sink import DecidedSink, PostgresSink
from semel.spark.sink_options import Precautions
from semel.spark.write_job import Reports

SLOTS = 4


class Writing:
    """A sink whose jobs note what they read."""

    def __init__(self, patch: pytest.MonkeyPatch, *, is_shuffled: bool, spark_notices: bool) -> None:
        self.frames: list[Any] = []
        self.tags: list[str] = []
        self.tags_at_first_job: list[str] = []
        self.kept = MagicMock(name="kept")
        self.context = MagicMock(defaultParallelism=SLOTS)
        self.context.addJobTag.side_effect = self.tags.append
        self.context.removeJobTag.side_effect = self.tags.remove
        patch.setattr(postgres_sink, "settled", self._settled)
        patch.setattr(postgres_sink, "tasks_without_shuffle", lambda _: None if is_shuffled else 2)
        patch.setattr(postgres_sink, "spark_notices", lambda _: spark_notices)
        patch.setattr(DecidedSink, "_write_records", lambda _, df, *__: self.frames.append(df) or [])
        patch.setattr(PostgresSink, "_write", lambda _, df, *__: self.frames.append(df) or Reports())
        same = SimpleNamespace(records=lambda df: df, rows=lambda df: df)
        sink = DecidedSink.__new__(DecidedSink)
        sink.options = SimpleNamespace(topics=same, precautions=Precautions())
        df = MagicMock()
        df.sparkSession.sparkContext = self.context
        self.reports = sink._write(df, MagicMock(), MagicMock())

    @contextmanager
    def _settled(self, _: Any, *, always: bool) -> Iterator[Any]:
        assert always
        self.tags_at_first_job = list(self.tags)
        yield self.kept


def test_rows_behind_a_shuffle_are_written_by_as_many_tasks_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Writing(monkeypatch, is_shuffled=True, spark_notices=True)
    behind.kept.coalesce.assert_called_once_with(SLOTS)
    assert behind.frames == [behind.kept.coalesce()] * 2
    before = Writing(monkeypatch, is_shuffled=False, spark_notices=True)
    assert before.frames == [before.kept] * 2


def test_the_job_that_computes_the_rows_is_watched_where_spark_does_not_compare_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Writing(monkeypatch, is_shuffled=True, spark_notices=False)
    assert found.reports.rows.watch is not None
    assert found.tags_at_first_job == [found.reports.rows.watch._tag]
    assert not found.tags
    assert Writing(monkeypatch, is_shuffled=True, spark_notices=True).reports.rows.watch is None
