"""What a database has decided about the transaction of Kafka of a micro-batch: one row for each application, and a copy
of the batch's records as long as its end is not confirmed.

The owner row of the application is the lock: whoever reads or writes here holds it (`owners.hold`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.producer.batches import Identity, Place
from semel.sinks.postgres.decisions import Decision
from semel.sinks.postgres.moving import compare_counts
from semel.sinks.postgres.staging import Staged, drop
from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

DECIDED_BATCHES = Component(
    "spark_decisions",
    (
        """CREATE TABLE {schema}.spark_decisions (
            application_id text PRIMARY KEY,
            sequence bigint NOT NULL,
            state text NOT NULL CHECK (state IN ('decided', 'finished')),
            producer_id bigint NOT NULL,
            epoch integer NOT NULL,
            transaction_version integer NOT NULL,
            written jsonb NOT NULL,
            has_copy boolean NOT NULL,
            decided_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE TABLE {schema}.spark_copies (
            application_id text NOT NULL,
            topic text NOT NULL,
            partition integer NOT NULL,
            number integer NOT NULL,
            records integer NOT NULL,
            data bytea NOT NULL,
            PRIMARY KEY (application_id, topic, partition, number)
        );
        ALTER TABLE {schema}.spark_copies ALTER COLUMN data SET STORAGE EXTERNAL""",
    ),
)
FETCHED_AT_ONCE = 8  # record batches of about a megabyte


class WrittenPlace(NamedTuple):
    """What a transaction wrote into a partition."""

    first_offset: int
    last_sequence: int


class DecidedBatch(NamedTuple):
    """A transaction that must commit, or whose records must be written again, once."""

    sequence: int  # of its entry in the ledgers
    identity: Identity
    transaction_version: int  # 1 or 2: TV1 or TV2
    written: dict[Place, WrittenPlace]
    has_copy: bool

    @property
    def decision(self) -> Decision:
        offsets = {place: wrote.first_offset for place, wrote in self.written.items()}
        return Decision(*self.identity, self.transaction_version, offsets, None)


def read_decided(connection: Connection[Any], schema: str, application_id: str) -> DecidedBatch | None:
    """What is decided and not finished."""
    row = connection.execute(
        filled(
            "SELECT sequence, producer_id, epoch, transaction_version, written, has_copy FROM {schema}.spark_decisions "
            "WHERE application_id = %s AND state = 'decided'",
            schema,
        ),
        [application_id],
    ).fetchone()
    if row is None:
        return None
    sequence, producer_id, epoch, version, written, has_copy = row
    places = {(topic, partition): WrittenPlace(*wrote) for topic, partition, *wrote in written}
    return DecidedBatch(sequence, Identity(producer_id, epoch), version, places, has_copy)


def write_decided(connection: Connection[Any], schema: str, application_id: str, batch: DecidedBatch) -> None:
    """From the commit of the caller's transaction on, it is decided."""
    from psycopg.types.json import Jsonb

    connection.execute(
        filled(
            "INSERT INTO {schema}.spark_decisions VALUES (%s, %s, 'decided', %s, %s, %s, %s, %s) "
            "ON CONFLICT (application_id) DO UPDATE SET sequence = excluded.sequence, state = 'decided', "
            "producer_id = excluded.producer_id, epoch = excluded.epoch, written = excluded.written, "
            "transaction_version = excluded.transaction_version, has_copy = excluded.has_copy, decided_at = now()",
            schema,
        ),
        [
            application_id,
            batch.sequence,
            *batch.identity,
            batch.transaction_version,
            Jsonb([[*place, *wrote] for place, wrote in batch.written.items()]),
            batch.has_copy,
        ],
    )


def finish(connection: Connection[Any], schema: str, application_id: str) -> None:
    """Its end is confirmed: the copy is not needed any more."""
    for statement in (
        "UPDATE {schema}.spark_decisions SET state = 'finished', written = '[]' WHERE application_id = %s",
        "DELETE FROM {schema}.spark_copies WHERE application_id = %s",
    ):
        connection.execute(filled(statement, schema), [application_id])


# --- copies ---
def keep_copies(
    connection: Connection[Any], schema: str, application_id: str, staged: Sequence[Staged], places: Sequence[Place]
) -> None:
    """Moves what tasks have staged, in the transaction that decides. `places` are the partitions by their numbers."""
    from psycopg.sql import Identifier

    if not staged:
        return
    compare_counts(connection, schema, staged)
    topics, partitions = [topic for topic, _ in places], [partition for _, partition in places]
    for one in staged:
        connection.execute(
            filled(
                "INSERT INTO {schema}.spark_copies SELECT %s, p.topic, p.partition, s.number, s.records, s.data "
                "FROM {schema}.{table} s JOIN unnest(%s::text[], %s::int[]) WITH ORDINALITY "
                "AS p (topic, partition, place) ON p.place = s.target + 1",
                schema,
                table=Identifier(one.table),
            ),
            [application_id, topics, partitions],
        )
    drop(connection, schema, [one.table for one in staged])


def copies(connection: Connection[Any], schema: str, application_id: str) -> Iterator[tuple[str, int, int, bytes]]:
    """(topic, partition, records, record batch) of all that was kept, a few in memory at a time. Inside of a database
    transaction."""
    with connection.cursor(name="semel_copies") as cursor:
        cursor.itersize = FETCHED_AT_ONCE
        yield from cursor.execute(
            filled(
                "SELECT topic, partition, records, data FROM {schema}.spark_copies WHERE application_id = %s "
                "ORDER BY topic, partition, number",
                schema,
            ),
            [application_id],
        )
