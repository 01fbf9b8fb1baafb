"""The sink without transactions, for those who want less and say so.

at_least_once: rows first, then the offsets. A crash in between writes the batch again: duplicates, no loss.
at_most_once:  offsets first, then the rows, once. A crash in between leaves rows out: loss, no duplicates.

Tasks write straight to the partitions of their rows: without exactly-once a partition may have many writers, so there
is no shuffle. at_most_once needs to know whether a task ran before, so rows that crossed a shuffle of the query are
computed first, and written from where Spark keeps them.
"""

from __future__ import annotations

import time
from typing import Any

from semel import faults
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.producer.handle import PlainHandle
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.spark.base_sink import BaseSink, SinkError, log, two_sinks
from semel.spark.encoding import Targets
from semel.spark.ledger import MicroBatch
from semel.spark.reruns import settled
from semel.spark.sink_options import AT_MOST_ONCE, SinkOptions
from semel.spark.topic_limits import limits_of
from semel.spark.topic_offsets import ABSENT_S, is_here
from semel.spark.transaction import source_offsets
from semel.spark.write_job import plain_job

GroupOffsets = dict[tuple[str, int], OffsetAndMetadata]


class PlainSink(BaseSink):
    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._settings = options.producer_settings()
        self._admin = Admin(self._settings.common())
        self._cluster = Cluster(self._settings)
        self._elsewhere: set[str] = set()  # source topics that this cluster does not have
        Targets.of(self._cluster, options.topics())  # a topic that is missing shows before the query starts
        self._limits = limits_of(self._cluster, options.topics())

    def close(self) -> None:
        self._admin.close()
        self._cluster.close()

    def _batch(self, df: Any, batch: MicroBatch) -> None:
        offsets = source_offsets(batch.ends, lambda topic: self.options.stores_offsets and self._is_here(topic))
        if self.options.guarantee == AT_MOST_ONCE:
            self._at_most_once(df, batch, offsets)
        else:
            self._at_least_once(df, batch, offsets)

    def _is_here(self, topic: str) -> bool:
        """At most once depends on it: a topic whose offsets were left out by mistake would be read again."""
        must_be_sure = self.options.guarantee == AT_MOST_ONCE and topic not in self._elsewhere
        found = is_here(self._cluster, topic, ABSENT_S if must_be_sure else 0.0)
        if not found:
            self._elsewhere.add(topic)
        return found

    def _at_least_once(self, df: Any, batch: MicroBatch, offsets: GroupOffsets) -> None:
        started_s = time.monotonic()
        rows, dead = self._write(df, batch)
        written_s = time.monotonic()
        faults.hit("sink.after_write")
        self._commit(offsets)
        self._report(batch, "write", rows, dead, 1, started_s, written_s)

    def _at_most_once(self, df: Any, batch: MicroBatch, offsets: GroupOffsets) -> None:
        if not offsets:
            raise ValueError(
                "at_most_once stores the sources' offsets before it writes, but no source of this query is a topic "
                "of this cluster; use at_least_once or exactly_once"
            )
        started_s = time.monotonic()
        if self._was_tried(batch, offsets):
            log.warning(
                "batch %d is left out: group %r has its offsets already, so it was tried before and its rows may be "
                "written (at_most_once)",
                batch.batch_id,
                self.options.application_id,
            )
            df.write.format("noop").mode("overwrite").save()
            self._report(batch, "already tried", 0, 0, 1, started_s, started_s)
            return
        with settled(df) as frame:
            assert self._run is not None
            metadata = f"{batch.plan}/{self._run.run_id}"  # by these an attempt that was made is known
            self._commit({place: at._replace(metadata=metadata) for place, at in offsets.items()})
            faults.hit("sink.after_offsets")
            rows, dead = self._write(frame, batch)
        self._report(batch, "write", rows, dead, 1, started_s, time.monotonic())

    def _write(self, df: Any, batch: MicroBatch) -> tuple[int, int]:
        targets = Targets.of(self._cluster, self.options.topics(), self._limits)  # partitions may have been added
        with self._counters.stage("write"):
            reports = plain_job(df, self.options, targets, batch.batch_id, PlainHandle(self._settings))
        return sum(r.rows for r in reports), sum(r.dead for r in reports)

    def _commit(self, offsets: GroupOffsets) -> None:
        if offsets:
            with self._counters.stage("commit"):
                self._admin.alter_group_offsets(self.options.application_id, offsets)

    def _was_tried(self, batch: MicroBatch, offsets: GroupOffsets) -> bool:
        """Whether an earlier attempt has stored the offsets of this batch: then its rows may be there.

        Where a batch moves no offset (its rows come from state, or from a source that is no topic of this cluster),
        those of the batch before look the same, and the plan that is stored with them decides.
        """
        found = self._admin.group_offsets(self.options.application_id)
        places = {TopicPartition(*place): wanted.offset for place, wanted in offsets.items()}
        if not all(place in found and found[place].offset >= offset for place, offset in places.items()):
            return False
        started = source_offsets(batch.starts, lambda _: True)
        moves = any(place not in started or started[place].offset != at.offset for place, at in offsets.items())
        tried = [(found[place].metadata or "").partition("/") for place in places]
        if not moves and any(plan != batch.plan for plan, _, _ in tried):
            return False
        assert self._run is not None
        if all(run_id == self._run.run_id for _, _, run_id in tried):
            raise SinkError(two_sinks(self.options.application_id, batch.batch_id))
        return True
