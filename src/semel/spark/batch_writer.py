"""`df.write.format("semel")`: a whole batch job in one transaction.

    semel.route(df, brokers, topic="out").write.format("semel").option("kafka.bootstrap.servers", brokers)
        .option("topic", "out").option("applicationId", "nightly").option("jobId", "2026-11-15").mode("append").save()

With a job id the ledger remembers the job: a second run with the same id is refused as done. Rows of one partition
must be in one task; `semel.route` brings them there. Rows without keys need no routing, only at most as many tasks as
partitions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import IntegerType, StructType

from semel.client.cluster import Cluster
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.client.settings import ClientSettings
from semel.spark.columns import HASH_OF_KEY, check_columns
from semel.spark.committing import audit, write_entry, written_places
from semel.spark.encoding import MURMUR2, SPREAD
from semel.spark.ledger import Entry, topic_of
from semel.spark.ledger_topic import all_entries, create
from semel.spark.reasons import reason_first
from semel.spark.targets import Targets
from semel.spark.write_job import Report
from semel.spark.writer_options import writer_options
from semel.spark.writer_task import check_routed, write_rows
from semel.spark.writing import task_identity

JOB_PREFIX, UNNAMED_JOB = "job:", "batch"  # in place of a query's id in the ledger


class AlreadyDoneError(RuntimeError):
    """The job was run before."""


class QueryIdError(RuntimeError):
    """The application id belongs to a streaming query."""


@dataclass
class Done(WriterCommitMessage):
    """What one task wrote."""

    reports: list[Report]


class BatchWriter(DataSourceArrowWriter):
    """Made once, when the job is planned; pickled to the tasks and to the commit."""

    @reason_first()
    def __init__(self, raw: Mapping[str, str], schema: StructType) -> None:
        given = {name.lower(): value for name, value in raw.items()}
        self.job_id = given.get("jobid")
        self.options = writer_options(raw, also=("jobId",))
        types = {f.name: f.dataType.simpleString() for f in schema.fields}
        check_columns(types, self.options)
        check_routed(types, self.options)
        with TransactionOwner(self.options.producer_settings()) as owner:
            create(owner.cluster, self.options.application_id)
            self._refuse_queries(owner.cluster)  # before it is fenced
            owner.own()
            self._refuse_if_done(owner.cluster)
            self.targets = Targets.of(owner.cluster, self.options.topics())
            ledger = (topic_of(self.options.application_id), 0)
            self.handle: TransactionHandle = owner.begin([*self.targets.places(), ledger])

    def _refuse_queries(self, cluster: Cluster) -> None:
        """A job would fence a query with this id, and its entry would follow the query's: the query could not go on."""
        found = all_entries(cluster, self.options.application_id)
        query = max((entry for entry in found if not _is_job(entry)), key=lambda entry: entry.sequence, default=None)
        if query is not None:
            raise QueryIdError(
                f"application id {self.options.application_id!r} belongs to the streaming query {query.query_id} (its "
                f"last entry in the ledger is batch {query.batch_id}); a batch job under it would stop the query. "
                "Nothing was written. Give the job another applicationId"
            )

    def _refuse_if_done(self, cluster: Cluster) -> None:
        found = all_entries(cluster, self.options.application_id)
        self.sequence = 1 + max((entry.sequence for entry in found), default=-1)
        done = next((entry for entry in found if self.job_id is not None and entry.query_id == self.job_name), None)
        if done is not None:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(done.committed_at_ms / 1000))
            raise AlreadyDoneError(
                f"job {self.job_id!r} of application {self.options.application_id!r} was written at {when} UTC "
                f"({done.rows} rows); nothing was written now. Use another jobId for another job"
            )

    @property
    def job_name(self) -> str:
        return f"{JOB_PREFIX}{self.job_id}"

    @reason_first()
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return Done(write_rows(iterator, self.options, self.targets, 0, self.handle))

    @reason_first()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        reports = [report for message in messages if isinstance(message, Done) for report in message.reports]
        with self._owner() as owner:
            try:
                audit(owner, self.targets, reports)
                write_entry(self.handle, self.options.application_id, self._entry(reports), self._key())
                owner.end(commit=True)
            except EndUnknownError:
                owner.renew()
                if not any(
                    e.sequence == self.sequence for e in all_entries(owner.cluster, self.options.application_id)
                ):
                    raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with self._owner() as owner:
            owner.end(commit=False)

    def _owner(self) -> TransactionOwner:
        """The owner of the transaction again, in the process that ends it."""
        owner = TransactionOwner(self.handle.settings)
        owner.resume(self.handle)
        return owner

    def _key(self) -> bytes | None:
        """A job's entry has a key of its own: compaction never takes it away."""
        return None if self.job_id is None else self.job_name.encode()

    def _entry(self, reports: list[Report]) -> Entry:
        return Entry(
            sequence=self.sequence,
            query_id=self.job_name if self.job_id is not None else UNNAMED_JOB,
            run_id="",
            batch_id=0,
            starts=[],
            ends=[],
            written=written_places(self.targets, reports),
            rows=sum(r.rows for r in reports),
            dead_letters=sum(r.dead for r in reports),
            committed_at_ms=int(time.time() * 1000),
        )


def _is_job(entry: Entry) -> bool:
    return entry.query_id == UNNAMED_JOB or entry.query_id.startswith(JOB_PREFIX)


def route(
    df: Any, brokers: str, *, topic: str, partitioner: str = MURMUR2, client: Mapping[str, Any] | None = None
) -> Any:
    """The same rows with a column `partition`, each partition's rows in one task: what a transaction needs.

    murmur2 puts a key where any Kafka producer would, hash where Spark's own hash says (no Python needed). Rows without
    a key are shared out; so are all with partitioner=none. A row that has a partition keeps it.
    """
    settings = ClientSettings.of({"bootstrap.servers": brokers, "allow.auto.create.topics": False, **(client or {})})
    with Cluster(settings) as cluster:
        count = Targets.of(cluster, [topic]).count
    columns = _columns(df)
    by_key = partitioner != SPREAD and "key" in columns
    if not by_key and "partition" not in columns:
        return df.coalesce(count)
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf

    if by_key and partitioner == MURMUR2:
        chosen = arrow_udf(_partition_of_key(count), IntegerType(), ArrowUDFType.SCALAR)("key")
    else:
        hashed = HASH_OF_KEY if by_key else "NULL"
        chosen = f.expr(f"cast(pmod(coalesce({hashed}, spark_partition_id()), {count}) AS INT)")
    if "partition" in columns:
        chosen = f.coalesce(f.col("partition").cast("int"), chosen)
    return df.withColumn("partition", chosen).repartitionById(count, f.col("partition"))


def _columns(df: Any) -> list[str]:
    """Declarative pipelines do not let a DataFrame be looked at; there a key is expected, and no partition."""
    try:
        found: list[str] = df.columns
        return found
    except Exception as error:
        if "ATTEMPT_ANALYSIS" in str(error):
            return ["key"]
        raise


def _partition_of_key(count: int) -> Any:
    def partition_of_key(keys: Any) -> Any:
        """Where Kafka's partitioner puts a key. Rows without one go by their task, so that a rerun does the same."""
        import numpy as np
        import pyarrow as pa

        from semel.protocol.partitioning import partitions_for_keys

        task, _ = task_identity()
        chosen = np.full(len(keys), task % count, np.int32)
        has = keys.is_valid().to_numpy(zero_copy_only=False)
        if has.any():
            chosen[has] = partitions_for_keys(keys.filter(pa.array(has)), count)
        return pa.array(chosen, pa.int32())

    return partition_of_key
