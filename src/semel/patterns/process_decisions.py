"""The mode of `semel.process` whose function returns rows and records: topics and tables in one decision.

    take      applies the function; the records go into a transaction of Kafka
    settle    everything is delivered (prepared); one database transaction writes the rows, the offsets and which
              transaction of Kafka belongs to them: its commit is the decision; EndTxn follows
    undo      what may be decided is settled as the database says, everything else is aborted

The next unit of work begins when EndTxn is confirmed. The next owner of the partitions of a dead instance settles
what it left first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from semel import faults
from semel.client.consumer import Consumer
from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    ConfigError,
    FencedError,
    KafkaError,
    UnsupportedByBrokerError,
)
from semel.client.producer import PreparedTransaction, Producer
from semel.client.settings import ProducerSettings
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.process_modes import ABORT_TIMEOUT_MS
from semel.patterns.process_output import Emitter, Output, checked_rows
from semel.patterns.process_postgres import Applied, PostgresMode, WriteCounts
from semel.sinks.claims import Claims
from semel.sinks.postgres.decisions import DECISIONS, NO_TWO_PHASE, Decision, DecisionsTable, end_decided, lost
from semel.sinks.postgres.errors import DatabaseCommitUncertainError, RowRefusedError
from semel.sinks.postgres.offsets import PartitionTakenError
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.settings import Postgres, Statement, TableRow, effects_of
from semel.sinks.postgres.tables import Component

if TYPE_CHECKING:
    from psycopg import Connection

# Settles what a transactional id has open, as the database decided: by its owner at the start and after an error, and
# by the next owner of the partitions of an instance that is gone.
#
# The order is what makes it safe. First the id's row is claimed: from then on nobody else can decide about its open
# transaction. Then the row is read: `decided` means that the transaction must commit. Only then InitProducerId may be
# sent, which aborts what is open, unless the broker keeps it (two-phase commit).
#
#     decided, and the broker kept it   EndTxn(commit)
#     decided, markers say committed    nothing is left to do
#     decided, no markers               EndTxn(commit) with the stored producer id and epoch; if refused, look again
#     decided, markers say aborted      the copy is written in a new transaction, decided and ended as the first
#     not decided                       abort


log = logging.getLogger("semel.process")


class SettledId(NamedTuple):
    producer: Producer  # ready for its next transaction
    generation: int  # of its row


class Settler:
    """Settles ids of one application. `settings(transactional_id, two_phase)` are those of their producers."""

    def __init__(
        self, session: DatabaseSession, table: DecisionsTable, settings: Callable[[str, bool], ProducerSettings]
    ) -> None:
        self._session = session
        self._table = table
        self._settings = settings
        self.two_phase: bool | None = None  # whether the broker serves it; None: not known yet

    # -- the two who call ----------------------------------------------------------------------------------------------
    def own(self, transactional_id: str, generation: int | None) -> SettledId:
        """For the owner: settles what it, or an earlier process of the same name, left. With the generation that it
        has only if nobody else owns the name now."""

        def work(connection: Any) -> tuple[int, Decision | None]:
            if generation is not None:
                self._table.check_owner(connection, transactional_id, generation)
            return self._table.claim(connection, transactional_id, as_owner=True)

        claimed, decision = self._session.run(f"taking over {transactional_id!r}", work)
        return SettledId(self._settled(transactional_id, claimed, decision, remove=False), claimed)

    def settle_for(self, transactional_id: str) -> None:
        """For an instance that took over partitions: settles what their last owner left."""
        try:
            self._settle_for(transactional_id)
        except FencedError as error:  # of the id's new producer: this instance itself is not fenced
            raise PartitionTakenError(f"{transactional_id!r} is settled by another instance, too: {error}") from error

    def _settle_for(self, transactional_id: str) -> None:
        claimed, decision = self._session.run(
            f"settling {transactional_id!r}",
            lambda connection: self._table.claim(connection, transactional_id, as_owner=False),
        )
        log.warning(
            "%s left its partitions with %s",
            transactional_id,
            "a decided unit of work" if decision else "nothing decided",
        )
        self._settled(transactional_id, claimed, decision, remove=True).close(timeout_ms=0)

    def _settled(self, transactional_id: str, generation: int, decision: Decision | None, *, remove: bool) -> Producer:
        producer, is_committed = self._ended(transactional_id, generation, decision)
        try:
            if decision is not None and not is_committed:
                self._write_copy(producer, transactional_id, generation, decision)
            if decision is not None or remove:
                self.finish(transactional_id, generation, remove=remove)
        except BaseException:
            producer.close(timeout_ms=0)
            raise
        return producer

    def finish(self, transactional_id: str, generation: int, *, remove: bool = False) -> None:
        def work(connection: Any) -> None:
            self._table.hold(connection, transactional_id, generation)
            self._table.finish(connection, transactional_id, remove=remove)

        self._session.run(f"finishing {transactional_id!r}", work)

    # -- ending --------------------------------------------------------------------------------------------------------
    def _ended(self, transactional_id: str, generation: int, decision: Decision | None) -> tuple[Producer, bool]:
        """A producer that owns the id, and whether what was decided is committed."""
        if self.two_phase is not False:
            try:
                return self._ended_as_kept(transactional_id, generation, decision)
            except UnsupportedByBrokerError:
                self.two_phase = False
            except KafkaError as error:
                if error.code not in NO_TWO_PHASE:
                    raise
                self.two_phase = False
        settings = self._settings(transactional_id, False)
        is_committed = decision is not None and end_decided(settings, decision)
        producer = Producer(settings)
        try:
            producer.init_transactions()
        except BaseException:
            producer.close(timeout_ms=0)
            raise
        return producer, is_committed

    def _ended_as_kept(
        self, transactional_id: str, generation: int, decision: Decision | None
    ) -> tuple[Producer, bool]:
        settings = self._settings(transactional_id, False)
        producer = Producer(self._settings(transactional_id, True))
        try:
            kept = producer.init_transactions(keep_prepared=True)
            self.two_phase = True
            if kept is not None:
                # Another instance that claimed the row since it was read here may have decided about what is open.
                self._session.run(
                    f"settling {transactional_id!r}",
                    lambda connection: self._table.hold(connection, transactional_id, generation),
                )
            wanted = None if decision is None else PreparedTransaction(decision.producer_id, decision.epoch)
            if kept is not None and producer.complete_transaction(wanted):
                return producer, True
            # Not kept: it was ended before. By whom, the markers say.
            return producer, decision is not None and end_decided(settings, decision, may_be_open=False)
        except BaseException:
            producer.close(timeout_ms=0)
            raise

    # -- the copy ------------------------------------------------------------------------------------------------------
    def _write_copy(self, producer: Producer, transactional_id: str, generation: int, decision: Decision) -> None:
        """The output again, in a new transaction, which takes the place of the one that was aborted."""
        if decision.copy is None:
            raise lost(transactional_id, decision, self._table.name)
        log.warning("%s: the coordinator aborted a decided transaction; writing its output again", transactional_id)
        producer.begin_transaction()
        for topic, partition, key, value, timestamp, headers in unpacked(decision.copy):
            producer.send(topic, value, key, partition, timestamp, headers or None)
        prepared = producer.prepare_transaction(may_time_out=True)
        if faults.armed:
            faults.hit("decision.copy_written")
        again = decision._replace(
            producer_id=prepared.producer_id,
            epoch=prepared.epoch,
            transaction_version=producer.transaction_version,
            written=producer.written_offsets(),
        )

        def work(connection: Any) -> None:
            self._table.hold(connection, transactional_id, generation)
            self._table.decide(connection, transactional_id, again)

        def was_committed(connection: Any) -> bool:
            _, now = self._table.read(connection, transactional_id)
            return now == again

        self._session.run("deciding about the copy", work, was_committed=was_committed)
        if faults.armed:
            faults.hit("decision.copy_decided")
        try:
            producer.commit_transaction()
        except FencedError:
            raise  # somebody else settles it now
        except KafkaError as error:  # aborted once more, or unknown: the next owner looks again
            raise type(error)(f"the copy of a decided transaction is not committed yet: {error}", error.code) from error


# -- a copy of the output ----------------------------------------------------------------------------------------------
CopiedRecord = tuple[str, int | None, bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]
_decode_copy = msgspec.msgpack.Decoder(list[CopiedRecord]).decode


def packed(outputs: list[Output], now_ms: int) -> bytes:
    """Outputs, each with its topic, so that they can be written again."""
    return msgspec.msgpack.encode([_copied(output, now_ms) for output in outputs])


def _copied(output: Output, now_ms: int) -> CopiedRecord:
    value, key, topic, partition, timestamp, headers = output
    assert topic is not None
    at = now_ms if timestamp is None else timestamp if isinstance(timestamp, int) else int(timestamp.timestamp() * 1000)
    return topic, partition, _bytes(key), _bytes(value), at, [(name, _bytes(data)) for name, data in headers or ()]


def _bytes(data: bytes | str | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def unpacked(copy: bytes) -> list[CopiedRecord]:
    return _decode_copy(copy)


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

    def end_calls(self) -> None:
        if self._owned is not None:
            self._producer.close(timeout_ms=0)

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

    def abandon(self) -> None:
        """What is open `close` aborts, or leaves to the next owner: that needs no other producer."""
        if self._in_doubt:
            self._own()

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
