"""A checksum of the rows of a batch, for queries that keep state.

A batch that was committed before a crash, but not in Spark's log, runs again to rebuild the state, and its rows go
nowhere. If it gives other rows than those that were written, the query is not deterministic, and its state would not
agree with its output from then on. The ledger has the checksum of what was written, so this is noticed.

Rows count in any order. The timestamps of records do not count: without a column of their own they are the time of day.
Spark computes the checksum where it has the rows (`Observed`), tasks of the stream writer from Arrow batches
(`Summed`). The first word of a checksum says which, and only equal kinds are compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from semel.spark.sink_options import SinkOptions, check_columns, quoted, types_of

log = logging.getLogger("semel.spark")
COLUMNS = ("key", "value", "headers", "topic", "partition")
EVENTS_S = 60.0
MODULUS = 2**31 - 1  # so that sums do not overflow


def disagree(written: str, now: str) -> bool:
    """Whether two checksums of a batch show that its rows differ. Unknown ones, or those of two kinds, show nothing."""
    comparable = bool(written and now) and written.partition(":")[0] == now.partition(":")[0]
    return comparable and written != now


def of_rows(checksum: str, rows: int) -> str:
    """A checksum, if it is one of so many rows. Spark may count those of a task again when its stage runs again, as
    after lost shuffle files; compared with that, a batch that is the same would look like another."""
    return checksum if checksum.split(":")[1:2] == [str(rows)] else ""


def why_state_differs(batch_id: int, written: str, now: str) -> str:
    """The refusal of a batch that gave other rows when it ran again; "" if it gave the same."""
    if not disagree(written, now):
        return ""
    rows, rows_now = (text.split(":")[1] for text in (written, now))
    return (
        f"batch {batch_id} was committed before the query stopped, and ran again only to rebuild its state. It gave "
        f"other rows than it had written ({rows} rows then, {rows_now} now), so its state would not agree with the "
        "output from here on. Either the query was changed meanwhile, or it is not deterministic (uuid(), rand(), the "
        "time of day, or what depends on the order of rows). Go back to the query that wrote the batch; or make it "
        "deterministic and start over under a new application id; or, if the difference does not touch its state, or "
        "may, start once with accept_lost_state=True"
    )


def hashed_columns(df: Any, options: SinkOptions) -> list[str]:
    """The columns of a frame for topics that count; raises before Spark says what it cannot hash."""
    types = types_of(df.dtypes, options)
    check_columns(types, options)
    return [name for name in (*COLUMNS, options.bad_column) if name is not None and name in types]


class Observed:
    """A DataFrame that is summed up while a job runs over it."""

    def __init__(self, df: Any, names: Iterable[str]) -> None:
        from pyspark.sql import Observation
        from pyspark.sql.functions import expr

        hashed = f"xxhash64({', '.join(quoted(name) for name in names)})"
        sums = ("count(1) AS rows", f"sum(pmod({hashed}, {MODULUS})) AS total", f"bit_xor({hashed}) AS mixed")
        self._observation = Observation()
        # As texts: an expression of PySpark's functions is a dozen questions to the JVM for each of them.
        self.frame = df.observe(self._observation, *map(expr, sums))

    def checksum(self) -> str:
        """To be called after the job has succeeded. Spark delivers the sums with its listeners' events, which it drops
        when there are too many: then nobody knows, and an open transaction must not wait for it."""
        found: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: found.append(self._observation.get), daemon=True)
        asking.start()
        asking.join(EVENTS_S)
        if not found:
            log.warning("Spark did not deliver the checksum of a batch within %.0f s; it is not compared", EVENTS_S)
            return ""
        return f"spark:{found[0]['rows']}:{found[0]['total'] or 0}:{found[0]['mixed'] or 0}"


@dataclass
class Summed:
    """The rows of Arrow batches, summed up as they pass."""

    rows: int = 0
    total: int = 0
    mixed: int = 0

    def passed(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._add(batch)
            yield batch

    def _add(self, batch: Any) -> None:
        import numpy as np
        import pyarrow as pa

        from semel.protocol.partitioning import murmur2_column

        hashed = np.zeros(batch.num_rows, np.uint64)
        for name in COLUMNS:
            if name not in batch.schema.names or not batch.num_rows:
                continue
            column = batch.column(name)
            texts = column if name in ("key", "value") else pa.array([str(v) for v in column.to_pylist()])
            hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + murmur2_column(texts.cast(pa.binary())).astype(np.uint64)
            hashed ^= hashed >> np.uint64(29)
        self.rows += batch.num_rows
        self.total += int((hashed % np.uint64(MODULUS)).sum())
        self.mixed ^= int(np.bitwise_xor.reduce(hashed))

    def add(self, other: Summed) -> None:
        self.rows += other.rows
        self.total += other.total
        self.mixed ^= other.mixed

    def checksum(self) -> str:
        return f"arrow:{self.rows}:{self.total}:{self.mixed}"
