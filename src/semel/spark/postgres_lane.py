"""The fast lane to a table: a worker fetches its ranges, calls the function, and writes what it returns by COPY.

Staging tables, decision and ledger are those of any batch (`postgres_transaction`). What differs: the types of the rows
are known when the function has returned some, so the task compares them with the table, and reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from semel.sinks.postgres.columns import plain
from semel.sinks.postgres.errors import DatabaseFatalError
from semel.sinks.postgres.moving import DELETE
from semel.sinks.postgres.target import RowColumn, TableMismatchError, WrittenColumn, fitting
from semel.spark.ledger import MicroBatch
from semel.spark.offsets import Range
from semel.spark.postgres_options import PostgresOptions
from semel.spark.postgres_tasks import REPORTED, stage_rows
from semel.spark.postgres_transaction import BatchHandle
from semel.spark.range_tasks import FunctionError, Step, planned, ranges_task
from semel.spark.write_job import Reports, collected
from semel.spark.writing import Report, failure_report

_columns_decoder = msgspec.json.Decoder(list[WrittenColumn])


def stage_ranges(step: Step, df: Any, options: PostgresOptions, batch: MicroBatch, handle: BatchHandle) -> Reports:
    """In place of the job that writes rows of Spark: one stage, and no record crosses the JVM."""
    wanted = planned(batch, step.source)
    if not wanted:
        return Reports()
    context = df.sparkSession.sparkContext
    dealt = dealt_out(wanted, min(context.defaultParallelism, options.max_tasks or len(wanted)))
    tasks = context.parallelize(range(len(dealt)), len(dealt))
    return collected(tasks.mapPartitions(_stage_task(step, options, handle, dealt)))  # no stage before it: no reruns


def dealt_out(wanted: list[Range], tasks: int) -> list[list[Range]]:
    """For every task about as many records: the largest range first, to the task that has least."""
    dealt: list[list[Range]] = [[] for _ in range(min(tasks, len(wanted)))]
    for each in sorted(wanted, key=lambda one: -one.size):
        min(dealt, key=lambda given: sum(one.size for one in given)).append(each)
    return dealt


def columns_of(reports: Sequence[Report]) -> Sequence[WrittenColumn]:
    """The columns that all tasks have staged."""
    found = {report.message for report in reports}
    if len(found) > 1:
        raise FunctionError(
            "the function of the table pipeline returned tables with different columns or types in different tasks: "
            f"{'; '.join(sorted(map(_shown, found)))}. Return the same schema always, such as by table.cast(schema)"
        )
    return _columns(found.pop()) if found else ()


def _shown(message: str) -> str:
    return ", ".join(f"{column.name} {column.wire.name}" for column in _columns(message))


def _columns(message: str) -> list[WrittenColumn]:
    return _columns_decoder.decode(message)


def _stage_task(
    step: Step, options: PostgresOptions, handle: BatchHandle, dealt: list[list[Range]]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    # Not the options themselves: they may hold a function of the driver.
    database, sets_aside, aside, stores = options.database, options.sets_aside, options.aside(), options.mode != DELETE

    def staged(number: int) -> Iterator[Any]:
        results = (result for wanted in dealt[number] for result in step.results(wanted))
        try:
            tables = (plain(result, handle.table) for result in results)
            first = next(tables, None)
            if first is None:
                return
            fields = [RowColumn(field.name, str(field.type), field.type) for field in first.schema]
            columns = fitting(handle.table, fields, aside, stores=stores)
            reports = stage_rows(database, handle.stage, columns, sets_aside, one_schema(first, tables))
            yield from (report._replace(message=msgspec.json.encode(columns).decode()) for report in reports)
        except TableMismatchError as error:
            yield failure_report(DatabaseFatalError(str(error)))
        except REPORTED as error:
            yield failure_report(error)

    return ranges_task("copy", staged)


def one_schema(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    """What a task writes, in one schema."""
    schema = first.schema
    yield from first.to_batches()
    del first
    for table in others:
        if (table.schema.names, table.schema.types) != (schema.names, schema.types):
            raise FunctionError(
                "the function of the table pipeline returned tables with different columns or types: "
                f"({_text(schema)}), then ({_text(table.schema)}). Return the same schema always, such as by "
                "table.cast(schema)"
            )
        yield from table.to_batches()


def _text(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
