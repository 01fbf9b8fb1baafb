"""at_most_once: rows are settled before the offsets are stored, and written from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import semel
from semel.spark import plain_sink
from semel.spark.ledger import MicroBatch
from semel.spark.plain_sink import PlainSink
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

    monkeypatch.setattr(plain_sink, "settled", settled)
    monkeypatch.setattr(plain_sink, "plain_job", job)
    monkeypatch.setattr(PlainSink, "_commit", lambda *_: steps.append("store offsets"))
    topic = cluster.unique("once-out")
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(topic, 1)
    sink = PlainSink(SinkOptions(cluster.bootstrap, cluster.unique("once"), topic=topic, guarantee="at_most_once"))
    sink._batch("rows", MicroBatch("query", 0, [None], [f'{{"{topic}":{{"0":5}}}}']))
    sink.close()
    assert steps == ["settle rows", "store offsets", "write kept rows", "release"]
