"""What a table pipeline refuses before anything runs."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest

import semel
from semel.spark.options import OptionError
from semel.spark.sink import Sink
from semel.spark.sink_options import SinkOptions
from semel.spark.write_job import WriteJob

SOURCE = {"subscribe": "in"}


@pytest.fixture
def sink() -> Sink:
    made = object.__new__(Sink)  # without brokers
    made.options, made.job, made.is_used = SinkOptions("h:1", "app", topic="out"), WriteJob(MagicMock()), False
    return made


def test_a_second_pipeline_with_a_sink_does_not_change_what_the_first_one_does(sink: Sink) -> None:
    semel.table_pipeline(MagicMock(), source=SOURCE, sink=sink, function=lambda table: table)
    first = sink.job
    with pytest.raises(OptionError, match="belongs to a query or table pipeline that was made before"):
        semel.table_pipeline(MagicMock(), source={"subscribe": "other"}, sink=sink)
    assert sink.job is first


def test_a_pipeline_does_not_take_the_sink_of_a_query(sink: Sink) -> None:
    sink._run, writes = None, sink.job
    with patch("semel.spark.base_sink.QueryRun", return_value=MagicMock(short_lived="")):
        sink._same_run(MagicMock())  # its first batch
    with pytest.raises(OptionError, match="make a new sink"):
        semel.table_pipeline(MagicMock(), source=SOURCE, sink=sink)
    assert sink.job is writes
