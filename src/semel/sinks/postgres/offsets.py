"""Offsets beside the data: for each partition the next one to apply, and the generation of the instance that may.

An instance that gets partitions raises their generations (`claim`). Each of its transactions locks their rows first
and compares (`hold`): what an instance sends that was replaced, perhaps while it was frozen, is rolled back, so two
never both apply a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from semel.client.errors import AbortableError, FatalError
from semel.client.types import TopicPartition
from semel.sinks.claims import NO_TOPIC_ID, Claim, Claims
from semel.sinks.postgres.errors import DatabaseFatalError, PostgresError
from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

OFFSETS = Component(
    "offsets",
    (
        """CREATE TABLE {schema}.offsets (
            application_id text,
            topic text,
            partition integer,
            next_offset bigint,
            topic_id uuid NOT NULL,
            generation bigint NOT NULL,
            holder text NOT NULL,
            updated_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (application_id, topic, partition)
        )""",
    ),
)


class OlderDatabaseError(PostgresError, FatalError):
    """The group's committed offsets, or the topic, and the database do not fit together: one of them was restored."""


class PartitionTakenError(PostgresError, AbortableError):
    """Another instance has this partition now; what this one did with it was rolled back."""


class OffsetsTable:
    """The rows of one application."""

    def __init__(self, schema: str, application_id: str, holder: str) -> None:
        self._schema = schema
        self._application_id = application_id
        self._holder = holder

    def claim(
        self, connection: Connection[Any], partitions: Iterable[TopicPartition], topic_ids: Mapping[str, UUID]
    ) -> Claims:
        """Makes this instance the owner. Waits for a transaction of the owner before. Raises if an offset is of another
        topic of that name: a topic that was created anew may have more records than the one before."""
        topics, numbers = columns_of(partitions)
        rows = connection.execute(
            filled(
                "INSERT INTO {schema}.offsets AS o (application_id, topic, partition, topic_id, generation, holder) "
                "SELECT %s, topic, partition, topic_id, 1, %s FROM unnest(%s::text[], %s::int[], %s::uuid[]) "
                "AS u (topic, partition, topic_id) ORDER BY topic, partition "
                "ON CONFLICT (application_id, topic, partition) DO UPDATE SET "
                "generation = o.generation + 1, holder = excluded.holder "
                "RETURNING topic, partition, topic_id, generation, next_offset",
                self._schema,
            ),
            [self._application_id, self._holder, topics, numbers, [topic_ids[topic] for topic in topics]],
        )
        claims = {}
        for topic, number, topic_id, *rest in rows:
            if topic_id != topic_ids[topic] and NO_TOPIC_ID not in (topic_id, topic_ids[topic]):
                raise OlderDatabaseError(
                    f"{self._schema}.offsets has {topic}-{number} at {rest[1]} of the topic with the id {topic_id}, "
                    f"but the topic's id is {topic_ids[topic]}: it was deleted and created anew. Correct the topic's "
                    f"name, or delete the rows of application {self._application_id!r} from {self._schema}.offsets "
                    "to apply the new topic from its beginning"
                )
            claims[TopicPartition(topic, number)] = Claim(*rest)
        return claims

    def read(self, connection: Connection[Any], partitions: Iterable[TopicPartition], *, lock: bool = False) -> Claims:
        """What the table says; with `lock`, the rows stay locked until the transaction ends."""
        return {place: Claim(*row[:2]) for place, row in self._rows(connection, partitions, lock).items()}

    def hold(self, connection: Connection[Any], claims: Mapping[TopicPartition, Claim]) -> None:
        """Locks the rows until the transaction ends; raises if they are not as this instance left them."""
        found = self._rows(connection, claims, True)
        for place, mine in claims.items():
            row = found.get(place)
            name = f"{place.topic}-{place.partition}"
            if row is None:
                raise DatabaseFatalError(
                    f"the offset of {name} is gone from {self._schema}.offsets (application {self._application_id!r}): "
                    "rows were deleted or the database was restored; start again"
                )
            generation, next_offset, holder = row
            if generation != mine.generation:
                raise PartitionTakenError(
                    f"partition {name} belongs to generation {generation} ({holder}) now, this instance has "
                    f"{mine.generation}: the group gave it to another instance; what was done here is rolled back"
                )
            if next_offset != mine.next_offset:
                raise DatabaseFatalError(
                    f"the offset of {name} in {self._schema}.offsets is {next_offset}, this instance left it at "
                    f"{mine.next_offset}: it was changed by hand or the database was restored; start again"
                )

    def advance(
        self, connection: Connection[Any], offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, UUID]
    ) -> None:
        topics, numbers = columns_of(offsets)
        connection.execute(
            filled(
                "UPDATE {schema}.offsets AS o SET next_offset = u.next_offset, topic_id = u.topic_id, "
                "updated_at = now() FROM unnest(%s::text[], %s::int[], %s::bigint[], %s::uuid[]) "
                "AS u (topic, partition, next_offset, topic_id) "
                "WHERE o.application_id = %s AND o.topic = u.topic AND o.partition = u.partition",
                self._schema,
            ),
            [
                topics,
                numbers,
                [offsets[place] for place in sorted(offsets)],
                [topic_ids[topic] for topic in topics],
                self._application_id,
            ],
        )

    def _rows(
        self, connection: Connection[Any], partitions: Iterable[TopicPartition], lock: bool
    ) -> dict[TopicPartition, tuple[int, int | None, str]]:
        topics, numbers = columns_of(partitions)
        rows = connection.execute(
            filled(
                "SELECT topic, partition, generation, next_offset, holder FROM {schema}.offsets WHERE "
                "application_id = %s AND (topic, partition) IN (SELECT * FROM unnest(%s::text[], %s::int[])) "
                "ORDER BY topic, partition" + (" FOR UPDATE" if lock else ""),
                self._schema,
            ),
            [self._application_id, topics, numbers],
        )
        return {TopicPartition(topic, number): (one, two, three) for topic, number, one, two, three in rows}


def columns_of(partitions: Iterable[TopicPartition]) -> tuple[list[str], list[int]]:
    """In one order for all, so that two instances cannot wait for each other."""
    ordered = sorted(partitions)
    return [place.topic for place in ordered], [place.partition for place in ordered]
