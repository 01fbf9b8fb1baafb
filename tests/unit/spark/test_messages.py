"""Errors that a sink raises stay short enough for Spark, and keep what the user needs."""

from __future__ import annotations

from semel.spark.base_sink import MESSAGE_CHARS, shortened


def test_a_short_message_is_left_alone() -> None:
    assert shortened("topic 'nowhere' is not there\n\tat home") == "topic 'nowhere' is not there\n\tat home"


def test_the_stack_of_the_jvm_goes_and_the_cause_stays() -> None:
    stack = "\n".join(f"\tat org.apache.spark.Thing.method{n}(Thing.scala:{n})" for n in range(500))
    message = f"Job aborted\nBadRowError: a value is too large; use dead_letter_topic\n{stack}\nCaused by: the same"
    assert shortened(message).splitlines() == [
        "Job aborted",
        "BadRowError: a value is too large; use dead_letter_topic",
        "Caused by: the same",
    ]


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    short = shortened("begin " + "x" * 100_000 + " end")
    assert short.startswith("begin ")
    assert short.endswith(" end")
    assert len(short) < MESSAGE_CHARS + 100
