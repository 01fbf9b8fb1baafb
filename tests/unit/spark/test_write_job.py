"""How many tasks write the rows of a batch."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from semel.spark.encoding import Targets
from semel.spark.sink_options import SinkOptions
from semel.spark.write_job import direct_tasks


@pytest.mark.parametrize(
    ("columns", "partitions", "slots", "expected"),
    [
        (["value"], {"out": 8}, 4, 8),
        (["value"], {"out": 2}, 4, 2),
        (["value"], {"out": 8, "dead": 4}, 4, 4),
        (["value"], {"out": 8, "dead": 1}, 4, None),  # one task would compute all
        (["value"], {"out": 8, "dead": 1}, 1, 1),
        (["value"], {"out": 1, "dead": 1}, 4, 1),
        (["key", "value"], {"out": 8}, 4, None),
        (["value", "partition"], {"out": 8}, 4, None),
    ],
)
def test_a_small_dead_letter_topic_does_not_make_one_task_of_a_batch(
    columns: list[str], partitions: dict[str, int], slots: int, expected: int | None
) -> None:
    rows = MagicMock(columns=columns)
    rows.sparkSession.sparkContext.defaultParallelism = slots
    options = SinkOptions("h:1", "app", "out", dead_letter_topic="dead" if "dead" in partitions else None)
    assert direct_tasks(rows, options, Targets(partitions)) == expected
