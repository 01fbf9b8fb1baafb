"""What tests of sinks share: the run of a query without Spark, ranges of offsets, a look into a database."""

from __future__ import annotations

import json
import uuid
from typing import Any

from semel.spark.ledger import MicroBatch


class SinkRun:
    """What a sink wants to know about the run that it belongs to."""

    short_lived = ""

    def __init__(self, run_id: str | None = None, stateful: bool = False) -> None:
        self.run_id = run_id or str(uuid.uuid4())
        self._stateful = stateful

    def is_stateful(self) -> bool:
        return self._stateful

    def is_active(self) -> bool:
        return True  # each stands for a process of its own

    def lag(self) -> dict[Any, int]:
        return {}


def micro_batch(topic: str, number: int, start: int, end: int, query: str = "q") -> MicroBatch:
    """Of one partition."""
    starts, ends = ([json.dumps({topic: {"0": at}}, separators=(",", ":"))] for at in (start, end))
    return MicroBatch(query, number, list(starts), list(ends))


def execute(dsn: str, statement: str) -> list[Any]:
    """On a connection of its own; the rows, if there are any."""
    import psycopg

    with psycopg.connect(dsn) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
