"""Decisions: which transaction of Kafka a database transaction has decided to commit.

One row for each transactional id. The commit of the database transaction that writes it is the decision; EndTxn
follows, by any instance that is alive. `loop_partitions` names, for each partition, the transactional id that may have
something open about it: the next owner of the partition settles that id first.

A row has a generation, as every owner row: `claim` raises it, `hold` compares it. So an id that somebody settles cannot
be decided about by its former owner any more. A row that is removed takes its generation with it; a new one begins with
the time, hence with one that nobody had.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.errors import FatalError, KafkaError
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.client.settings import ProducerSettings
from semel.client.timing import Backoff, Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import ErrorCode, Recovery
from semel.sinks.postgres.errors import FencedInDatabaseError
from semel.sinks.postgres.offsets import PartitionTakenError, columns_of
from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

DECISIONS = Component(
    "decisions",
    (
        """CREATE TABLE {schema}.loop_decisions (
            application_id text,
            transactional_id text,
            generation bigint NOT NULL,
            is_owner boolean NOT NULL,
            holder text NOT NULL,
            state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'decided', 'finished')),
            sequence bigint NOT NULL DEFAULT 0,
            producer_id bigint,
            epoch integer,
            transaction_version integer,
            written jsonb,
            copy bytea,
            decided_at timestamptz,
            PRIMARY KEY (application_id, transactional_id)
        );
        CREATE TABLE {schema}.loop_partitions (
            application_id text,
            topic text,
            partition integer,
            transactional_id text NOT NULL,
            PRIMARY KEY (application_id, topic, partition)
        )""",
    ),
)

Written = dict[tuple[str, int], int]  # the first offset of a transaction in each partition that it wrote to


class Decision(NamedTuple):
    """A transaction that was decided: it must commit, or what it wrote must be written again, once."""

    producer_id: int
    epoch: int
    transaction_version: int  # 1 or 2: TV1 or TV2
    written: Written
    copy: bytes | None  # of the output, where the coordinator may abort the transaction at its timeout


def _decision(row: Sequence[Any]) -> tuple[int, Decision | None]:
    generation, state, producer_id, epoch, version, written, copy = row
    if state != "decided":
        return generation, None
    places = {(topic, partition): offset for topic, partition, offset in written}
    return generation, Decision(producer_id, epoch, version, places, None if copy is None else bytes(copy))


class DecisionsTable:
    """The rows of one application."""

    def __init__(self, schema: str, application_id: str, holder: str) -> None:
        self._schema = schema
        self._application_id = application_id
        self._holder = holder

    @property
    def name(self) -> str:
        return f"{self._schema}.loop_decisions"

    def claim(
        self, connection: Connection[Any], transactional_id: str, *, as_owner: bool
    ) -> tuple[int, Decision | None]:
        """Its next generation, and what is decided and not finished. Waits for a transaction of the owner before."""
        row = connection.execute(
            filled(
                "INSERT INTO {schema}.loop_decisions AS d (application_id, transactional_id, generation, is_owner, "
                "holder) VALUES (%s, %s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %s, %s) "
                "ON CONFLICT (application_id, transactional_id) "
                "DO UPDATE SET generation = d.generation + 1, is_owner = excluded.is_owner, holder = excluded.holder "
                "RETURNING generation, state, producer_id, epoch, transaction_version, written, copy",
                self._schema,
            ),
            [self._application_id, transactional_id, as_owner, self._holder],
        ).fetchone()
        assert row is not None
        return _decision(row)

    def read(self, connection: Connection[Any], transactional_id: str) -> tuple[int, Decision | None]:
        """Its generation, and what is decided and not finished; waits for a transaction that holds the row."""
        row = connection.execute(
            filled(
                "SELECT generation, state, producer_id, epoch, transaction_version, written, copy "
                "FROM {schema}.loop_decisions WHERE application_id = %s AND transactional_id = %s FOR UPDATE",
                self._schema,
            ),
            [self._application_id, transactional_id],
        ).fetchone()
        return (0, None) if row is None else _decision(row)

    def check_owner(self, connection: Connection[Any], transactional_id: str, generation: int) -> None:
        """Raises if another owner has the name. That somebody settled what was open is no reason to stop."""
        with contextlib.suppress(PartitionTakenError):
            self.hold(connection, transactional_id, generation)

    def hold(self, connection: Connection[Any], transactional_id: str, generation: int) -> None:
        """Locks the row until the transaction ends; raises if another generation has it."""
        row = connection.execute(
            filled(
                "SELECT generation, is_owner, holder FROM {schema}.loop_decisions "
                "WHERE application_id = %s AND transactional_id = %s FOR UPDATE",
                self._schema,
            ),
            [self._application_id, transactional_id],
        ).fetchone()
        if row is not None and row[0] == generation:
            return
        if row is None or not row[1]:
            raise PartitionTakenError(
                f"another instance has settled what {transactional_id!r} had open, to take over its partitions; what "
                "was done here is rolled back"
            )
        raise FencedInDatabaseError(
            f"{transactional_id!r} has generation {row[0]} now ({row[2]}), this instance {generation}: another one "
            "with the same name was started; stop one of the two"
        )

    def decide(self, connection: Connection[Any], transactional_id: str, decision: Decision) -> None:
        from psycopg.types.json import Jsonb

        connection.execute(
            filled(
                "UPDATE {schema}.loop_decisions SET state = 'decided', sequence = sequence + 1, producer_id = %s, "
                "epoch = %s, transaction_version = %s, written = %s, copy = %s, decided_at = now() "
                "WHERE application_id = %s AND transactional_id = %s",
                self._schema,
            ),
            [
                decision.producer_id,
                decision.epoch,
                decision.transaction_version,
                Jsonb([[*place, offset] for place, offset in decision.written.items()]),
                decision.copy,
                self._application_id,
                transactional_id,
            ],
        )

    def finish(self, connection: Connection[Any], transactional_id: str, *, remove: bool) -> None:
        """EndTxn is confirmed: the copy is not needed any more. A row whose owner will not come back is removed."""
        what = (
            "DELETE FROM {schema}.loop_decisions"
            if remove
            else "UPDATE {schema}.loop_decisions SET state = 'finished', copy = NULL, written = NULL"
        )
        connection.execute(
            filled(what + " WHERE application_id = %s AND transactional_id = %s", self._schema),
            [self._application_id, transactional_id],
        )

    # -- which id has something open about which partition -------------------------------------------------------------
    def open_ids(self, connection: Connection[Any], partitions: Iterable[TopicPartition]) -> list[str]:
        topics, numbers = columns_of(partitions)
        rows = connection.execute(
            filled(
                "SELECT DISTINCT transactional_id FROM {schema}.loop_partitions WHERE application_id = %s AND "
                "(topic, partition) IN (SELECT * FROM unnest(%s::text[], %s::int[])) ORDER BY 1",
                self._schema,
            ),
            [self._application_id, topics, numbers],
        )
        return [name for (name,) in rows]

    def register(
        self, connection: Connection[Any], partitions: Iterable[TopicPartition], transactional_id: str
    ) -> None:
        topics, numbers = columns_of(partitions)
        connection.execute(
            filled(
                "INSERT INTO {schema}.loop_partitions SELECT %s, topic, partition, %s "
                "FROM unnest(%s::text[], %s::int[]) AS u (topic, partition) ORDER BY topic, partition "
                "ON CONFLICT (application_id, topic, partition) "
                "DO UPDATE SET transactional_id = excluded.transactional_id",
                self._schema,
            ),
            [self._application_id, transactional_id, topics, numbers],
        )

    def release(self, connection: Connection[Any], partitions: Iterable[TopicPartition], transactional_id: str) -> None:
        """Nothing about them is open: the next owner has nothing to settle."""
        topics, numbers = columns_of(partitions)
        connection.execute(
            filled(
                "DELETE FROM {schema}.loop_partitions WHERE application_id = %s AND transactional_id = %s AND "
                "(topic, partition) IN (SELECT * FROM unnest(%s::text[], %s::int[]))",
                self._schema,
            ),
            [self._application_id, transactional_id, topics, numbers],
        )


# --- the end of a transaction of Kafka that a database has decided to commit, as often as needed ---
#
# Whether it is committed is read from the log, from the first marker of its producer behind what it wrote: so EndTxn
# may be sent again, by another process, and never hits a later transaction.


END_TIMEOUT_S = 60.0  # for the end of a decided transaction, before its caller tries again or gives up
# How a broker refuses two-phase commit, beside not knowing the request at all.
NO_TWO_PHASE = (ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ErrorCode.UNSUPPORTED_VERSION)


class DecisionLostError(FatalError):
    """A transaction that the database decided to commit was aborted, and there is no copy of its output."""


def lost(transactional_id: str, decision: Decision, table: str) -> DecisionLostError:
    topics = ", ".join(sorted({topic for topic, _ in decision.written}))
    return DecisionLostError(
        f"the database has decided to commit the transaction {decision.producer_id}:{decision.epoch} of "
        f"{transactional_id!r}, but it was aborted, by force: the rows are in the database, the records of {topics} "
        "are not in the topics. Write them again from the rows if they are needed, then set state = 'finished' in "
        f"{table}"
    )


def end_decided(
    settings: ProducerSettings,
    decision: Decision,
    *,
    may_be_open: bool = True,
    may_commit: Callable[[TransactionOwner], bool] = lambda owner: True,
) -> bool:
    """Whether it is committed in the end: by an earlier EndTxn, or by this one. False: the coordinator aborted it, or
    it is open and `may_commit` says that it must not be committed."""
    deadline, pauses = Deadline(END_TIMEOUT_S), Backoff(20, 1_000)
    handle = TransactionHandle(settings, decision.producer_id, decision.epoch, decision.transaction_version)
    with TransactionOwner(settings) as owner:
        while True:
            owner.resume(handle)
            found = owner.how_it_ended(decision.written, deadline.remaining_s())
            if found is not None:
                return found
            refusal: KafkaError | None = None
            if may_be_open:
                if not may_commit(owner):
                    return False
                try:
                    owner.end(commit=True, timeout_s=deadline.remaining_s())
                    return True
                except KafkaError as error:
                    if error.recovery is Recovery.FATAL and error.code is not ErrorCode.INVALID_TXN_STATE:
                        raise
                    refusal = error
            if deadline.expired:
                raise FatalError(
                    f"the transaction {decision.producer_id}:{decision.epoch} of {settings.transactional_id!r} is "
                    f"decided, but neither can it be ended ({refusal}) nor do the logs say how it ended; see "
                    "docs/postgres.md: transactions that nobody finishes"
                )
            time.sleep(pauses.next_s())
