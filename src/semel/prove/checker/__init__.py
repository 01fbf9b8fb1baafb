"""The independent checker: what is in the topics, and what is wrong with it.

It shares no code with what it checks. Records are read by confluent-kafka; who wrote them and how their transactions
ended is taken from the raw log by a reader of its own. Nothing of semel is imported; import-linter keeps it so.

    from semel.prove.checker.check import Expectation, check

    verdict = check(Expectation(topics=("out",), ids={"a": 1, "b": 1}), "localhost:9092")
    for violation in verdict.violations:
        print(violation)

A `Watcher` that runs during the faults adds what a reader saw meanwhile; pass its `observation`.
"""
