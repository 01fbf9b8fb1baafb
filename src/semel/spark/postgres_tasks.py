"""What tasks do for the PostgreSQL sink: each attempt writes its rows into a staging table of its own.

An attempt that is given up and lives on does no harm: nobody moves the rows of its table."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from semel import faults
from semel.sinks.postgres.binary_copy import bad_times, wire_type
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import DatabaseUnavailableError
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.staging import REASON, StagingRound, fill
from semel.sinks.postgres.target import RowColumn, WrittenColumn
from semel.spark.encoding import BadRowError
from semel.spark.stages import FROM_SPARK, PRODUCE, pulled, stage, task
from semel.spark.workers import settle_worker
from semel.spark.writing import (
    DATABASE_FAILURES,
    Blob,
    Report,
    blob_batch,
    drained,
    failure_report,
    report_batches,
    task_identity,
)

if TYPE_CHECKING:
    from psycopg import Connection

REPORTED = (BadRowError, *DATABASE_FAILURES)
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")

_sessions: dict[bytes, DatabaseSession] = {}  # of this worker, from one task to the next


def row_column(name: str, type_text: str) -> RowColumn:
    """A column of a DataFrame by Spark's name of its type."""
    return RowColumn(name, type_text, _arrow_type(type_text))


def _arrow_type(text: str) -> Any:
    import pyarrow as pa

    simple = {
        "boolean": pa.bool_(),
        "tinyint": pa.int8(),
        "smallint": pa.int16(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }
    if text in simple:
        return simple[text]
    if found := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(found[1]), int(found[2]))
    if re.fullmatch(r"(var)?char\(\d+\)", text):
        return pa.string()
    if text.startswith("array<"):
        inside = _arrow_type(text[len("array<") : -1])
        return None if inside is None else pa.list_(inside)
    return None


@contextmanager
def worker_session(database: Database) -> Iterator[DatabaseSession]:
    """A connection that stays for the next task of this worker. After a failure it is closed."""
    key = pickle.dumps(database)
    session = _sessions.pop(key, None)
    if session is not None and not _is_alive(session):
        session.close()
        session = None
    session = session or DatabaseSession(database, "spark task")
    try:
        yield session
    except BaseException:
        session.close()
        raise
    _sessions[key] = session


def _is_alive(session: DatabaseSession) -> bool:
    """The server may have been restarted since the last task."""
    try:
        session.read("looking at the connection", lambda connection: connection.execute("SELECT 1"))
    except DatabaseUnavailableError:
        return False
    return True


def stage_task(
    database: Database, stage_round: StagingRound, columns: Sequence[WrittenColumn], sets_aside: bool
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: rows in, one report out if there were any."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        settle_worker()
        yield from task("write", _reports(database, stage_round, columns, sets_aside, batches))
        drained(batches)

    return run


def _reports(
    database: Database,
    stage_round: StagingRound,
    columns: Sequence[WrittenColumn],
    sets_aside: bool,
    batches: Iterator[Any],
) -> Iterator[Any]:
    try:
        reports = stage_rows(database, stage_round, columns, sets_aside, pulled(batches, FROM_SPARK))
    except REPORTED as error:
        reports = [failure_report(error)]
    if reports:
        yield from report_batches(reports)


def stage_rows(
    database: Database,
    stage_round: StagingRound,
    columns: Sequence[WrittenColumn],
    sets_aside: bool,
    batches: Iterator[Any],
) -> list[Report]:
    """Writes the rows of this attempt into its staging table; one report if there were any."""
    checked = (checked_values(batch, sets_aside) for batch in batches if batch.num_rows)
    first = next(checked, None)
    if first is None:
        return []
    _, mark = task_identity()
    rows = chain([first], checked)
    del first
    with worker_session(database) as session, stage(PRODUCE):
        staged = session.run(
            f"writing rows to a staging table at {database.where}",
            lambda connection: fill(connection, stage_round, mark, columns, rows, with_reasons=sets_aside),
        )
    faults.hit("postgres_task.after_stage")
    return [Report(0, staged.rows, 0, -1, -1, 0, mark)]


# --- a copy of what goes to topics ---
# Where the server has lz4: its own pglz takes several times as long as all else that a copy costs the server.
FAST_COMPRESSION = (
    "SELECT set_config('default_toast_compression', 'lz4', true) FROM pg_settings "
    "WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)"
)


class CopyStage(NamedTuple):
    """Where an attempt at a task keeps a copy of the record batches that it writes to topics."""

    database: Database
    stage: StagingRound

    def keep(self, blobs: Iterator[Blob], mark: int) -> int:
        """Pulls the blobs, which writes them, and stages each; returns how many there were."""
        first = next(blobs, None)
        if first is None:
            return 0
        all_blobs = enumerate(chain([first], blobs))
        rows = (blob_batch(target, records, number, data) for number, (target, records, _, data) in all_blobs)

        def work(connection: Connection[Any]) -> int:
            connection.execute(FAST_COMPRESSION)
            return fill(connection, self.stage, mark, _copy_columns(), rows).rows

        with worker_session(self.database) as session:
            return session.run(f"keeping a copy of records at {self.database.where}", work)


def _copy_columns() -> list[WrittenColumn]:
    """The number of the partition among the targets, the count of records, which of the attempt's batches it is, and
    the batch itself."""
    import pyarrow as pa

    kinds = {"target": pa.int32(), "records": pa.int32(), "number": pa.int32(), "data": pa.binary()}
    wires = {name: wire_type(kind) for name, kind in kinds.items()}
    return [WrittenColumn(name, wire) for name, wire in wires.items() if wire is not None]


# --- values that PostgreSQL cannot hold ---
def checked_values(batch: Any, sets_aside: bool) -> Any:
    """A batch whose values PostgreSQL can hold: no text with the character NUL or that is not UTF-8, no time before
    4714 BC. Such a row fails the batch, or carries its reason in a column of its own; its texts have substitutes, its
    times are null."""
    import pyarrow as pa

    reasons: dict[int, str] = {}
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_text = _holds(column.type, pa.types.is_string, pa.types.is_large_string)
        is_time = _holds(column.type, pa.types.is_date, pa.types.is_timestamp)
        found = _bad_texts(column) if is_text else bad_times(column) if is_time else {}
        if found and not sets_aside:
            row, why = next(iter(found.items()))
            raise BadRowError(
                f"column {name!r} of a row {why}, which PostgreSQL cannot hold (row {row} of a batch of Arrow). Clean "
                "it in the query, write it as binary to a bytea column, or set such rows aside with "
                'on_error="dead_letter"'
            )
        for row, why in found.items():
            reasons.setdefault(row, f"column {name!r} {why}")
        if found:
            column = _without(column, found) if is_time else _substituted(column)
        columns.append(column)
    names = list(batch.schema.names)
    if sets_aside:
        columns.append(
            pa.array([reasons.get(row) for row in range(batch.num_rows)], pa.string())
            if reasons
            else pa.nulls(batch.num_rows, pa.string())
        )
        names.append(REASON)
    return pa.RecordBatch.from_arrays(columns, names=names)


def _holds(kind: Any, *tests: Callable[[Any], bool]) -> bool:
    import pyarrow as pa

    inside = kind.value_type if pa.types.is_list(kind) else kind
    return any(test(inside) for test in tests)


def _bad_texts(column: Any) -> dict[int, str]:
    """Rows whose text cannot be stored, with the reason. Looks at whole columns first; most have none."""
    import numpy as np
    import pyarrow as pa

    texts = column.flatten() if pa.types.is_list(column.type) else column
    data = texts.buffers()[2]
    has_nul = data is not None and not bool(np.frombuffer(data, np.uint8).all())
    if not has_nul and _is_utf8(texts):
        return {}
    found = {}
    for row, value in enumerate(_as_bytes(column)):
        for text in value if isinstance(value, list) else [value]:
            why = _why_bad(text)
            if why:
                found[row] = why
    return found


def _is_utf8(texts: Any) -> bool:
    import pyarrow as pa

    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _as_bytes(column: Any) -> list[Any]:
    import pyarrow as pa

    as_bytes = pa.list_(pa.binary()) if pa.types.is_list(column.type) else pa.binary()
    found: list[Any] = column.cast(as_bytes).to_pylist()
    return found


def _why_bad(text: bytes | None) -> str:
    if text is None:
        return ""
    try:
        return "holds the character NUL" if "\0" in text.decode() else ""
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (at byte {error.start})"


def _substituted(column: Any) -> Any:
    import pyarrow as pa

    def clean(value: Any) -> Any:
        if value is None:
            return None
        return (
            [clean(each) for each in value]
            if isinstance(value, list)
            else value.decode(errors="replace").replace("\0", "\N{SYMBOL FOR NULL}")
        )

    return pa.array([clean(value) for value in _as_bytes(column)], column.type)


def _without(column: Any, rows: Iterable[int]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    left_out = set(rows)
    kept = pa.array([row not in left_out for row in range(len(column))])
    return pc.if_else(kept, column, pa.scalar(None, column.type))
