"""at_most_once: rows are settled before the offsets are stored, and written from there, in the first attempt only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import semel
from semel.spark import sink as sink_module
from semel.spark.ledger import MicroBatch
from semel.spark.sink import PlainSink
from semel.spark.sink_options import SinkOptions
from tests.support.broker import Cluster


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_what_is_computed_before_the_offsets_are_stored_is_what_is_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    @contextmanager
    def settled(df: Any) -> Iterator[Any]:
        steps.append(f"settle {df}")
        yield "kept rows"
        steps.append("release")

    def job(df: Any, *_: Any) -> list[Any]:
        steps.append(f"write {df}")
        return []

    monkeypatch.setattr(sink_module, "settled", settled)
    monkeypatch.setattr(sink_module, "plain_job", job)
    monkeypatch.setattr(PlainSink, "_commit", lambda *_: steps.append("store offsets"))
    topic = cluster.unique("once-out")
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(topic, 1)
    sink = PlainSink(SinkOptions(cluster.bootstrap, cluster.unique("once"), topic=topic, guarantee="at_most_once"))
    sink._run = SimpleNamespace(run_id="run")  # type: ignore[assignment]
    sink._batch("rows", MicroBatch("query", 0, [None], [f'{{"{topic}":{{"0":5}}}}']))
    sink.close()
    assert steps == ["settle rows", "store offsets", "write kept rows", "release"]


FILES = '{"logOffset":%d}'
# Batches that move no offset of a topic, after one that moved both sources: (starts, ends) with the offset of the topic
STANDING = {
    "rows from state": ([5, FILES % 0], [5, FILES % 0]),
    "rows from files": ([5, FILES % 0], [5, FILES % 1]),
    "a source that is ahead of another of the same topic": ([5, 5], [5, 9]),
}


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
@pytest.mark.parametrize("case", STANDING)
def test_a_batch_that_moves_no_offset_is_written_and_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    written: list[int] = []
    monkeypatch.setattr(sink_module, "settled", nullcontext)
    monkeypatch.setattr(sink_module, "plain_job", lambda _, __, ___, number, ____: written.append(number) or [])
    topic = cluster.unique("once-out")
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(topic, 1)
    options = SinkOptions(cluster.bootstrap, cluster.unique("once"), topic=topic, guarantee="at_most_once")

    def lines(given: list[Any]) -> list[str | None]:
        return [f'{{"{topic}":{{"0":{at}}}}}' if isinstance(at, int) else at for at in given]

    starts, ends = (lines(given) for given in STANDING[case])
    first = MicroBatch("query", 0, [None, None], starts, plan="plan 0")
    second = MicroBatch("query", 1, starts, ends, plan="plan 1")
    # A run, one after a crash, and one of an older checkpoint.
    for number, batches in enumerate(([first, second], [second], [first])):
        sink = PlainSink(options)
        sink._run = SimpleNamespace(run_id=f"run {number}")  # type: ignore[assignment]
        for batch in batches:
            sink._batch(MagicMock(), batch)
        sink.close()
    assert written == [0, 1]
