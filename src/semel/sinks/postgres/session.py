"""Transactions whose outcome is always known.

A connection that breaks while COMMIT is under way leaves its outcome open: the server may have committed, may still
commit, or not. `DatabaseSession.run` then opens a new connection, and the caller's `was_committed` reads what the
transaction would have written, under a lock that the transaction held (an owner row, `owners.hold`): so it cannot be
read before the lost transaction has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from semel import faults
from semel.client.timing import Backoff, Deadline
from semel.sinks.postgres.database import Database, psycopg_module
from semel.sinks.postgres.errors import (
    DatabaseCommitUncertainError,
    DatabaseConflictError,
    DatabaseFatalError,
    DatabaseUnavailableError,
    sorted_error,
    sorted_errors,
)

if TYPE_CHECKING:
    from psycopg import Connection

log = logging.getLogger("semel.postgres")

T = TypeVar("T")
SETTLE_TIMEOUT_MS = 120_000


class DatabaseSession:
    """One connection to a database, made anew when it is lost. Belongs to one thread at a time."""

    def __init__(self, database: Database, purpose: str, *, settle_timeout_ms: int = SETTLE_TIMEOUT_MS) -> None:
        self.database = database
        self.purpose = purpose
        self.settle_timeout_ms = settle_timeout_ms
        self._connection: Connection[Any] | None = None
        self._backend: tuple[int, Any] | None = None  # its process id, and when it started

    def connection(self) -> Connection[Any]:
        """The connection, outside of a transaction; a new one if the last one is gone."""
        if self._connection is None or self._connection.closed:
            self._connection = self.database.connect(self.purpose)
            with sorted_errors(f"connecting to {self.database.where}", self.database.hide):
                row = self._connection.execute(
                    "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
                ).fetchone()
                self._connection.rollback()
            self._backend = None if row is None else (row[0], row[1])
        return self._connection

    def run(
        self,
        what: str,
        work: Callable[[Connection[Any]], T],
        *,
        was_committed: Callable[[Connection[Any]], bool] | None = None,
    ) -> T:
        """Does the work in one transaction and commits it. When this returns, it is committed; when it raises anything
        but `DatabaseCommitUncertainError`, it is not, and never will be.

        `was_committed(connection)` is called after an unknown COMMIT, on another connection: it must wait for the
        lock that the work held, then return whether what the work wrote is there. Without it (work that may run
        twice), an unknown COMMIT counts as a lost connection."""
        connection = self.connection()
        result = self._work(what, connection, work)
        if faults.armed:
            faults.hit("postgres.before_commit")
        lost = self._commit(what, connection)
        if lost is not None and not (was_committed is not None and self._settle(what, was_committed)):
            raise DatabaseUnavailableError(
                f"{what}: the connection broke during COMMIT, and the transaction is not committed ({lost})"
            )
        if faults.armed:
            faults.hit("postgres.after_commit")
        return result

    def read(self, what: str, query: Callable[[Connection[Any]], T]) -> T:
        """The same for work that writes nothing."""
        return self.run(what, query)

    def close(self) -> None:
        """Also from another thread: what is open is rolled back by the server."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def __enter__(self) -> DatabaseSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _work(self, what: str, connection: Connection[Any], work: Callable[[Connection[Any]], T]) -> T:
        psycopg = psycopg_module()
        try:
            result = work(connection)
            if connection.info.transaction_status is psycopg.pq.TransactionStatus.INERROR:
                # COMMIT would succeed, as a rollback.
                raise DatabaseFatalError(f"{what}: a statement failed and its error was ignored; nothing is committed")
            return result
        except psycopg.Error as error:
            failure = sorted_error(what, error, self.database.hide)
            self._roll_back(connection, failure)
            raise failure from None
        except BaseException as failure:
            self._roll_back(connection, failure)
            raise

    def _commit(self, what: str, connection: Connection[Any]) -> str | None:
        """None if the transaction is committed; a text if that is unknown. Raises if it is not committed."""
        psycopg = psycopg_module()
        try:
            connection.commit()
            return None
        except psycopg.Error as error:
            if connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
                raise sorted_error(what, error, self.database.hide) from None  # such as a deferred constraint
            connection.close()
            return str(sorted_error(what, error, self.database.hide))
        except BaseException:  # an interrupt: whoever comes next reads what there is
            connection.close()
            raise

    def _settle(self, what: str, was_committed: Callable[[Connection[Any]], bool]) -> bool:
        deadline, pauses = Deadline(self.settle_timeout_ms / 1000), Backoff(20, 1_000)
        lost_backend = self._backend
        while True:
            try:
                connection = self.connection()
                self._work(what, connection, lambda new: _terminate(new, lost_backend))
                connection.rollback()
                committed = self._work(what, connection, was_committed)
                connection.rollback()
                log.warning("%s: the transaction is %s", what, "committed" if committed else "not committed")
                return committed
            except (DatabaseUnavailableError, DatabaseConflictError) as error:
                if deadline.expired:
                    raise DatabaseCommitUncertainError(
                        f"{what}: the connection broke during COMMIT, and the outcome could not be read within "
                        f"{self.settle_timeout_ms} ms; it is read at the next start. Last error: {error}"
                    ) from error
                time.sleep(min(pauses.next_s(), max(0.01, deadline.remaining_s())))

    def _roll_back(self, connection: Connection[Any], failure: BaseException) -> None:
        try:
            connection.rollback()
        except Exception:  # the server rolls back what a closed connection left
            connection.close()
        if isinstance(failure, DatabaseUnavailableError):  # the next attempt may find another server, such as a primary
            connection.close()


def _terminate(connection: Connection[Any], backend: tuple[int, Any] | None) -> None:
    """Ends a backend whose client is gone, which it may not know yet; what it holds is free then."""
    if backend is not None:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s "
            "AND pid <> pg_backend_pid()",
            backend,
        )
