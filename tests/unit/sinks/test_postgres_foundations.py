"""What all that writes to PostgreSQL stands on: connections, sorted errors, transactions whose outcome is known."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from semel.client.errors import ConfigError
from semel.local.postgres import PostgresServer
from semel.prove.database import PostgresProxy
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import (
    DatabaseCommitUncertainError,
    DatabaseConflictError,
    DatabaseFatalError,
    DatabaseUnavailableError,
    FencedInDatabaseError,
    PostgresError,
    RowRefusedError,
    kind_of,
)
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.tables import OWNERS, Component, claim, hold, install, table_name
from tests.support.waiting import PATIENCE_S

SECRET = "s3cr3t-%25-word"


@pytest.fixture
def session(dsn: str) -> Iterator[DatabaseSession]:
    with DatabaseSession(Database(dsn), "test") as session:
        yield session


def rows(dsn: str, query: str) -> list[Any]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.parametrize(("given", "used"), [("off", "on"), ("local", "local")])
def test_a_commit_is_on_disk_before_anybody_acts_upon_it(dsn: str, given: str, used: str) -> None:
    """A decision that a crash of the server takes back is a transaction of Kafka that stays, and records read twice."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = {given}")
    with DatabaseSession(Database(dsn), "test") as session:
        assert session.connection().execute("SHOW synchronous_commit").fetchone() == (used,)


# --- passwords ---


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://bank:{SECRET}@127.0.0.1:1/ledger",
        f"host=127.0.0.1 port=1 user=bank password='{SECRET}' dbname=ledger",
    ],
)
def test_no_repr_error_or_log_shows_the_password(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    database = Database(dsn)
    secret = "s3cr3t"
    assert secret not in repr(database) + database.where
    assert "bank@127.0.0.1:1/ledger" in repr(database)
    with pytest.raises(DatabaseUnavailableError, match="the server runs") as caught:
        pickle.loads(pickle.dumps(database)).connect("test")
    assert caught.value.__cause__ is None
    assert secret not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:{SECRET}/x@host:port/db",
        f"postgresql://u:12/{SECRET}@host:5432/db",
        f"password={SECRET} hots=here",
        f"postgresql://u:{SECRET}%zz@h/d",
        f"postgresql://u:x@{SECRET}@h/d",  # it was part of the host, which messages name
        "",
    ],
)
def test_a_dsn_that_cannot_be_read_is_refused_without_quoting_it(dsn: str) -> None:
    with pytest.raises(ConfigError, match="expected postgresql://") as caught:
        Database(dsn)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_user_who_may_not_connect_is_told_so(postgres: PostgresServer) -> None:
    with pytest.raises(DatabaseFatalError, match=r'role "nobody" does not exist.*check user'):
        Database(postgres.socket_dsn().replace("//semel@", "//nobody@")).connect("test")
    database = postgres.create_database().rpartition("/")[2]
    with psycopg.connect(postgres.dsn()) as connection:
        connection.execute(f"REVOKE CONNECT ON DATABASE {database} FROM PUBLIC; CREATE ROLE guest LOGIN")
    with pytest.raises(DatabaseFatalError, match=r"(?s)permission denied for database.*GRANT"):
        Database(postgres.socket_dsn(database).replace("//semel@", "//guest@")).connect("test")


def test_a_user_with_too_many_connections_is_tried_again(postgres: PostgresServer) -> None:
    """Another instance may end at any moment, such as the one that this one takes over from."""
    with psycopg.connect(postgres.dsn()) as connection:
        connection.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    with pytest.raises(DatabaseUnavailableError, match=r'too many connections for role "crowded".*max_connections'):
        Database(postgres.socket_dsn().replace("//semel@", "//crowded@")).connect("test")


def test_after_a_failed_write_to_a_standby_the_next_attempt_connects_anew(session: DatabaseSession) -> None:
    """Where the primary is then: the address may have moved, or the DSN has several hosts."""
    session.run("making a table", lambda connection: connection.execute("CREATE TABLE t (id int)"))

    def write(connection: Any) -> int:
        connection.execute("INSERT INTO t VALUES (1)")
        return connection.info.backend_pid

    session.connection().execute("SET default_transaction_read_only = on")
    session.connection().commit()
    standby = session.connection().info.backend_pid
    with pytest.raises(DatabaseUnavailableError, match=r"read-only transaction.*target_session_attrs"):
        session.run("writing", write)
    assert session.run("writing", write) != standby


def test_a_wrong_password_is_fatal_and_not_repeated(postgres: PostgresServer) -> None:
    dsn = postgres.dsn().replace(postgres.password, "wrong-secret")
    with pytest.raises(DatabaseFatalError, match=r"pg_hba\.conf") as caught:
        Database(dsn).connect("test")
    assert "wrong-secret" not in str(caught.value)


# --- errors ---


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        (None, DatabaseUnavailableError),
        ("08006", DatabaseUnavailableError),
        ("53300", DatabaseUnavailableError),
        ("53100", DatabaseFatalError),
        ("57P01", DatabaseUnavailableError),
        ("57P03", DatabaseUnavailableError),
        ("40001", DatabaseConflictError),
        ("40P01", DatabaseConflictError),
        ("55P03", DatabaseConflictError),
        ("22003", RowRefusedError),
        ("23505", RowRefusedError),
        ("25006", DatabaseUnavailableError),
        ("54000", RowRefusedError),
        ("54001", RowRefusedError),
        ("P0001", RowRefusedError),
        ("28P01", DatabaseFatalError),
        ("42P01", DatabaseFatalError),
        ("XX000", DatabaseFatalError),
    ],
)
def test_every_sqlstate_is_sorted_by_what_can_be_done(sqlstate: str | None, kind: type[PostgresError]) -> None:
    assert kind_of(sqlstate) is kind


@pytest.mark.parametrize(
    ("statement", "kind", "remedy"),
    [
        ("INSERT INTO t VALUES (1, -1)", RowRefusedError, "t_n_check"),
        ("INSERT INTO t VALUES (1, 9999999999)", RowRefusedError, "column's type"),
        ("INSERT INTO t (id, nope) VALUES (1, 1)", DatabaseFatalError, "no such column"),
        ("INSERT INTO missing VALUES (1)", DatabaseFatalError, "create the table"),
        ("INSERT INTO t VALUES (1, 1) ON CONFLICT (n) DO NOTHING", DatabaseFatalError, "unique constraint"),
    ],
)
def test_a_refused_statement_leaves_nothing_and_names_the_remedy(
    session: DatabaseSession, dsn: str, statement: str, kind: type[PostgresError], remedy: str
) -> None:
    session.run("making t", lambda c: c.execute("CREATE TABLE t (id int, n int CHECK (n >= 0))"))

    def work(connection: Any) -> None:
        connection.execute("INSERT INTO t VALUES (7, 7)")
        connection.execute(statement)

    with pytest.raises(kind, match=remedy):
        session.run("writing", work)
    assert rows(dsn, "SELECT * FROM t") == []
    session.run("still usable", lambda c: c.execute("INSERT INTO t VALUES (1, 1)"))


def test_an_error_that_the_work_ignored_does_not_pass_for_a_commit(session: DatabaseSession) -> None:
    def work(connection: Any) -> None:
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT 1 / 0")

    with pytest.raises(DatabaseFatalError, match="nothing is committed"):
        session.run("writing", work)


def test_a_lock_of_somebody_else_is_a_conflict_after_the_timeout(dsn: str) -> None:
    with psycopg.connect(dsn) as other, DatabaseSession(Database(dsn, lock_timeout_ms=50), "test") as session:
        other.execute("CREATE TABLE t (id int)")
        other.commit()
        other.execute("LOCK TABLE t")
        with pytest.raises(DatabaseConflictError, match="pg_locks"):
            session.run("writing", lambda c: c.execute("INSERT INTO t VALUES (1)"))


def test_a_process_that_is_frozen_inside_a_transaction_does_not_keep_its_successor_out(dsn: str) -> None:
    database, holds, may_go_on = Database(dsn, lock_timeout_ms=12_000), threading.Event(), threading.Event()
    raised: list[PostgresError] = []
    with psycopg.connect(dsn) as connection:
        install(connection, database.schema, OWNERS)

    def freeze(connection: Any) -> None:
        claim(connection, database.schema, "o", "the frozen one")
        holds.set()
        may_go_on.wait(PATIENCE_S)
        connection.execute("SELECT 1")

    def frozen() -> None:
        with DatabaseSession(database, "frozen") as session:
            try:
                session.run("taking over", freeze)
            except PostgresError as error:
                raised.append(error)

    thread = threading.Thread(target=frozen)
    thread.start()
    assert holds.wait(PATIENCE_S)
    with DatabaseSession(database, "next") as session:
        assert session.run("taking over", lambda c: claim(c, database.schema, "o", "the next one")) == 1
    may_go_on.set()
    thread.join(PATIENCE_S)
    assert isinstance(raised[0], DatabaseConflictError)
    assert "run again" in str(raised[0])


# --- semel's tables ---


def test_two_that_start_at_once_make_the_tables_once(dsn: str) -> None:
    errors, gate = [], threading.Barrier(6)

    def start() -> None:
        with psycopg.connect(dsn) as connection:
            gate.wait()
            try:
                install(connection, "my schema", OWNERS)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rows(dsn, 'SELECT * FROM "my schema".versions') == [("owners", 1)]


def test_tables_of_a_newer_semel_are_refused_and_older_ones_are_migrated(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        old = Component("thing", ("CREATE TABLE {schema}.thing (a int)",))
        new = Component("thing", (*old.migrations, "ALTER TABLE {schema}.thing ADD b int"))
        install(connection, "semel", old)
        install(connection, "semel", new)
        connection.execute("SELECT a, b FROM semel.thing")
        with pytest.raises(DatabaseFatalError, match="upgrade semel"):
            install(connection, "semel", old)


def test_no_right_to_create_is_needed_where_the_tables_are(dsn: str, postgres: PostgresServer) -> None:
    with psycopg.connect(dsn) as connection:
        install(connection, "semel", OWNERS)
        connection.execute("CREATE ROLE clerk LOGIN PASSWORD 'x'")
        connection.execute("GRANT USAGE ON SCHEMA semel TO clerk; GRANT SELECT ON semel.versions TO clerk")
    with psycopg.connect(dsn.replace(f"semel:{postgres.password}", "clerk:x")) as clerk:
        install(clerk, "semel", OWNERS)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("accounts", ("accounts",)),
        ("bank.accounts", ("bank", "accounts")),
        ('"my.bank"."a ""b"""', ("my.bank", 'a "b"')),
        ('x"; DROP TABLE y; --', None),
        ("a.b.c", None),
        ("", None),
        ("a.", None),
    ],
)
def test_table_names(name: str, parts: tuple[str, ...] | None) -> None:
    if parts is not None:
        assert table_name(name) == parts
    else:
        with pytest.raises(ConfigError, match="invalid table name"):
            table_name(name)


def test_a_replaced_owner_is_refused_and_a_new_one_waits_for_its_transaction(dsn: str) -> None:
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        install(first, "semel", OWNERS)
        old = claim(first, "semel", "app", "first")
        first.commit()
        hold(first, "semel", "app", old)
        second.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            claim(second, "semel", "app", "second")
        second.rollback()
        first.commit()
        assert claim(second, "semel", "app", "second") == old + 1
        second.commit()
        with pytest.raises(FencedInDatabaseError, match="took over"):
            hold(first, "semel", "app", old)


# --- an unknown COMMIT ---


def insert_under_lock(connection: Any) -> str:
    connection.execute("SELECT * FROM lock FOR UPDATE")
    connection.execute("INSERT INTO t VALUES (1)")
    return "result"


def was_committed(connection: Any) -> bool:
    connection.execute("SELECT * FROM lock FOR UPDATE")
    return connection.execute("SELECT 1 FROM t").fetchone() is not None


@pytest.fixture
def proxied(postgres: PostgresServer, dsn: str) -> Iterator[tuple[PostgresProxy, DatabaseSession]]:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t (id int); CREATE TABLE lock (id int); INSERT INTO lock VALUES (1)")
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        through = dsn.replace(f":{postgres.port}/", f":{proxy.port}/")
        with DatabaseSession(Database(through, lock_timeout_ms=500), "test", settle_timeout_ms=20_000) as session:
            session.connection()
            yield proxy, session


def test_a_commit_whose_response_was_lost_counts(proxied: tuple[PostgresProxy, DatabaseSession], dsn: str) -> None:
    proxy, session = proxied
    proxy.arm("after")
    assert session.run("writing", insert_under_lock, was_committed=was_committed) == "result"
    assert proxy.cuts == 1
    assert rows(dsn, "SELECT count(*) FROM t") == [(1,)]


def test_a_commit_that_never_arrived_does_not_count(proxied: tuple[PostgresProxy, DatabaseSession], dsn: str) -> None:
    proxy, session = proxied
    proxy.arm("before")
    with pytest.raises(DatabaseUnavailableError, match="is not committed"):
        session.run("writing", insert_under_lock, was_committed=was_committed)
    assert proxy.cuts == 1
    assert rows(dsn, "SELECT count(*) FROM t") == [(0,)]


def test_a_commit_that_is_still_on_its_way_cannot_happen_after_it_was_read_as_lost(
    proxied: tuple[PostgresProxy, DatabaseSession], dsn: str
) -> None:
    proxy, session = proxied
    proxy.arm("held")
    with pytest.raises(DatabaseUnavailableError, match="is not committed"):
        session.run("writing", insert_under_lock, was_committed=was_committed)
    proxy.release()
    session.run("again", insert_under_lock, was_committed=was_committed)
    assert proxy.cuts == 1
    assert rows(dsn, "SELECT count(*) FROM t") == [(1,)]


def test_an_outcome_that_cannot_be_read_in_time_is_said_to_be_unknown(
    proxied: tuple[PostgresProxy, DatabaseSession], dsn: str
) -> None:
    proxy, session = proxied
    session.settle_timeout_ms = 100
    proxy.arm("after")

    def unreadable(connection: Any) -> bool:
        raise DatabaseUnavailableError("no")

    with pytest.raises(DatabaseCommitUncertainError, match="could not be read within 100 ms"):
        session.run("writing", insert_under_lock, was_committed=unreadable)


# --- the server of the tests ---


@pytest.mark.full  # the loop of test_f1 and the relay of test_f3 meet these deaths in every run
def test_what_was_committed_survives_every_death_of_the_server(mortal_postgres: PostgresServer) -> None:
    server = mortal_postgres
    dsn, port = server.create_database(), server.port
    with DatabaseSession(Database(dsn), "test") as session:
        session.run("making t", lambda c: c.execute("CREATE TABLE t (n int)"))

        def kill_backend() -> None:
            before = server.line_count
            server.kill_backend(session.connection().info.backend_pid)
            server.await_recovery(before)

        deaths = [lambda: server.stop("fast"), lambda: server.stop("immediate"), server.kill, kill_backend]
        for number, die in enumerate(deaths):
            session.run("writing", lambda c, n=number: c.execute("INSERT INTO t VALUES (%s)", [n]))
            die()
            with pytest.raises(DatabaseUnavailableError):
                session.run("writing to a dead one", lambda c: c.execute("INSERT INTO t VALUES (-1)"))
            server.start()
        assert [n for (n,) in rows(dsn, "SELECT n FROM t ORDER BY n")] == [0, 1, 2, 3]
    assert server.port == port
    with psycopg.connect(server.socket_dsn()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
