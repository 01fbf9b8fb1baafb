"""Rows to Python workers in Arrow batches of bounded size, without asking for the size after every row.

Spark closes an Arrow batch after so many rows or so many bytes. To know the bytes, it asks the vector of every column
for its size after every row, which costs more than writing the row does: half a microsecond where there are headers.
Rows that are small need no such question, because a batch of so many of them cannot be too large. So each row's own
size is looked at instead. A row that is not small ends the job; the batch is aborted and runs again in Spark's way, as
do all that follow in this query. So do they after any other failure, which may have had that cause. A job that failed
for a large row costs none of the query's attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from semel.spark.failures import FailedGuessError
from semel.spark.session import changed
from semel.spark.writing import OwnerStalledError

Result = TypeVar("Result")

ROWS_PER_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES_PER_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"
UNLIMITED_BYTES = 2**31 - 1  # Spark does not ask then
MOST_ROWS = 4096  # in an Arrow batch: a row may then have 16 KB of the 64 MB that are Spark's default
FEW_ROWS = 50_000  # in a micro-batch: planning the check costs more than it saves
MARK = "SEMEL_ROW_IS_NOT_SMALL"

_BYTES_OF = {
    "binary": "coalesce(octet_length(`{0}`), 0L)",
    "string": "coalesce(octet_length(`{0}`), 0L)",
    "array<struct<key:string,value:binary>>": (
        "if(`{0}` IS NULL, 0L, aggregate(`{0}`, 0L, (bytes, header) -> bytes + 16L"
        " + coalesce(octet_length(header.key), 0L) + coalesce(octet_length(header.value), 0L)))"
    ),
}


class LargeRowError(FailedGuessError):
    """A row is too large to do without Spark's own limit, or may have been."""


class Limits(NamedTuple):
    rows_per_batch: int
    row_bytes: int


class SmallRows:
    """Runs jobs of one query, whose rows are taken to be small until one is not."""

    def __init__(self) -> None:
        self._are_small = True
        self._limits: Limits | None = None
        self._last_rows = FEW_ROWS  # in the last batch

    def run(self, rows: Any, job: Callable[[Any], list[Result]], row_count: Callable[[Result], int]) -> list[Result]:
        """What `job` makes of the rows. Raises LargeRowError if it must run again."""
        results = self._run(rows, job)
        self._last_rows = sum(map(row_count, results))
        return results

    def _run(self, rows: Any, job: Callable[[Any], list[Result]]) -> list[Result]:
        session = rows.sparkSession
        self._limits = self._limits or limits_of(session)
        if not self._are_small or self._last_rows < FEW_ROWS or not self._limits.row_bytes:
            return job(rows)
        settings = {ROWS_PER_BATCH: str(self._limits.rows_per_batch), BYTES_PER_BATCH: str(UNLIMITED_BYTES)}
        try:
            with changed(session, settings):
                return job(checked(rows, self._limits.row_bytes))
        except FailedGuessError:
            raise  # another one: it says nothing about rows
        except Exception as error:
            # Spark tells of the last attempt at a task only; the first one may have met a large row. Those after it
            # find the partition taken.
            self._are_small = False
            if MARK not in str(error) and OwnerStalledError.__name__ not in str(error):
                raise
            raise LargeRowError(
                f"a row has more than {self._limits.row_bytes} bytes, or an attempt at a task died: the batch is "
                f"aborted and runs again with Spark's own limit ({BYTES_PER_BATCH}), as all do that follow"
            ) from error


def limits_of(session: Any) -> Limits:
    """What the session's settings come to for a single row; no bytes if they have no limit that could be kept."""
    bytes_per_batch = int(session._jsparkSession.sessionState().conf().arrowMaxBytesPerBatch())
    rows_per_batch = int(session.conf.get(ROWS_PER_BATCH))
    rows_per_batch = min(rows_per_batch, MOST_ROWS) if rows_per_batch > 0 else MOST_ROWS
    return Limits(rows_per_batch, 0 if bytes_per_batch >= UNLIMITED_BYTES else bytes_per_batch // rows_per_batch)


def checked(rows: Any, row_bytes: int) -> Any:
    """The rows; one with more bytes ends the job."""
    types = dict(rows.dtypes)
    size = " + ".join(_BYTES_OF[kind].format(name) for name, kind in types.items() if kind in _BYTES_OF)
    value = f"if({size} > {row_bytes}, cast(raise_error('{MARK}') AS binary), value) AS value"
    return rows.selectExpr(*(value if name == "value" else f"`{name}`" for name in types))
