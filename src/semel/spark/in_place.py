"""Can a batch be written without a shuffle? In a transaction one task writes a partition, so rows of one partition must
not be in two tasks. They are not where a topic is copied to as many partitions with its keys, or with its partitions:
each task has read one partition, and its rows go to the one with the same number.

Two looks decide: one at the plans (each task still has the rows that it has read, and their keys are the source's,
unchanged), one at some keys of each partition of the source. The second is a sample, so this is a guess. The opening
handshake is sure: if two tasks want one partition, the batch is aborted and runs again, and no batch after it is
guessed about.
"""

from __future__ import annotations

from typing import Any

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.protocol.partitioning import partitions_for_keys
from semel.spark.encoding import MURMUR2
from semel.spark.lag import is_here
from semel.spark.ledger import Batch
from semel.spark.lineage import Lineage, tasks_without_shuffle
from semel.spark.offsets import parse
from semel.spark.planning import Range, ranges
from semel.spark.reading import DataLossError, RangeReader
from semel.spark.sink_options import SinkOptions
from semel.spark.targets import Targets

LOOKED_AT = 200  # offsets of each partition
LOOK_BYTES = 64 << 10  # fetched at once; a batch that is larger comes whole


class InPlace:
    """The guesses about the batches of one query."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._has_failed = False
        self._stalled_batch = -1
        self._lineage = Lineage()
        self._belongs: dict[tuple[str, int, int], bool] = {}  # (topic, partition, how many the output has)

    def failed(self) -> None:
        """Rows had moved. There is no second guess."""
        self._has_failed = True

    def stalled(self, batch_id: int) -> None:
        """An attempt at a task of this batch died in the middle of a partition: the batch runs again with a shuffle."""
        self._stalled_batch = batch_id

    def allows(self, df: Any, options: SinkOptions, targets: Targets, batch: Batch, most_tasks: int) -> bool:
        """Whether the tasks of a batch, joined to at most so many, may write the rows that they have."""
        if self._has_failed or self._stalled_batch == batch.batch_id or options.partitioner != MURMUR2:
            return False
        wanted = ranges_of_one_topic(batch)
        count = partitions_of_all(targets, options)
        if wanted is None or count is None:
            return False
        tasks = tasks_without_shuffle(df)
        if tasks is None or tasks > max(1, len(wanted)):  # more: a partition is read by several
            return False
        if not dead_letters_fit(targets, options, min(tasks, most_tasks)):
            return False
        unchanged = self._lineage.unchanged(df, ("key", "partition"))
        if "partition" in df.columns:
            return unchanged.get("partition") == "partition" and all(r.partition < count for r in wanted)
        return unchanged.get("key") == "key" and self._keys_belong(wanted, options, count)

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


def ranges_of_one_topic(batch: Batch) -> list[Range] | None:
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
