"""Rows from staging tables into a table: every mode, bad rows, keys, types; and leftovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from random import Random
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import FencedInDatabaseError
from semel.sinks.postgres.moving import DEAD_ROWS, BadStagedRowError, Move, SameKeyError, UnevenStagingError
from semel.sinks.postgres.staging import STAGING, Staged, StagingRound, fill, leftovers, sweep
from semel.sinks.postgres.tables import OWNERS, claim, install
from semel.sinks.postgres.target import RowColumn, TableMismatchError, describe, fitting, upsert_key
from tests.support.waiting import PATIENCE_S


class Bench:
    """A database with one owner, who moves rows into tables."""

    def __init__(self, dsn: str) -> None:
        self.connection = Database(dsn).connect("test")
        for component in (OWNERS, STAGING, DEAD_ROWS):
            install(self.connection, "semel", component)
        self.generation = claim(self.connection, "semel", "spark:app", "test")
        self.connection.commit()
        self.round, self._attempts = 1, 0

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement, values or None)
        found = cursor.fetchall() if cursor.description else []
        self.connection.commit()
        return found

    @property
    def stage(self) -> StagingRound:
        return StagingRound("semel", "spark:app", self.generation, self.round)

    def staged(self, columns: Any, *tables: dict[str, Any] | pa.Table, with_reasons: bool = False) -> list[Staged]:
        made = []
        for table in tables:
            self._attempts += 1
            batches = (table if isinstance(table, pa.Table) else pa.table(table)).to_batches()
            if with_reasons:
                batches = [_with_reasons(batch) for batch in batches]
            made.append(fill(self.connection, self.stage, self._attempts, columns, batches, with_reasons=with_reasons))
        self.connection.commit()
        return made

    def move(
        self,
        name: str,
        *tables: dict[str, Any] | pa.Table,
        mode: str = "insert",
        aside: tuple[str, ...] = (),
        dead: bool = False,
        **more: Any,
    ) -> int:
        """Stages tables, each as an attempt of its own, and moves their rows."""
        target = describe(self.connection, name)
        first = tables[0] if isinstance(tables[0], pa.Table) else pa.table(tables[0])
        rows = [RowColumn(f.name, str(f.type), f.type) for f in first.schema]
        columns = fitting(target, rows, aside, stores=mode != "delete")
        if mode == "upsert":
            more["key"] = upsert_key(target, more.get("key", ()))
        move = Move("semel", target, columns, mode, with_reasons=dead, **more)
        staged = self.staged(columns, *tables, with_reasons=dead)
        try:
            found = move(self.connection, staged, "app", 7)
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        return found


def _with_reasons(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column("semel_reason", pa.nulls(batch.num_rows, pa.string()))


@pytest.fixture
def bench(dsn: str) -> Iterator[Bench]:
    made = Bench(dsn)
    yield made
    made.connection.close()


def test_rows_of_several_attempts_are_inserted(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id bigint PRIMARY KEY, name varchar(5), extra text DEFAULT 'd')")
    assert bench.move("t", {"id": [1, 2], "name": ["a", None]}, {"id": [3], "name": ["c"]}) == 0
    assert bench.sql("SELECT * FROM t ORDER BY id") == [(1, "a", "d"), (2, None, "d"), (3, "c", "d")]


def test_a_text_that_is_too_long_is_refused_and_never_cut_off(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (name varchar(5))")
    with pytest.raises(psycopg.errors.StringDataRightTruncation):
        bench.move("t", {"name": ["fits", "does not fit"]})
    assert bench.sql("SELECT * FROM t") == []


def test_an_upsert_takes_the_last_row_of_a_key_by_its_order(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    bench.sql("INSERT INTO t VALUES (1, 'old'), (9, 'stays')")
    first = {"id": [1, 2, 1], "v": ["b", "x", "a"], "at": [20, 1, 10]}
    bench.move("t", first, {"id": [2], "v": ["y"], "at": [2]}, mode="upsert", order_by=("at",), aside=("at",))
    assert bench.sql("SELECT * FROM t ORDER BY id") == [(1, "b"), (2, "y"), (9, "stays")]


def test_an_upsert_without_an_order_refuses_two_rows_with_one_key_even_in_two_attempts(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    with pytest.raises(SameKeyError, match="order_by"):
        bench.move("t", {"id": [1], "v": ["a"]}, {"id": [1], "v": ["b"]}, mode="upsert")
    assert bench.sql("SELECT * FROM t") == []


@pytest.mark.parametrize("between", [0, 1_500])
def test_a_bad_row_does_not_let_two_rows_with_one_key_pass(bench: Bench, between: int) -> None:
    """Rows are tried one by one then, and the second would replace the first, whichever that is."""
    bench.sql("CREATE TABLE t (id int PRIMARY KEY, v text CHECK (v <> 'bad'))")
    ids = [0, 1, *range(2, 2 + between), 1]
    with pytest.raises(SameKeyError, match="order_by"):
        bench.move("t", {"id": ids, "v": ["bad", *["good"] * (len(ids) - 1)]}, mode="upsert", dead=True)
    assert bench.sql("SELECT * FROM t") == []


LIMITS = {
    "an index": ("text", "".join(Random(1).choices("abcdefghijklmnop", k=30_000)), "54000"),
    "nesting": ("jsonb", "[" * 100_000 + "]" * 100_000, "54001"),
    "a trigger": ("text", "refused", "P0001"),
    "a trigger's query": ("text", "no row", "P0002"),
}


@pytest.mark.parametrize(("kind", "value", "state"), LIMITS.values(), ids=LIMITS)
def test_a_row_that_the_server_takes_by_no_means_is_a_dead_letter(
    bench: Bench, kind: str, value: str, state: str
) -> None:
    bench.sql(f"CREATE TABLE t (id int PRIMARY KEY, v {kind})")
    if kind == "text":
        bench.sql("CREATE INDEX ON t (v)")
    bench.sql(
        "CREATE FUNCTION check_v() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE found int; BEGIN "
        "IF NEW.v::text = 'refused' THEN RAISE 'not this one'; END IF; "
        "IF NEW.v::text = 'no row' THEN SELECT id INTO STRICT found FROM t WHERE id < 0; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER check_v BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION check_v()"
    )
    assert bench.move("t", {"id": [1, 2, 3], "v": ["1", value, "3"]}, dead=True) == 1
    assert bench.sql("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
    assert bench.sql("SELECT sqlstate FROM semel.dead_rows") == [(state,)]


def test_an_upsert_of_nothing_but_the_key(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id int PRIMARY KEY)")
    bench.move("t", {"id": [1]}, mode="upsert")
    bench.move("t", {"id": [1, 2]}, mode="upsert")
    assert bench.sql("SELECT * FROM t ORDER BY id") == [(1,), (2,)]


def test_an_upsert_of_nothing_but_the_key_takes_equal_rows_also_beside_a_bad_one(bench: Bench) -> None:
    """They are one row, whichever of them counts."""
    bench.sql("CREATE TABLE t (id int PRIMARY KEY CHECK (id < 9))")
    assert bench.move("t", {"id": [1, 9, 1, 2]}, mode="upsert", dead=True) == 1
    assert bench.sql("SELECT * FROM t ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize("columns", ["id int PRIMARY KEY, v text", "id int PRIMARY KEY, v text, at numeric"])
def test_the_order_of_long_decimals_is_that_of_numbers(bench: Bench, columns: str) -> None:
    """They travel as texts, where 9 is above 10; numbers of changes are often NUMBER or DECIMAL(38)."""
    bench.sql(f"CREATE TABLE t ({columns})")
    at = pa.array([Decimal(10), Decimal(9)], pa.decimal128(38, 0))
    rows = pa.table({"id": [1, 1], "v": ["last", "first"], "at": at})
    bench.move("t", rows, mode="upsert", order_by=("at",), aside=("at",))
    assert bench.sql("SELECT v FROM t") == [("last",)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("char(5)", ["ab   ", "ab"]),
        ("citext", ["ab", "AB"]),
        ("timestamp(3)", [datetime(2026, 3, 1, 12, 0, 0, micros) for micros in (123_400, 123_456)]),
    ],
)
def test_keys_are_compared_as_the_table_compares_them(bench: Bench, kind: str, values: list[Any]) -> None:
    bench.sql("CREATE EXTENSION citext")
    bench.sql(f"CREATE TABLE t (id {kind} PRIMARY KEY, v text)")
    rows = {"id": values, "v": ["first", "last"], "n": [1, 2]}
    bench.move("t", rows, mode="upsert", order_by=("n",), aside=("n",))
    assert bench.sql("SELECT v FROM t") == [("last",)]
    bench.move("t", {"id": values[:1], "v": ["-"], "n": [3], "op": ["d"]}, mode="upsert", order_by=("n",),
               operation="op", aside=("n", "op"))  # fmt: skip
    assert bench.sql("SELECT v FROM t") == []
    bench.move("t", {"id": values[:1], "v": ["again"]})
    bench.move("t", {"id": values[:1]}, mode="delete", key=("id",))
    assert bench.sql("SELECT v FROM t") == []


@pytest.mark.parametrize("operations", [["c", "U", "delete"], [False, False, True]])
def test_changes_are_applied_by_the_last_operation_of_each_key(bench: Bench, operations: list[Any]) -> None:
    bench.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    bench.sql("INSERT INTO t VALUES (1, 'old'), (2, 'old'), (3, 'old')")
    create, update, delete = operations
    changes = {
        "id": [1, 1, 2, 2, 4, 4],
        "v": ["x", None, None, "again", "made", "changed"],
        "op": [update, delete, delete, create, create, update],
        "n": [1, 2, 1, 2, 1, 2],
    }
    bench.move("t", changes, mode="upsert", order_by=("n",), operation="op", aside=("n", "op"))
    assert bench.sql("SELECT * FROM t ORDER BY id") == [(2, "again"), (3, "old"), (4, "changed")]


def test_rows_are_deleted_by_columns(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (customer uuid, day date, v int)")
    one, two = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    bench.sql(f"INSERT INTO t VALUES ('{one}', '2024-01-01', 1), ('{one}', '2024-01-02', 2), ('{two}', NULL, 3)")
    bench.move("t", {"customer": [one, one]}, mode="delete", key=("customer",))
    assert bench.sql("SELECT v FROM t") == [(3,)]


def test_to_delete_a_row_takes_no_more_than_its_key(bench: Bench) -> None:
    """What an insert would need, or could not have, does not matter."""
    bench.sql("CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text NOT NULL)")
    bench.sql("INSERT INTO t (v) VALUES ('a'), ('b')")
    bench.move("t", {"id": [1]}, mode="delete", key=("id",))
    assert bench.sql("SELECT * FROM t") == [(2, "b")]


def test_a_null_key_is_a_bad_row(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id int UNIQUE, v text)")
    rows = {"id": pa.array([1, None], pa.int32()), "v": ["a", "b"]}
    with pytest.raises(BadStagedRowError, match="'id' is null"):
        bench.move("t", rows, mode="upsert", key=("id",))
    assert bench.move("t", rows, mode="upsert", key=("id",), dead=True) == 1
    assert bench.sql("SELECT * FROM t") == [(1, "a")]
    found = bench.sql("SELECT row_data, reason, sequence FROM semel.dead_rows")
    assert found == [({"id": None, "v": "b"}, "key column 'id' is null", 7)]


def test_bad_rows_become_dead_letters_each_with_its_reason(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id int PRIMARY KEY, first text CHECK (first <> 'bad'), u uuid, amount numeric(4, 2))")
    bench.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id = 5 THEN RAISE EXCEPTION 'five is right out'; END IF; RETURN NEW; END $$"
    )
    bench.sql("CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse()")
    good = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    rows = {
        "id": [1, 2, 3, 4, 5, 1],
        "first": ["a", "bad", "c", "d", "e", "again"],
        "u": [good, good, "no uuid", good, good, good],
        "amount": pa.array([1, 2, 3, 100, 5, 6], pa.int64()).cast(pa.decimal128(21, 2)).cast(pa.decimal128(18, 2)),
    }
    assert bench.move("t", rows, dead=True) == 5
    assert bench.sql("SELECT id, first FROM t") == [(1, "a")]
    found = bench.sql(
        "SELECT (row_data->>'id')::int, sqlstate, constraint_name, reason FROM semel.dead_rows ORDER BY id"
    )
    assert [(number, state) for number, state, _, _ in found] == [
        (2, "23514"),
        (3, "22P02"),
        (4, "22003"),
        (5, "P0001"),
        (1, "23505"),
    ]
    assert found[0][2] == "t_first_check"
    assert "five is right out" in found[3][3]


def test_a_deferred_constraint_is_a_row_s_error_too(bench: Bench) -> None:
    bench.sql("CREATE TABLE parent (id int PRIMARY KEY)")
    bench.sql("CREATE TABLE t (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    bench.sql("INSERT INTO parent VALUES (1)")
    assert bench.move("t", {"id": [1, 2]}, dead=True) == 1
    assert bench.sql("SELECT * FROM t") == [(1,)]


def test_time_to_find_bad_rows_grows_with_the_rows(bench: Bench) -> None:
    """Every other row is bad: each costs the same, however many there are."""
    bench.sql("CREATE TABLE t (id int CHECK (id % 2 = 0))")
    took_s = {}
    for count in (1_000, 8_000):
        began_s = time.process_time()
        before = bench.sql("SELECT pg_catalog.clock_timestamp()")[0][0]
        assert bench.move("t", pa.table({"id": pa.array(range(count), pa.int32())}), dead=True) == count // 2
        took_s[count] = (bench.sql("SELECT pg_catalog.clock_timestamp()")[0][0] - before).total_seconds()
        assert time.process_time() - began_s < 2
    assert took_s[8_000] < 8 * took_s[1_000] * 4 + 1, f"more than linear: {took_s}"


def test_a_staging_table_that_lost_its_rows_is_noticed(bench: Bench) -> None:
    """What a crash of the server does to an unlogged table."""
    bench.sql("CREATE TABLE t (id bigint)")
    target = describe(bench.connection, "t")
    columns = fitting(target, [RowColumn("id", "bigint", pa.int64())])
    staged = bench.staged(columns, {"id": [1, 2, 3]})
    bench.sql(f"TRUNCATE semel.{staged[0].table}")
    with pytest.raises(UnevenStagingError, match="has 0 rows, its task reported 3"):
        Move("semel", target, columns, "insert")(bench.connection, staged, "app", 0)
    bench.connection.rollback()


# --- do rows and table fit? ---
def test_a_mismatch_names_both_sides_and_everything_at_once(bench: Bench) -> None:
    bench.sql(
        'CREATE TABLE t (id int NOT NULL, "Name" text, at timestamp, money numeric(10, 2), '
        "g int GENERATED ALWAYS AS (1) STORED)"
    )
    rows = [
        RowColumn("name", "string", pa.string()),
        RowColumn("at", "timestamp", pa.timestamp("us", "UTC")),
        RowColumn("money", "decimal(18,4)", pa.decimal128(18, 4)),
        RowColumn("g", "int", pa.int32()),
        RowColumn("what", "struct<a:int>", None),
    ]
    with pytest.raises(TableMismatchError) as refused:
        fitting(describe(bench.connection, "t"), rows)
    said = str(refused.value)
    for part in (
        "'id' (integer) of the table is NOT NULL",
        "'name' (string), the table has not: it has 'Name', and names are case-sensitive",
        "'at' is timestamp in the rows and timestamp without time zone in the table; cast it to timestamp_ntz",
        "'money' has 4 decimal places in the rows and 2 in the table (numeric(10,2))",
        "'g' of the table is generated always",
        "'what' (struct<a:int>), the table has not",
    ):
        assert part in said, said


FITTING = [
    ("numeric", pa.int64(), True),
    ("int", pa.int64(), True),
    ("real", pa.float64(), False),
    ("text", pa.int64(), False),
    ("text", pa.binary(), False),
    ("jsonb", pa.string(), True),
    ("mood", pa.string(), True),
    ("mood[]", pa.list_(pa.string()), True),
    ("positive", pa.int32(), True),
    ("short_money", pa.decimal128(18, 4), False),
    ("short_money", pa.decimal128(18, 1), True),
    ("text[]", pa.string(), False),
    ("uuid[]", pa.list_(pa.string()), True),
    ("numeric", pa.decimal128(38, 20), True),
    ("char(3)", pa.string(), True),
    ("timestamptz", pa.timestamp("us"), False),
]


def test_which_types_fit(bench: Bench) -> None:
    bench.sql("CREATE TYPE mood AS ENUM ('ok')")
    bench.sql("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    bench.sql("CREATE DOMAIN short_money AS numeric(10, 2)")
    for column, kind, fits in FITTING:
        bench.sql("DROP TABLE IF EXISTS t")
        bench.sql(f"CREATE TABLE t (c {column})")
        rows, table = [RowColumn("c", str(kind), kind)], describe(bench.connection, "t")
        if fits:
            assert [found.name for found in fitting(table, rows)] == ["c"], (column, kind)
        else:
            with pytest.raises(TableMismatchError, match="'c'"):
                fitting(table, rows)


def test_enums_domains_and_json_are_read_from_texts(bench: Bench) -> None:
    bench.sql("CREATE SCHEMA other")
    bench.sql("CREATE TYPE other.mood AS ENUM ('ok', 'bad')")
    bench.sql("CREATE DOMAIN code AS uuid")
    bench.sql('CREATE TABLE "other"."a.b" (m other.mood, ms other.mood[], c code, j json, n numeric)')
    long = pa.array(["12345678901234567890.5"]).cast(pa.decimal128(38, 1))
    code = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    bench.move('other."a.b"', {"m": ["ok"], "ms": [["bad", None]], "c": [code], "j": ['{"a": 1}'], "n": long})
    assert [str(value) for value in bench.sql('SELECT * FROM other."a.b"')[0]] == [
        "ok",
        "{bad,NULL}",
        code,
        "{'a': 1}",
        "12345678901234567890.5",
    ]


def test_an_upsert_needs_a_unique_index_on_its_key(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (a int, b int, c int)")
    bench.sql("CREATE UNIQUE INDEX ON t (a) WHERE b > 0")
    bench.sql("CREATE UNIQUE INDEX ON t (b, a)")
    table = describe(bench.connection, "t")
    assert upsert_key(table, ["a", "b"]) == ("a", "b")
    with pytest.raises(TableMismatchError, match=r"CREATE UNIQUE INDEX ON t \(a\)"):
        upsert_key(table, ["a"])
    with pytest.raises(TableMismatchError, match="no primary key"):
        upsert_key(table, [])


def test_a_table_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(TableMismatchError, match="'missing' is not there"):
        describe(bench.connection, "missing")


# --- leftovers ---
def test_only_what_is_ours_and_past_is_swept(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id bigint)")
    columns = fitting(describe(bench.connection, "t"), [RowColumn("id", "bigint", pa.int64())])
    [old] = bench.staged(columns, {"id": [1]})
    bench.round = 2
    [now] = bench.staged(columns, {"id": [1]})
    # a table of the user's with such a name; one whose entry names a table that the user replaced
    bench.sql("CREATE TABLE semel.stage_0123456789ab_0_0_1 (precious int)")
    bench.sql("INSERT INTO semel.staging VALUES ('stage_0123456789ab_0_0_1', 'spark:app', 0, 0, 'semel staging x')")
    other = StagingRound("semel", "spark:other", 1, 1)
    claim(bench.connection, "semel", "spark:other", "test")
    theirs = fill(bench.connection, other, 99, columns, pa.table({"id": [1]}).to_batches())
    bench.connection.commit()
    assert sweep(bench.connection, bench.stage) == [old.table]
    bench.connection.commit()
    there = {
        name for (name,) in bench.sql("SELECT relname FROM pg_class WHERE relname LIKE 'stage\\_%' AND relkind = 'r'")
    }
    assert there == {now.table, theirs.table, "stage_0123456789ab_0_0_1"}
    assert list(leftovers(bench.connection, bench.stage)) == []


def test_a_leftover_in_use_stays_for_the_next_time(bench: Bench, dsn: str) -> None:
    bench.sql("CREATE TABLE t (id bigint)")
    columns = fitting(describe(bench.connection, "t"), [RowColumn("id", "bigint", pa.int64())])
    [old] = bench.staged(columns, {"id": [1]})
    bench.round = 2
    with psycopg.connect(dsn) as reader:
        reader.execute(f"SELECT * FROM semel.{old.table}")
        assert sweep(bench.connection, bench.stage) == []
        bench.connection.commit()
    assert sweep(bench.connection, bench.stage) == [old.table]
    bench.connection.commit()


def test_a_task_of_a_replaced_owner_is_refused(bench: Bench) -> None:
    bench.sql("CREATE TABLE t (id bigint)")
    columns = fitting(describe(bench.connection, "t"), [RowColumn("id", "bigint", pa.int64())])
    claim(bench.connection, "semel", "spark:app", "another")
    bench.connection.commit()
    with pytest.raises(FencedInDatabaseError, match="generation 2 now, this task has generation 1"):
        bench.staged(columns, {"id": [1]})
    bench.connection.rollback()


def test_attempts_that_write_at_once_do_not_meet(bench: Bench, dsn: str) -> None:
    """Two attempts at one task, and what they stage is apart; only one is moved."""
    bench.sql("CREATE TABLE t (id bigint)")
    columns = fitting(describe(bench.connection, "t"), [RowColumn("id", "bigint", pa.int64())])
    made: dict[int, Staged] = {}

    def attempt(number: int) -> None:
        with Database(dsn).connect("attempt") as connection:
            rows = pa.table({"id": [number] * (number * 10)})
            made[number] = fill(connection, bench.stage, number, columns, rows.to_batches())

    threads = [threading.Thread(target=attempt, args=[number]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    Move("semel", describe(bench.connection, "t"), columns, "insert")(bench.connection, [made[2]], "app", 0)
    bench.connection.commit()
    assert bench.sql("SELECT id, count(*) FROM t GROUP BY id") == [(2, 20)]
