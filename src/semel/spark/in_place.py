"""Can a batch be written without a shuffle? In a transaction one task writes a partition, so rows of one partition must
not be in two tasks. They are not where a topic is copied to as many partitions with its keys, or with its
partitions: each task has read one partition, and its rows go to the one with the same number.

Two looks decide: one at the plans (each task still has the rows that it has read, and their keys are the source's,
unchanged), one at some keys of each partition of the source. The second is a sample, so this is a guess. The opening
handshake is sure: if two tasks want one partition, the batch is aborted and runs again, and no batch after it is
guessed about.

Spark's analyzed plans give every column an id. A micro-batch is an RDD whose columns have the ids of the query's own
plan, so a column is followed twice: from the DataFrame that the sink was given to that RDD, and from the query's result
to its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.protocol.partitioning import partitions_for_keys
from semel.spark.checkpoint import running_query
from semel.spark.encoding import Targets
from semel.spark.ledger import MicroBatch
from semel.spark.offsets import Range, parse, ranges
from semel.spark.reading import DataLossError, RangeReader
from semel.spark.sink_options import MURMUR2, SinkOptions
from semel.spark.topics import is_here

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


KEPT_PLANS = 8  # a function that projects a batch before it calls the sink makes new columns every time
LOOKED_AT = 200  # offsets of each partition
LOOK_BYTES = 64 << 10  # fetched at once; a batch that is larger comes whole


class InPlace:
    """The guesses about the batches of one query."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.has_failed = False  # rows had moved: there is no second guess
        self.stalled_batch = -1  # an attempt at one of its tasks died in the middle of a partition: it needs a shuffle
        self._unchanged: dict[str, dict[str, str]] = {}  # `origins` by the ids of a batch's columns
        self._belongs: dict[tuple[str, int, int], bool] = {}  # (topic, partition, how many the output has)

    def allows(self, df: Any, options: SinkOptions, targets: Targets, batch: MicroBatch, most_tasks: int) -> bool:
        """Whether the tasks of a batch, joined to at most so many, may write the rows that they have."""
        if self.has_failed or self.stalled_batch == batch.batch_id or options.partitioner != MURMUR2:
            return False
        wanted = ranges_of_one_topic(batch)
        count = partitions_of_all(targets, options)
        if wanted is None or count is None:
            return False
        name = "partition" if "partition" in df.columns else "key"
        # First, as this is known from the batch before: the next look costs dozens of calls of the JVM.
        if self._origins(df, ("key", "partition")).get(name) != name:
            return False
        tasks = tasks_without_shuffle(df)
        if tasks is None or tasks > max(1, len(wanted)):  # more: a partition is read by several
            return False
        if not dead_letters_fit(targets, options, min(tasks, most_tasks)):
            return False
        if name == "partition":
            return all(r.partition < count for r in wanted)
        return self._keys_belong(wanted, options, count)

    def _origins(self, df: Any, names: tuple[str, ...]) -> dict[str, str]:
        """`origins` of a batch. The query's plan does not change while it runs, so it is read once."""
        plan = df._jdf.queryExecution().analyzed()
        ids = plan.output().mkString(",")
        if ids not in self._unchanged:
            while len(self._unchanged) >= KEPT_PLANS:
                self._unchanged.pop(next(iter(self._unchanged)))
            self._unchanged[ids] = origins(plan, running_query(df.sparkSession).lastExecution().analyzed(), names)
        return self._unchanged[ids]

    def _keys_belong(self, wanted: list[Range], options: SinkOptions, count: int) -> bool:
        """Whether the first records of every partition have keys that belong there, among so many. Each is read
        once."""
        if options.source_cluster_is_other:
            return False
        for r in wanted:
            place = (r.topic, r.partition, count)
            if place not in self._belongs:
                self._belongs[place] = belong(self._cluster, r, count)
            if not self._belongs[place]:
                return False
        return True


def ranges_of_one_topic(batch: MicroBatch) -> list[Range] | None:
    """What a batch reads, if that is one topic; None if there are several sources, or others than Kafka."""
    if len(batch.ends) != 1 or batch.starts[0] is None or batch.ends[0] is None:
        return None
    starts, ends = parse(batch.starts[0]), parse(batch.ends[0])
    return None if starts is None or ends is None or len(ends) != 1 else list(ranges(starts, ends))


def partitions_of_all(targets: Targets, options: SinkOptions) -> int | None:
    """How many partitions each topic has that rows may go to; None if they differ."""
    counts = {t.partitions for t in targets.topics if t.name in (options.topic, *options.extra_topics)}
    return counts.pop() if len(counts) == 1 else None


def dead_letters_fit(targets: Targets, options: SinkOptions, tasks: int) -> bool:
    """Whether each task has a partition for dead letters to itself, where a column says that there will be some."""
    index = targets.index(options.dead_letter_topic)
    return options.bad_column is None or index < 0 or targets.topics[index].partitions >= tasks


def belong(cluster: Cluster, wanted: Range, partitions: int) -> bool:
    """Whether the first records of a range have keys that belong to its partition, among so many."""
    some = wanted._replace(end=min(wanted.end, wanted.start + LOOKED_AT))
    try:
        if not is_here(cluster, wanted.topic):
            return False
        reader = RangeReader(cluster, some, read_committed=False, fail_on_data_loss=True, fetch_bytes=LOOK_BYTES)
        for table in reader.tables(headers=False):
            keys = table.column("key")
            if keys.null_count or (partitions_for_keys(keys, partitions) != wanted.partition).any():
                return False
    except (KafkaError, DataLossError):
        return False  # the task that reads them raises what is wrong
    return True
