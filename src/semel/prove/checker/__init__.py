"""The independent checker: what is in the topics, and what is wrong with it.

It shares no code with what it checks. Records are read by confluent-kafka; who wrote them and how their transactions
ended is taken from the raw log by a reader of its own. Nothing of semel is imported; import-linter keeps it so.

    verdict = check(Expectation(topics=("out",), ids={"a": 1, "b": 1}), "localhost:9092")
    for violation in verdict.violations:
        print(violation)

A `Watcher` that runs during the faults adds what a reader saw meanwhile; pass its `observation`.
"""

from semel.prove.checker.check import RULES, CheckResult, Expectation, OffsetsRule, Violation, ViolationKind, check
from semel.prove.checker.reading import (
    CheckerError,
    Fate,
    LogReadError,
    Observation,
    Seen,
    Watcher,
    create_topics,
    delete_topics,
    ends,
    group_offsets,
    read,
    read_log,
    topics_like,
)

__all__ = [
    "RULES",
    "CheckResult",
    "CheckerError",
    "Expectation",
    "Fate",
    "LogReadError",
    "Observation",
    "OffsetsRule",
    "Seen",
    "Violation",
    "ViolationKind",
    "Watcher",
    "check",
    "create_topics",
    "delete_topics",
    "ends",
    "group_offsets",
    "read",
    "read_log",
    "topics_like",
]
