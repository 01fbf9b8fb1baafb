"""The sink: a function for foreachBatch that writes each micro-batch in one transaction.

    sink = semel.sink("localhost:9092", application_id="payments", topic="out")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The steps of a transaction are in `transaction`, the Spark job that writes the rows in `write_job`, the loop around them
in `transactional_sink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from semel.client.errors import ConnectionFailedError, TimedOutError
from semel.client.producer.handle import TransactionHandle
from semel.spark.base_sink import BaseSink, SinkError, refuse_connect
from semel.spark.checksums import hashed_columns
from semel.spark.ledger import MicroBatch
from semel.spark.plain_sink import PlainSink
from semel.spark.sink_options import EXACTLY_ONCE, SinkOptions
from semel.spark.transaction import BatchTransaction
from semel.spark.transactional_sink import TransactionalSink
from semel.spark.write_job import Job, WriteJob
from semel.spark.writing import Report


class Sink(TransactionalSink):
    """Writes to topics; the ledger is a topic."""

    transaction: BatchTransaction

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self.transaction = BatchTransaction(options)
        self.job: Job = WriteJob(self.transaction.owner.cluster)
        try:
            self.transaction.open()
        except (ConnectionFailedError, TimedOutError) as error:
            raise no_brokers(options, error) from error
        self.transaction.own_if_free()

    def _write(self, df: Any, batch: MicroBatch, handle: TransactionHandle) -> list[Report]:
        return self.job(df, self.options, self.transaction.targets, batch, handle)

    def _hashed_columns(self, df: Any) -> list[str]:
        return hashed_columns(df, self.options)


def no_brokers(options: SinkOptions, error: Exception) -> SinkError:
    return SinkError(
        f"the sink got no response from its brokers (bootstrap servers {options.bootstrap_servers!r}): {error}. Start "
        "them, or correct the addresses, and start the query again"
    )


def sink(
    brokers: str,
    *,
    application_id: str,
    topic: str | None = None,
    topics: Iterable[str] | str = (),
    dead_letter_topic: str | None = None,
    bad_column: str | None = None,
    partitioner: str = "murmur2",
    shuffle: str = "auto",
    guarantee: str = "exactly_once",
    transaction_timeout_ms: int = 600_000,
    max_attempts: int = 3,
    adopt_checkpoint: bool = False,
    accept_lost_state: bool = False,
    compression: str = "none",
    max_request_size: int = 1024 * 1024,
    source_cluster_is_other: bool = False,
    on_batch: Callable[[Any], None] | None = None,
    client: Mapping[str, Any] | None = None,
) -> BaseSink:
    """A function for `foreachBatch` that writes every micro-batch in one transaction.

    It reads the ledger when it is made: make it before the source is loaded, once for every start. In a function of
    your own call it once per batch: `sink(df, batch_id)`, or `sink([df_a, df_b], batch_id)` for several frames.

    brokers                 host:port,host:port
    application_id          names the transactional id, the consumer group that shows the lag, and the ledger topic
    topic                   where rows go that have no topic of their own
    topics                  further topics that a column `topic` may name
    dead_letter_topic       where rows go that cannot be written, in the same transaction; else they fail the batch
    bad_column              a column that marks bad rows: true, or a text that says why
    partitioner             murmur2 (where any Kafka producer would put the key), hash (Spark's own), none (no shuffle)
    shuffle                 auto (none where a topic is copied with its keys to as many partitions), always
    guarantee               exactly_once, at_least_once, at_most_once
    transaction_timeout_ms  must exceed the longest batch; the broker's transaction.max.timeout.ms is its limit
    max_attempts            how often a batch is tried before the query fails
    adopt_checkpoint        True: an existing checkpoint goes on although the ledger is empty; so does a new one
                            although the group has offsets that say that the ledger was lost
    accept_lost_state       True: a stateful query may go on with a new checkpoint, and so without its state; or with
                            state from a batch that gave other rows, when it ran again, than it had written
    compression             none, gzip, snappy, lz4, zstd
    max_request_size        the largest record, in bytes
    source_cluster_is_other True: the sources are topics of another cluster, so no offsets are stored here
    on_batch                called with a report after each batch: rows, attempts, times
    client                  further client options by Kafka's names: security.protocol, sasl.username, ...
    """
    refuse_connect()
    options = SinkOptions(
        bootstrap_servers=brokers,
        application_id=application_id,
        topic=topic,
        extra_topics=(topics,) if isinstance(topics, str) else tuple(topics),
        dead_letter_topic=dead_letter_topic,
        bad_column=bad_column,
        partitioner=partitioner,
        shuffle=shuffle,
        guarantee=guarantee,
        transaction_timeout_ms=transaction_timeout_ms,
        max_attempts=max_attempts,
        adopt_checkpoint=adopt_checkpoint,
        accept_lost_state=accept_lost_state,
        compression=compression,
        max_request_size=max_request_size,
        source_cluster_is_other=source_cluster_is_other,
        on_batch=on_batch,
        client=dict(client or {}),
    )
    return Sink(options) if options.guarantee == EXACTLY_ONCE else PlainSink(options)
