"""`df.write.format("semel")`: a whole batch job in one transaction.

    semel.route(df, brokers, topic="out").write.format("semel").option("kafka.bootstrap.servers", brokers)
        .option("topic", "out").option("applicationId", "nightly").option("jobId", "2026-11-15").mode("append").save()

With a job id the ledger remembers the job: a second run with the same id is refused as done. Rows of one partition
must be in one task; `semel.route` brings them there. Rows without keys need no routing, only at most as many tasks as
partitions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import LongType, StructType

from semel.client.cluster import Cluster
from semel.client.producer.handle import TransactionHandle
from semel.client.settings import ClientSettings
from semel.spark.encoding import Targets
from semel.spark.failures import condition_of, reason_first
from semel.spark.ledger import JOB_PREFIX, UNNAMED_JOB, LedgerEntry, MicroBatch
from semel.spark.ledger_topic import all_entries, wait_for_markers
from semel.spark.sink_options import HASH_OF_KEY, MURMUR2, SPREAD, check_schema, topic_names, writer_options
from semel.spark.transaction import BatchTransaction
from semel.spark.writing import Report, write_rows

OUT_OF_RANGE = -1  # in place of a partition that is no 32-bit integer


class AlreadyDoneError(RuntimeError):
    """The job was run before."""


class QueryIdError(RuntimeError):
    """The application id belongs to a streaming query."""


@dataclass
class JobMessage(WriterCommitMessage):
    reports: list[Report]


class BatchWriter(DataSourceArrowWriter):
    """Made once, when the job is planned; pickled to the tasks and to the commit."""

    @reason_first()
    def __init__(self, raw: Mapping[str, str], schema: StructType) -> None:
        given = {name.lower(): value for name, value in raw.items()}
        self.job_id = given.get("jobid")
        self.options = writer_options(raw, also=("jobId",))
        check_schema(schema, self.options)
        query_id = UNNAMED_JOB if self.job_id is None else f"{JOB_PREFIX}{self.job_id}"
        self.batch = MicroBatch(query_id, 0, [], [])
        with BatchTransaction(self.options) as transaction:
            transaction.open()
            ledger = (transaction.owner.cluster, self.options.application_id)
            wait_for_markers(*ledger)  # of a query's first batch
            self._refuse_queries(all_entries(*ledger))  # before it is fenced
            transaction.own()
            found = all_entries(*ledger)
            self._refuse_if_done(found)
            self.last = max(found, key=lambda entry: entry.sequence, default=None)
            self.handle: TransactionHandle = transaction.begin()
            self.targets = transaction.targets

    def _refuse_queries(self, found: list[LedgerEntry]) -> None:
        """A job would fence a query with this id, and its entry would follow the query's: the query could not go on."""
        query = max((entry for entry in found if not entry.is_job), key=lambda entry: entry.sequence, default=None)
        if query is not None:
            raise QueryIdError(
                f"application id {self.options.application_id!r} belongs to the streaming query {query.query_id} (its "
                f"last entry in the ledger is batch {query.batch_id}); a batch job under it would stop the query. "
                "Nothing was written. Give the job another applicationId"
            )

    def _refuse_if_done(self, found: list[LedgerEntry]) -> None:
        is_named = self.job_id is not None
        done = next((entry for entry in found if is_named and entry.query_id == self.batch.query_id), None)
        if done is not None:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(done.committed_at_ms / 1000))
            raise AlreadyDoneError(
                f"job {self.job_id!r} of application {self.options.application_id!r} was written at {when} UTC "
                f"({done.rows} rows); nothing was written now. Use another jobId for another job"
            )

    @reason_first()
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return JobMessage(write_rows(iterator, self.options, self.targets, 0, self.handle))

    @reason_first()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        reports = [report for message in messages if isinstance(message, JobMessage) for report in message.reports]
        with self._resumed() as transaction:
            transaction.audit(reports)
            transaction.commit(self.batch, reports, run_id="")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with self._resumed() as transaction:
            transaction.abort()

    def _resumed(self) -> BatchTransaction:
        """The transaction again, in the process that ends it."""
        transaction = BatchTransaction(self.options)
        transaction.resume(self.handle, self.targets, self.last)
        return transaction


def route(
    df: Any,
    brokers: str,
    *,
    topic: str,
    topics: Iterable[str] | str = (),
    partitioner: str = MURMUR2,
    client: Mapping[str, Any] | None = None,
) -> Any:
    """The same rows with a column `partition`, each partition's rows in one task: what a transaction needs.

    murmur2 puts a key where any Kafka producer would, hash where Spark's own hash says (no Python needed). Rows without
    a key are shared out; so are all with partitioner=none. A row that has a partition keeps it. `topics` are further
    topics that a column `topic` may name, as the writer has them: each has its own number of partitions.
    """
    settings = ClientSettings.of({"bootstrap.servers": brokers, "allow.auto.create.topics": False, **(client or {})})
    with Cluster(settings) as cluster:
        targets = Targets.of(cluster, [topic, *topic_names(topics)])
    counts = {target.name: target.partitions for target in targets.topics}
    columns = _columns(df, is_mixed=len(counts) > 1)
    by_key = partitioner != SPREAD and "key" in columns
    if not by_key and "partition" not in columns:
        return df.coalesce(min(counts.values()))
    from pyspark.sql import functions as f

    hashed = _hash_of_key(partitioner) if by_key else f.lit(None).cast("bigint")
    size = _count_by_topic(counts, topic) if len(counts) > 1 and "topic" in columns else f.lit(counts[topic])
    chosen = f.pmod(f.coalesce(hashed, f.spark_partition_id()), size).cast("int")
    if "partition" in columns:
        given = f.col("partition")
        chosen = f.when(given.isNull(), chosen).otherwise(f.coalesce(given.try_cast("int"), f.lit(OUT_OF_RANGE)))
    return df.withColumn("partition", chosen).repartitionById(max(counts.values()), f.col("partition"))


def _columns(df: Any, is_mixed: bool) -> list[str]:
    """Declarative pipelines do not let a DataFrame be looked at; there a key is expected, and a topic if there are
    several, and no partition."""
    try:
        found: list[str] = df.columns
        return found
    except Exception as error:
        if "ATTEMPT_ANALYSIS" in (condition_of(error) or ""):
            return ["key", "topic"] if is_mixed else ["key"]
        raise


def _count_by_topic(counts: Mapping[str, int], default: str) -> Any:
    """How many partitions a row's topic has. A topic that is not known is the writer's to refuse."""
    from pyspark.sql import functions as f

    sizes = f.create_map(*(f.lit(part) for item in counts.items() for part in item))
    return f.coalesce(f.element_at(sizes, f.col("topic")), f.lit(counts[default]))


def _hash_of_key(partitioner: str) -> Any:
    """A number for each key, null without one."""
    from pyspark.sql import functions as f

    return murmur2_udf()("key") if partitioner == MURMUR2 else f.expr(HASH_OF_KEY)


def murmur2_udf() -> Any:
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf

    # PySpark reads the kind of function from these, and warns where it is given in another way.
    _positive_murmur2.__annotations__ = dict.fromkeys(("keys", "return"), pa.Array)
    return arrow_udf(_positive_murmur2, LongType())  # type: ignore[call-overload]


def _positive_murmur2(keys: Any) -> Any:
    """What Kafka's partitioner divides by the number of partitions."""
    import numpy as np
    import pyarrow as pa

    from semel.protocol.partitioning import murmur2_column

    is_null = keys.is_null().to_numpy(zero_copy_only=False)
    return pa.array(murmur2_column(keys).astype(np.int64) & 0x7FFFFFFF, pa.int64(), mask=is_null)
