"""What the tasks of a fast lane do, wherever its rows go: they fetch ranges of offsets and call the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from semel.spark.ledger import MicroBatch
from semel.spark.offsets import Edge, Range, parse_edge, ranges, split
from semel.spark.options import SourceOptions
from semel.spark.stages import FUNCTION, stage, task
from semel.spark.workers import settle_worker, tables_of
from semel.spark.writing import drained, task_identity

TableFunction = Callable[[Any], Any]


class FunctionError(RuntimeError):
    """The user's function failed, or returned what cannot be written."""


@dataclass(frozen=True)
class Step:
    """What every task of a pipeline does. Picklable, as far as the user's function is."""

    source: SourceOptions
    function: TableFunction | None
    by_key: bool = False
    bad_column: str | None = None

    def results(self, wanted: Range, *, views: bool = False) -> Iterator[Any]:
        """Fetched, decoded, and through the user's function; tables with rows. `views`: without a function, nothing is
        copied."""
        for table in tables_of(self.source, wanted, headers=True, views=views and self.function is None):
            with stage(FUNCTION):
                result = table if self.function is None else self._applied(table, wanted)
            if result is not None and result.num_rows:
                yield result

    def _applied(self, table: Any, wanted: Range) -> Any:
        assert self.function is not None
        try:
            return as_table(self.function(table))
        except Exception as error:
            name = getattr(self.function, "__qualname__", repr(self.function))
            offsets = table.column("offset")
            raise FunctionError(
                f"function {name!r} of the table pipeline failed on {wanted.topic}-{wanted.partition}, offsets "
                f"{offsets[0]} to {offsets[-1]} ({table.num_rows} rows): {type(error).__name__}: {error}"
            ) from error


def as_table(result: Any) -> Any:
    import pyarrow as pa

    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if result is not None and not isinstance(result, pa.Table):
        raise TypeError(f"it returned {type(result).__name__}, expected a pyarrow.Table, or None for no rows")
    return result


def planned(batch: MicroBatch, source: SourceOptions) -> list[Range]:
    """The ranges of a batch: they are in the offset log, so the source's own tasks need not run."""
    nothing = Edge({}, {})
    start, end = (parse_edge(line) or nothing for line in (batch.starts[0], batch.ends[0]))
    return split(list(ranges(start.offsets, end.offsets, end.ids)), source.min_partitions, source.max_records)


def ranges_task(kind: str, output: Callable[[int], Iterator[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task that makes its output from its number alone."""

    def run(given: Iterator[Any]) -> Iterator[Any]:
        settle_worker()
        drained(given)
        number, _ = task_identity()
        yield from task(kind, output(number))

    return run
