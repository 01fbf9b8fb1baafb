"""The options of `semel.postgres_sink`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semel.sinks.postgres.database import Database
from semel.sinks.postgres.moving import DELETE, INSERT, MODES, UPSERT
from semel.spark.ledger import MicroBatch
from semel.spark.options import OptionError
from semel.spark.sink_options import (
    MURMUR2,
    Precautions,
    SinkOptions,
    check_application_id,
    check_kinds,
    choice,
    topic_names,
)

STOP, DEAD_LETTER = "stop", "dead_letter"


class SinkTopics:
    """Topics that a `semel.postgres_sink` writes to as well, with one decision about rows and records.

    brokers                 host:port,host:port
    records                 a function of the batch's DataFrame that returns what goes to topics: a DataFrame with the
                            columns of `semel.sink`: value, and key, headers, topic, partition, timestamp where wanted
    rows                    the same for the table; by default the DataFrame itself
    topic                   where records go that have no topic of their own
    topics                  further topics that a column `topic` may name
    dead_letter_topic, bad_column, partitioner, compression, max_request_size, source_cluster_is_other, client
                            as for `semel.sink`
    transaction_timeout_ms  must exceed the longest batch
    """

    def __init__(
        self,
        brokers: str,
        *,
        records: Callable[[Any], Any],
        rows: Callable[[Any], Any] = lambda df: df,
        topic: str | None = None,
        topics: Iterable[str] | str = (),
        dead_letter_topic: str | None = None,
        bad_column: str | None = None,
        partitioner: str = MURMUR2,
        transaction_timeout_ms: int = 600_000,
        compression: str = "none",
        max_request_size: int = 1024 * 1024,
        source_cluster_is_other: bool = False,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(records) or not callable(rows):
            raise OptionError("records and rows are functions of the batch's DataFrame, such as lambda df: df.select()")
        self.brokers, self.records, self.rows = brokers, records, rows
        self.topic, self.topics = topic, topic_names(topics)
        self.dead_letter_topic, self.bad_column, self.partitioner = dead_letter_topic, bad_column, partitioner
        self.transaction_timeout_ms, self.compression = transaction_timeout_ms, compression
        self.max_request_size, self.source_cluster_is_other = max_request_size, source_cluster_is_other
        self.client = dict(client or {})


@dataclass(frozen=True)
class PostgresOptions:
    """See `semel.postgres_sink` for what they mean."""

    database: Database
    application_id: str
    table: str
    mode: str = INSERT
    key: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    operation_column: str | None = None
    on_error: str = STOP
    max_tasks: int | None = None
    max_attempts: int = 3
    retry_timeout_ms: int = 60_000
    adopt_checkpoint: bool = False
    accept_lost_state: bool = False
    on_batch: Callable[[Any], None] | None = None
    precautions: Precautions = field(default_factory=Precautions)
    topics: SinkTopics | None = None

    def __post_init__(self) -> None:
        if self.topics is not None and not isinstance(self.topics, SinkTopics):
            raise OptionError(
                f"topics is {self.topics!r}; expected a semel.SinkTopics(brokers, records=..., topic=...)"
            )
        check_kinds(self)
        check_application_id(self.application_id)
        choice("mode", self.mode, MODES)
        choice("on_error", self.on_error, (STOP, DEAD_LETTER))
        if self.max_attempts < 1:
            raise OptionError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.max_tasks is not None and self.max_tasks < 1:
            raise OptionError(f"max_tasks is {self.max_tasks}; it must be at least 1")
        self._check_mode()
        if self.topics is not None and self.sets_aside:
            raise OptionError(
                f"on_error={DEAD_LETTER!r} and topics do not go together: the records of a row that the database "
                "refuses would be in the topics. Keep such rows out of the batch in the query, or write rows and "
                "records with two sinks"
            )

    def _check_mode(self) -> None:
        if self.mode == INSERT and self.key:
            raise OptionError(f"mode={INSERT!r} has no key; use mode={UPSERT!r}, or leave key out")
        if self.mode != UPSERT and (self.order_by or self.operation_column):
            raise OptionError(f"order_by and operation_column belong to mode={UPSERT!r}, the mode is {self.mode!r}")
        if self.mode == DELETE and not self.key:
            raise OptionError(f"mode={DELETE!r} needs key=[...]: the columns by which rows are deleted")
        if self.operation_column is not None and not self.order_by:
            raise OptionError(
                "operation_column needs order_by=[...]: a batch may hold several changes of one key, and only a column "
                "(an offset, a version, a time) says which is the last"
            )

    @property
    def owner(self) -> str:
        """The name of the owner row."""
        return f"spark:{self.application_id}"

    @property
    def schema(self) -> str:
        return self.database.schema

    @property
    def sets_aside(self) -> bool:
        return self.on_error == DEAD_LETTER

    def aside(self) -> set[str]:
        """Columns of the rows that the table need not have."""
        return {*self.order_by, *([self.operation_column] if self.operation_column else [])}

    @property
    def transaction_timeout_ms(self) -> float:
        """A database ends no transaction because of its length."""
        return math.inf if self.topics is None else self.topics.transaction_timeout_ms

    def refuse_loop(self, batch: MicroBatch) -> str | None:
        """Nothing that goes to a table is read by a topic's source."""
        return None if self.topics is None else self.kafka.refuse_loop(batch)

    @property
    def kafka(self) -> SinkOptions:
        """The options of the half that goes to topics."""
        topics = self.topics
        assert topics is not None
        return SinkOptions(
            bootstrap_servers=topics.brokers,
            application_id=self.application_id,
            topic=topics.topic,
            extra_topics=topics.topics,
            dead_letter_topic=topics.dead_letter_topic,
            bad_column=topics.bad_column,
            partitioner=topics.partitioner,
            transaction_timeout_ms=topics.transaction_timeout_ms,
            max_attempts=self.max_attempts,
            compression=topics.compression,
            max_request_size=topics.max_request_size,
            source_cluster_is_other=topics.source_cluster_is_other,
            client=topics.client,
            precautions=self.precautions,
        )
