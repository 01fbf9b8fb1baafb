"""Can a batch be written without a shuffle? In a transaction one task writes a partition, so rows of one partition must
not be in two tasks. They are not where a topic is copied with its keys to as many partitions: each task has read one
partition, and its rows go to the one with the same number.

Two looks say whether that is likely: one at the plan (no shuffle before), one at some keys of the source. Nobody can be
sure: a query may change its keys. The opening handshake is, and if two tasks want one partition the batch is aborted.
"""

from __future__ import annotations

from typing import Any

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.protocol.partitioning import partitions_for_keys
from semel.spark.lag import is_here
from semel.spark.ledger import Batch
from semel.spark.offsets import parse
from semel.spark.planning import Range, ranges
from semel.spark.reading import DataLossError, RangeReader

ROW_BY_ROW = {"Project", "Filter", "SubqueryAlias"}  # steps that leave rows where they are
MOST_STEPS = 50
LOOKED_AT = 200  # offsets of each partition
LOOK_BYTES = 64 << 10  # asked for at once; a batch that is larger comes whole


def tasks_without_shuffle(df: Any) -> int | None:
    """How many tasks read the rows of a micro-batch straight from their source; None if a shuffle lies between, or if
    nobody knows: the batch of a query is an RDD, and what was done to it since then must be row by row."""
    plan = df._jdf.queryExecution().analyzed()
    for _ in range(MOST_STEPS):
        name = plan.getClass().getSimpleName()
        if name == "LogicalRDD":
            return None if _is_shuffled(plan.rdd()) else int(plan.rdd().getNumPartitions())
        if name not in ROW_BY_ROW:
            return None
        plan = plan.children().head()
    return None


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


def keys_are_in_place(cluster: Cluster, batch: Batch, partitions: int) -> bool:
    """Whether the first records of every partition that a batch reads have keys that belong there, among so many."""
    starts, ends = (parse(line or "") if line else None for line in (batch.starts[0], batch.ends[0]))
    if len(batch.ends) != 1 or starts is None or ends is None or len(ends) != 1:
        return False
    try:
        wanted = list(ranges(starts, ends))
        return is_here(cluster, next(iter(ends))) and all(_belong(cluster, r, partitions) for r in wanted)
    except (KafkaError, DataLossError):
        return False  # whoever reads them will say what is wrong


def _belong(cluster: Cluster, wanted: Range, partitions: int) -> bool:
    some = wanted._replace(end=min(wanted.end, wanted.start + LOOKED_AT))
    reader = RangeReader(cluster, some, read_committed=False, fail_on_data_loss=True, fetch_bytes=LOOK_BYTES)
    for table in reader.tables(headers=False):
        keys = table.column("key")
        if keys.null_count or (partitions_for_keys(keys, partitions) != wanted.partition).any():
            return False
    return True
