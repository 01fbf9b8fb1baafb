"""What PostgreSQL can refuse, sorted once by what the caller can do about it.

    DatabaseUnavailableError        the connection is lost or cannot be made: the same transaction may work later
    DatabaseConflictError           rolled back because of others (serialization, deadlock, lock timeout): run it again
    RowRefusedError                 a row breaks a constraint or does not fit its column: nothing was written
    DatabaseFatalError              table, rights, settings or disk must change first
    FencedInDatabaseError           another instance has taken over: this one must stop
    DatabaseCommitUncertainError    COMMIT was sent, and its outcome could not be read within the timeout

They are `KafkaError`s with a `recovery`, so that a loop that handles the one kind handles the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FatalError,
    FencedError,
    KafkaError,
    RetriableError,
)

T = TypeVar("T")


class PostgresError(KafkaError):
    """Base of what is raised about a database. `sqlstate` is PostgreSQL's code, None where the server sent none."""

    sqlstate: str | None = None
    table: str | None = None
    column: str | None = None
    constraint: str | None = None


class DatabaseUnavailableError(PostgresError, RetriableError):
    """The server cannot be reached, starts or stops, or the connection broke; the transaction is rolled back."""


class DatabaseConflictError(PostgresError, AbortableError):
    """The transaction was rolled back because of another one; run it again."""


class RowRefusedError(PostgresError, FatalError, ValueError):
    """A row violates a constraint or does not fit its column; the transaction is rolled back."""


class DatabaseFatalError(PostgresError, FatalError):
    """Retrying does not help: the table, rights, settings or the disk must change first."""


class FencedInDatabaseError(PostgresError, FencedError):
    """A newer generation owns this name in the database; this instance must stop."""


class DatabaseCommitUncertainError(PostgresError, CommitUncertainError):
    """COMMIT was sent, and the database did not return its outcome within the timeout."""


# The longest prefix of the SQLSTATE counts. No code at all: libpq lost the connection, or never had one.
_KINDS: dict[str, type[PostgresError]] = {
    "": DatabaseFatalError,
    "08": DatabaseUnavailableError,  # connection exceptions
    "53": DatabaseUnavailableError,  # too many connections, out of memory
    "53100": DatabaseFatalError,  # disk full: nobody frees it by waiting
    "57P": DatabaseUnavailableError,  # shutdown, crash of another backend, starting up
    "57P04": DatabaseFatalError,  # the database was dropped
    "40": DatabaseConflictError,  # serialization failure, deadlock
    "55P03": DatabaseConflictError,  # lock timeout
    "25006": DatabaseUnavailableError,  # a standby, or a primary on its way to be one
    "57014": DatabaseConflictError,  # statement timeout, cancelled
    "25P03": DatabaseConflictError,  # idle in transaction timeout
    "25P04": DatabaseConflictError,  # transaction timeout
    "21": RowRefusedError,  # a query that should give one row gives several
    "22": RowRefusedError,  # data exceptions
    "42804": RowRefusedError,  # what psycopg makes of a value (true, [1]) is of another type than its column
    "42883": RowRefusedError,  # there is no such operator for the types of the values
    "23": RowRefusedError,  # constraints
    "44": RowRefusedError,  # WITH CHECK OPTION of a view
    "54": RowRefusedError,  # limits: a text that is too long for its index, JSON that is nested too deep
    "P0": RowRefusedError,  # what triggers and functions raise
}

_REMEDIES: dict[str, str] = {
    "": "correct the cause, then start again",
    "08": "check that the server runs and the address is right",
    "22": "correct the row or the column's type",
    "23": "correct the row or the constraint, or have such records set aside as dead letters",
    "25006": "the server is a standby, or set to read-only; it is tried again. Several hosts in the DSN with "
    "target_session_attrs=read-write find the primary",
    "25P03": "this process did nothing for too long inside a transaction (frozen, or in a slow on_error); it is run "
    "again, or raise lock_timeout_ms",
    "28": "check user, password and the server's pg_hba.conf",
    "3D000": "create the database, or correct its name in the DSN",
    "40": "the transaction is run again",
    "42501": "grant this user the right (GRANT), or let a user who has it create semel's tables first",
    "42601": "correct the SQL. A Statement holds one command: return several Statements for several",
    "42703": "the table has no such column: correct the output, or add the column",
    "42804": "the value does not fit the column's type: correct the output, or change the column",
    "42P01": "create the table, or correct its name (schema.table; names are case-sensitive)",
    "42P10": "an upsert needs a primary key or a unique constraint on exactly the key columns: create it",
    "53": "it is tried again; raise max_connections, or run fewer instances",
    "53100": "free space on the server's disk, then start again; nothing of the transaction was kept",
    "54": "the row exceeds a limit of PostgreSQL: shorten it, or change the index or type",
    "55P03": "another session holds a lock on the table (see pg_locks); it is tried again, or raise lock_timeout_ms",
    "57014": "the statement was cancelled or exceeded statement_timeout; it is tried again",
    "57P": "the server stops or restarts; it is tried again",
    "P0": "a trigger or function of the database raised it: correct the row, or the function",
}


# libpq passes no SQLSTATE on when a connection is refused, only the server's English words, if it speaks English.
_REFUSALS = {
    "authentication failed": "28P01",
    "no password supplied": "28P01",
    "no pg_hba.conf entry": "28000",
    "is not permitted to log in": "28000",
    "too many connections": "53300",  # for a role or a database, whatever its name is
    'role "': "28000",  # does not exist
    "permission denied for database": "42501",
    "does not exist": "3D000",
    "too many": "53300",
    "starting up": "57P03",
    "shutting down": "57P03",
}


def kind_of(sqlstate: str | None) -> type[PostgresError]:
    """The class for a SQLSTATE; None: the connection."""
    return _longest(_KINDS, "08000" if sqlstate is None else sqlstate)


def remedy_of(sqlstate: str | None) -> str:
    return _longest(_REMEDIES, "08000" if sqlstate is None else sqlstate)


def _longest(table: dict[str, T], sqlstate: str) -> T:
    return next(table[sqlstate[:length]] for length in range(5, -1, -1) if sqlstate[:length] in table)


def sorted_error(what: str, error: Any, hide: Callable[[str], str] = str) -> PostgresError:
    """The error to raise for one of psycopg's; `what` says what was being done, `hide` takes passwords out."""
    from psycopg import DataError, OperationalError, ProgrammingError

    sqlstate = error.sqlstate
    if sqlstate is None and isinstance(error, OperationalError):
        sqlstate = next((code for words, code in _REFUSALS.items() if words in str(error)), None)
    if sqlstate is not None:
        kind = kind_of(sqlstate)
    elif isinstance(error, OperationalError):
        kind = DatabaseUnavailableError
    else:  # psycopg's own: a value that it has no type for, a parameter too many
        kind = RowRefusedError if isinstance(error, DataError | ProgrammingError) else DatabaseFatalError
        sqlstate = "22000" if kind is RowRefusedError else "XX000"
    diagnosis = error.diag
    said = (diagnosis.message_primary or str(error) or type(error).__name__).strip()
    if diagnosis.message_detail:
        said = f"{said} ({diagnosis.message_detail.strip()})"
    code = f" [{error.sqlstate}]" if error.sqlstate else ""
    sorted_ = kind(hide(f"{what}: PostgreSQL: {said}{code}; {remedy_of(sqlstate)}"))
    sorted_.sqlstate = error.sqlstate
    sorted_.table = diagnosis.table_name
    sorted_.column = diagnosis.column_name
    sorted_.constraint = diagnosis.constraint_name
    return sorted_


@contextmanager
def sorted_errors(what: str, hide: Callable[[str], str] = str) -> Iterator[None]:
    """Raises what psycopg raises inside as one of the errors above."""
    from psycopg import Error

    try:
        yield
    except Error as error:
        # Not as the cause: psycopg's text may hold a row, or a DSN.
        raise sorted_error(what, error, hide) from None
