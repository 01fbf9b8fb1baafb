"""The mode of `semel.process` whose sink is a database and whose function takes and returns Arrow tables.

What the function returns for what was read at once is a piece. Where it raises, or the database refuses its rows, the
table that it was given is halved, and the function called again with each half, until a single record is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.consumer import Consumer
from semel.client.errors import KafkaError
from semel.client.types import TopicPartition
from semel.patterns.process_output import Emitter, first_record
from semel.patterns.process_postgres import PostgresMode, WriteCounts
from semel.sinks.claims import Claims
from semel.sinks.postgres.columns import TableForTable, TableWriter, tables_of
from semel.sinks.postgres.errors import RowRefusedError
from semel.sinks.postgres.rows import add as add_dead_letters
from semel.sinks.postgres.settings import Postgres

if TYPE_CHECKING:
    from psycopg import Connection


class Piece(NamedTuple):
    """A table of records, and what becomes of it. With a reason its record is a dead letter."""

    given: Any
    made: list[TableForTable]
    reason: str | None = None
    is_instead: bool = False  # what on_error made of a bad record


class PostgresTablesMode(PostgresMode):
    def __init__(
        self, consumer: Consumer, emitter: Emitter, settings: Postgres, application_id: str, instance: str | None
    ) -> None:
        super().__init__(consumer, emitter, settings, application_id, instance)
        self._tables = TableWriter(settings)
        self._pieces: list[Piece] = []

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        self._pieces += self._made_of(batch)

    def _made_of(self, table: Any) -> list[Piece]:
        try:
            return [Piece(table, tables_of(self.emitter.function(table), self._settings.table))]
        except KafkaError:
            raise
        except Exception as error:
            return self._smaller(table, error)

    def _smaller(self, table: Any, error: Exception) -> list[Piece]:
        """The halves of a bad table; of a bad record what `on_error` makes of it, else a dead letter, else the end."""
        if table.num_rows > 1:
            half = table.num_rows // 2
            return self._made_of(table.slice(0, half)) + self._made_of(table.slice(half))
        if self.emitter.on_error is not None:
            try:
                returned = self.emitter.on_error(table, error)
                return [Piece(table, tables_of(returned, self._settings.table), is_instead=True)]
            except KafkaError:
                raise
            except Exception as failure:
                error = failure
        return [self._aside(table, error)]

    def _aside(self, table: Any, error: Exception) -> Piece:
        return Piece(table, [], self._set_aside(first_record(table), error).reason)

    # -- in the transaction --------------------------------------------------------------------------------------------
    def _write_all(self, connection: Connection[Any]) -> WriteCounts:
        rows = self._tables.write(connection, (each for piece in self._pieces for each in piece.made))
        letters = [piece for piece in self._pieces if piece.reason is not None]
        return self._written_with(connection, rows, letters)

    def _write_each(self, connection: Connection[Any]) -> WriteCounts:
        letters: list[Piece] = []
        rows = sum(self._judged_rows(connection, piece, letters) for piece in self._pieces)
        return self._written_with(connection, rows, letters)

    def _judged_rows(self, connection: Connection[Any], piece: Piece, letters: list[Piece]) -> int:
        """Writes a piece, or what can be written of it; how many rows."""
        if piece.reason is not None:
            letters.append(piece)
            return 0
        try:
            with self._alone(connection):
                return self._tables.write(connection, piece.made)
        except RowRefusedError as refused:
            left = [self._aside(piece.given, refused)] if piece.is_instead else self._smaller(piece.given, refused)
        return sum(self._judged_rows(connection, each, letters) for each in left)

    def _written_with(self, connection: Connection[Any], rows: int, letters: list[Piece]) -> WriteCounts:
        if letters:
            found = [(first_record(piece.given), piece.reason or "") for piece in letters]
            add_dead_letters(connection, self._schema, self._application_id, found)
        return WriteCounts(rows, len(letters), 0)

    def _written(self, outcome: WriteCounts, after: Claims) -> None:
        super()._written(outcome, after)
        self._pieces = []

    def drop(self) -> None:
        super().drop()
        self._pieces = []
