"""Settles what a transactional id has open, as the database decided: by its owner at the start and after an error, and
by the next owner of the partitions of an instance that is gone.

The order is what makes it safe. First the id's row is claimed: from then on nobody else can decide about its open
transaction. Then the row is read: `decided` means that the transaction must commit. Only then InitProducerId may be
sent, which aborts what is open, unless the broker keeps it (two-phase commit).

    decided, and the broker kept it   EndTxn(commit)
    decided, markers say committed    nothing is left to do
    decided, no markers               EndTxn(commit) with the stored producer id and epoch; if refused, look again
    decided, markers say aborted      the copy is written in a new transaction, decided and ended as the first
    not decided                       abort
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from semel import faults
from semel.client.errors import FencedError, KafkaError, UnsupportedByBrokerError
from semel.client.producer import PreparedTransaction, Producer
from semel.client.settings import ProducerSettings
from semel.patterns.process_output import Output
from semel.sinks.postgres.decisions import NO_TWO_PHASE, Decision, DecisionsTable, end_decided, lost
from semel.sinks.postgres.offsets import PartitionTakenError
from semel.sinks.postgres.session import DatabaseSession

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
