"""Which stages count as run more than once."""

from __future__ import annotations

from semel.spark.write_job import reruns


def test_every_stage_once_is_fine():
    assert reruns([(0, 0, 10), (1, 0, 20), (2, 0, 30)]) == []


def test_second_attempt_counts():
    assert reruns([(0, 0, 10), (1, 1, 20)]) == [1]


def test_stage_that_computes_again_what_another_had_computed_counts():
    """A job of its own has made the shuffle; a later job has another stage for it, whose first attempt is a rerun."""
    assert reruns([(0, 0, 10), (1, 0, 10), (2, 0, 30)]) == [1]
