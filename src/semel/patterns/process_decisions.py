"""The mode of `semel.process` whose function returns rows and records: topics and tables in one decision.

    take      applies the function; the records go into a transaction of Kafka
    settle    everything is delivered (prepared); one database transaction writes the rows, the offsets and which
              transaction of Kafka belongs to them: its commit is the decision; EndTxn follows
    undo      what may be decided is settled as the database says, everything else is aborted

The next unit of work begins when EndTxn is confirmed. The next owner of the partitions of a dead instance settles
what it left first (`unit_decisions`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from semel import faults
from semel.client.consumer import Consumer
from semel.client.errors import AbortableError, CommitUncertainError, ConfigError, FencedError, KafkaError
from semel.client.producer import Producer
from semel.client.settings import ProducerSettings
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.process_external import log
from semel.patterns.process_modes import ABORT_TIMEOUT_MS
from semel.patterns.process_output import Emitter, Output, checked_rows
from semel.patterns.process_postgres import Applied, PostgresMode, WriteCounts
from semel.patterns.unit_decisions import SettledId, Settler, packed
from semel.sinks.claims import Claims
from semel.sinks.postgres.decisions import DECISIONS, Decision, DecisionsTable
from semel.sinks.postgres.errors import DatabaseCommitUncertainError, RowRefusedError
from semel.sinks.postgres.settings import Postgres, Statement, TableRow, effects_of
from semel.sinks.postgres.tables import Component

if TYPE_CHECKING:
    from psycopg import Connection


class PostgresAndTopics(PostgresMode):
    def __init__(
        self,
        consumer: Consumer,
        emitter: Emitter,
        settings: Postgres,
        application_id: str,
        instance: str | None,
        transactional_id: str,
        producer_settings: Callable[[str, bool], ProducerSettings],
    ) -> None:
        super().__init__(consumer, emitter, settings, application_id, instance)
        self._id = transactional_id
        self._comes_back = instance is not None
        self._decisions = DecisionsTable(self._schema, application_id, self.holder)
        self._settler = Settler(self._session, self._decisions, producer_settings)
        self._owned: SettledId | None = None
        self._is_open = False  # the producer has a transaction
        self._in_doubt = False  # it may be decided, and its end is not confirmed
        self._outputs: list[Output] = []

    @property
    def _producer(self) -> Producer:
        assert self._owned is not None
        return self._owned.producer

    # -- the life of a mode --------------------------------------------------------------------------------------------
    def start(self) -> None:
        super().start()
        self._own()

    def _own(self) -> None:
        """Settles what this id left, and gets a producer for what comes."""
        generation = None
        if self._owned is not None:
            generation = self._owned.generation
            self._producer.close(timeout_ms=0)
        self._owned = self._settler.own(self._id, generation)
        self._is_open = self._in_doubt = False

    def _components(self) -> list[Component]:
        return [*super()._components(), DECISIONS]

    def close(self) -> None:
        try:
            if self._owned is not None and not self._in_doubt:
                self._leave_nothing()
        finally:
            if self._owned is not None:
                self._producer.close(timeout_ms=ABORT_TIMEOUT_MS)
            super().close()

    def _leave_nothing(self) -> None:
        """An orderly end: nobody has to settle anything, and no copy is kept."""
        assert self._owned is not None
        try:
            if self._is_open:
                self._producer.abort_transaction(timeout_ms=ABORT_TIMEOUT_MS)
                self._is_open = False
            self._release(list(self._claims))
            self._settler.finish(self._id, self._owned.generation, remove=not self._comes_back)
        except KafkaError as error:
            log.warning("%s is left for the next owner of its partitions to settle: %s", self._id, error)

    # -- partitions ----------------------------------------------------------------------------------------------------
    def _take_partitions(self, partitions: list[TopicPartition]) -> Claims:
        """The id of the last owner is kept in the table until what it left is settled: this instance may die, too."""

        def take(connection: Connection[Any]) -> tuple[Claims, list[str]]:
            claims = self._table.claim(connection, partitions, self._topic_ids)
            return claims, self._decisions.open_ids(connection, partitions)

        def register(connection: Connection[Any]) -> Claims:
            self._table.hold(connection, claims)
            self._decisions.register(connection, partitions, self._id)
            return self._table.read(connection, partitions)

        claims, ids = self._session.run("taking over partitions", take)
        for left in ids:
            if left != self._id:
                self._settler.settle_for(left)
        return self._session.run("registering partitions", register)

    def released(self, partitions: list[TopicPartition]) -> None:
        mine = [partition for partition in partitions if partition in self._claims]
        super().released(partitions)
        if mine and not self._is_open and not self._in_doubt and self.failed is None:
            try:
                self._release(mine)
            except KafkaError as error:
                log.warning("the next owner of %s looks for what this one left: %s", mine, error)

    def _release(self, partitions: list[TopicPartition]) -> None:
        """Raises if another process has the name: what stands at the partitions is that one's."""
        assert self._owned is not None
        generation = self._owned.generation

        def work(connection: Connection[Any]) -> None:
            self._decisions.hold(connection, self._id, generation)
            self._decisions.release(connection, partitions, self._id)

        self._session.run("releasing partitions", work)

    # -- work ----------------------------------------------------------------------------------------------------------
    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        before = len(self._taken)
        super().take(batch, firsts)
        self._send([output for each in self._taken[before:] for output in each.outputs])

    def _made(self, record: ConsumerRecord, returned: Any, event_id: str | None) -> Applied:
        rows, outputs = split(returned)
        if any(output.topic is None for output in outputs):
            raise ConfigError("with_topics: the function returned an Output without a topic; name one")
        # What no producer takes is the record's error.
        kept = checked_rows(outputs, self._producer.settings.max_request_size)
        return Applied(record, effects_of(rows), None, event_id, tuple(kept))

    def _send(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        if not self._is_open:
            self._producer.begin_transaction()
            self._is_open = True
        self.emitter.send_outputs(self._producer, outputs)
        self._outputs += outputs

    def settle(self) -> None:
        if self.is_working and not self._is_open:  # rows alone
            super().settle()
        elif self.is_working:
            self._settle_both()

    def _settle_both(self) -> None:
        assert self._owned is not None
        offsets = self._ended()
        sent = len(self._outputs)
        try:
            self._decide(offsets)
        except RowRefusedError as refused:
            log.info("finding the records that the database refuses: %s", refused)
            self._without_refused()
            sent = len(self._outputs)
            if not self._is_open:
                super().settle()
                return
            self._decide(offsets)
        self.records_out += sent
        self._outputs = []
        if faults.armed:
            faults.hit("decision.made")
        self._end()
        if faults.armed:
            faults.hit("decision.ended")
        if self._producer.transaction_version == 1:
            # In TV1 the next transaction has the same epoch: nobody may end this one again.
            self._settler.finish(self._id, self._owned.generation)
        self._tell_group(offsets)

    def _decide(self, offsets: dict[TopicPartition, int]) -> None:
        decision = self._prepared()  # before the database transaction: its locks must not wait for a broker
        held = {partition: self._claims[partition] for partition in offsets}
        after = {partition: held[partition]._replace(next_offset=offset) for partition, offset in offsets.items()}
        self._in_doubt = True
        try:
            outcome = self._transaction(held, offsets, after, partial(self._write_and_decide, decision))
        except DatabaseCommitUncertainError:
            raise
        except KafkaError:
            self._in_doubt = False
            raise
        self._written(outcome, after)

    def _write_and_decide(self, decision: Decision, connection: Connection[Any]) -> WriteCounts:
        assert self._owned is not None
        self._decisions.hold(connection, self._id, self._owned.generation)
        self._decisions.decide(connection, self._id, decision)
        return self._write_all(connection)

    def _prepared(self) -> Decision:
        producer = self._producer
        copy = None if self._settler.two_phase else packed(self._outputs, int(time.time() * 1000))
        prepared = producer.prepare_transaction(may_time_out=True)
        if faults.armed:
            faults.hit("decision.prepared")
        return Decision(*prepared, producer.transaction_version, producer.written_offsets(), copy)

    def _end(self) -> None:
        """The unit of work is decided: whatever happens to EndTxn, it is brought to its end here, or by the next turn,
        or by the next owner of the partitions."""
        try:
            self._producer.commit_transaction()
            self._is_open = self._in_doubt = False
        except (FencedError, AbortableError, CommitUncertainError) as error:
            log.warning("%s: the end of a decided transaction was refused or is unknown: %s", self._id, error)
            self._own()

    # -- rows that the database refuses --------------------------------------------------------------------------------
    def _without_refused(self) -> None:
        """Finds them in a transaction that is rolled back, and begins the transaction of Kafka again without them."""
        try:
            self._session.run("finding refused rows", self._judge)
        except _JudgedError as judged:
            self._taken = judged.taken
        self._abort()
        self._outputs = []
        self._send([output for each in self._taken for output in each.outputs])

    def _judge(self, connection: Connection[Any]) -> None:
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        raise _JudgedError([self._judged(connection, each) for each in self._taken])

    # -- after an error ------------------------------------------------------------------------------------------------
    def drop(self) -> None:
        super().drop()
        self._outputs = []
        if self._in_doubt:
            self._own()
        elif self._is_open:
            self._abort()

    def _abort(self) -> None:
        """Nothing is decided: the transaction must not count."""
        try:
            self._producer.abort_transaction(timeout_ms=ABORT_TIMEOUT_MS)
            self._is_open = False
        except KafkaError as error:
            log.warning("the transaction could not be aborted in the ordinary way: %s", error)
            self._own()


class _JudgedError(Exception):
    def __init__(self, taken: list[Applied]) -> None:
        super().__init__("to be rolled back")
        self.taken = taken


_ROW_TYPES = (dict, TableRow, Statement)  # the most frequent ones, told apart without a call


def split(returned: Any) -> tuple[list[Any], list[Output]]:
    """What a function returned, as what is for tables and what is for topics."""
    if isinstance(returned, Output):
        return [], [returned]
    if returned is None or isinstance(returned, TableRow | Statement | Mapping | str | bytes):
        return [returned], []
    if not isinstance(returned, Iterable):
        return [returned], []  # which is refused as what it is
    rows: list[Any] = []
    outputs: list[Output] = []
    for part in returned:
        kind = type(part)
        if kind is Output:
            outputs.append(part)
        elif kind in _ROW_TYPES:
            rows.append(part)
        else:
            more_rows, more_outputs = split(part)
            rows += more_rows
            outputs += more_outputs
    return rows, outputs
