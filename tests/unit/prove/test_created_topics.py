"""A topic that was created is used when the node knows it, not before."""

from __future__ import annotations

import pytest

from semel.prove.checker import reading
from semel.prove.checker.reading import CheckerError


def test_topics_are_waited_for_until_the_node_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{}, {"other": 1}, {"other": 1, "in": 1}, {"out": 1, "in": 1}]
    monkeypatch.setattr(reading, "known_topics", lambda brokers: answers.pop(0))
    reading._wait_until_known("here:9092", {"in", "out"})
    assert answers == []


def test_a_topic_that_never_appears_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "known_topics", lambda brokers: {"in": 1})
    monkeypatch.setattr(reading, "KNOWN_TIMEOUT_S", 0.0)
    with pytest.raises(CheckerError, match="here:9092 has created out, and does not know it"):
        reading._wait_until_known("here:9092", {"in", "out"})
