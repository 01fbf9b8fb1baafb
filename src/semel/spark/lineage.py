"""Which columns of a micro-batch are columns of the query's source, unchanged, and whether rows are still in the task
that read them. Read from Spark's analyzed plans, where every column has an id.

A micro-batch is an RDD whose columns have the ids of the query's own plan. So a column is followed twice: from the
DataFrame that the sink was given to that RDD, and from the query's result to its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.spark.checkpoint import running_query

MICRO_BATCH = {"LogicalRDD"}
SOURCE = {"StreamingDataSourceV2ScanRelation", "StreamingDataSourceV2Relation"}  # the second one in earlier Sparks
# Steps that leave rows in their tasks, and columns as they are. The last one is the query's own output.
ROW_BY_ROW = {"Filter", "SubqueryAlias", "EventTimeWatermark", "Generate", "WriteToMicroBatchDataSourceV1"}
PROJECT = "Project"
BYTES = {"binary", "string"}  # a cast from one to the other keeps every byte
MOST_STEPS = 100

Columns = dict[str, int]  # the id of each column that is followed


def tasks_without_shuffle(df: Any) -> int | None:
    """How many tasks read the rows of a micro-batch straight from their source; None if a shuffle lies between, or if
    that cannot be known."""
    found = _followed(df._jdf.queryExecution().analyzed(), {}, MICRO_BATCH)
    if found is None:
        return None
    rdd = found[0].rdd()
    return None if _is_shuffled(rdd) else int(rdd.getNumPartitions())


class Lineage:
    """Of the batches of one query. Its plan does not change while it runs, so it is read once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}  # by the ids of a batch's columns

    def unchanged(self, df: Any, names: tuple[str, ...]) -> dict[str, str]:
        """Those of the columns that are a column of the source, unchanged, with its name there."""
        plan = df._jdf.queryExecution().analyzed()
        ids = plan.output().mkString(",")
        if ids not in self._known:
            self._known[ids] = origins(plan, running_query(df.sparkSession).lastExecution().analyzed(), names)
        return self._known[ids]


def origins(batch: Any, query: Any, names: tuple[str, ...]) -> dict[str, str]:
    """The names in the source of a query of those columns of one of its batches that are unchanged."""
    given = {a.name(): a.exprId().id() for a in _items(batch.output())}
    found = _followed(batch, {name: given[name] for name in names if name in given}, MICRO_BATCH)
    if found is None:
        return {}
    found = _followed(query, found[1], SOURCE)
    if found is None:
        return {}
    source, columns = found
    in_source = {a.exprId().id(): a.name() for a in _items(source.output())}
    return {name: in_source[number] for name, number in columns.items() if number in in_source}


def _followed(plan: Any, columns: Columns, leaves: set[str]) -> tuple[Any, Columns] | None:
    """The leaf of a plan, and the ids that columns have there; those that are computed are left out. None if there is
    another leaf, or a step that may move rows."""
    for _ in range(MOST_STEPS):
        name = plan.getClass().getSimpleName()
        if name in leaves:
            return plan, columns
        if name == PROJECT:
            columns = _before(plan, columns) if columns else columns
        elif name not in ROW_BY_ROW:
            return None
        plan = plan.children().head()
    return None


def _before(project: Any, columns: Columns) -> Columns:
    """The ids of columns before a projection."""
    made = {e.exprId().id(): e for e in _items(project.projectList())}
    found = {name: _attribute(made[number]) for name, number in columns.items() if number in made}
    return {name: number for name, number in found.items() if number is not None}


def _attribute(expression: Any) -> int | None:
    """The id of the column that an expression passes on as it is; None if it makes another value."""
    while True:
        kind = expression.getClass().getSimpleName()
        if kind == "AttributeReference":
            return int(expression.exprId().id())
        if kind == "Cast" and not {_type(expression), _type(expression.child())} <= BYTES:
            return None
        if kind not in ("Alias", "Cast"):
            return None
        expression = expression.child()


def _type(expression: Any) -> str:
    return str(expression.dataType().simpleString())


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(index) for index in range(sequence.size()))


def _is_shuffled(rdd: Any) -> bool:
    """Whether an RDD, or one that it is made of, waits for a shuffle. Those with several parents are taken for such."""
    for _ in range(MOST_STEPS):
        parents = rdd.dependencies()
        if parents.isEmpty():
            return False
        if parents.size() > 1 or parents.head().getClass().getSimpleName() == "ShuffleDependency":
            return True
        rdd = parents.head().rdd()
    return True
