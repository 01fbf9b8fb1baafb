"""F1: PostgreSQL: rows and offsets commit in one database transaction; on restart the consumer seeks to what the
database says. Tables are read through psycopg, the group's offsets through confluent-kafka."""

from __future__ import annotations

import json
import random
import sys
import threading
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import semel
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresServer
from semel.local.processes import Process
from semel.patterns.process import Processor
from semel.prove.database import PostgresProxy
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.sinks import execute
from tests.support.waiting import PATIENCE_S, until

PARTITIONS = 2
RECORDS = 200
MEMBER = "tests.guarantees.table_member"


@pytest.fixture
def cluster(shared_semel_broker: SemelBroker) -> Cluster:
    return Cluster("semel", shared_semel_broker)


@pytest.fixture
def bank(cluster: Cluster, dsn: str) -> Bank:
    return Bank(cluster, dsn)


class Bank:
    """Deposits of 1 to accounts 0 to 9: a sum that counts every record."""

    def __init__(self, cluster: Cluster, dsn: str) -> None:
        self.bootstrap, self.dsn = cluster.bootstrap, dsn
        self.application_id = cluster.unique("bank")
        self.topic = create_topic(self.bootstrap, cluster.unique("deposits"), PARTITIONS)
        self.sent = 0
        self.execute(
            "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL CHECK (balance >= 0));"
            "INSERT INTO accounts SELECT id, 0 FROM generate_series(0, 9) AS id"
        )

    def deposit(self, count: int, amount: object = 1, partitions: int = PARTITIONS, **headers: bytes) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in range(self.sent, self.sent + count):
            value = json.dumps({"account": number % 10, "amount": amount}).encode()
            producer.produce(self.topic, value, partition=number % partitions, headers=list(headers.items()))
        assert producer.flush(PATIENCE_S) == 0
        self.sent += count

    def execute(self, statement: str) -> list[Any]:
        return execute(self.dsn, statement)

    def total(self) -> int:
        return self.execute("SELECT sum(balance) FROM accounts")[0][0]

    def offsets(self) -> dict[int, int]:
        return dict(self.execute(f"SELECT partition, next_offset FROM semel.offsets WHERE topic = '{self.topic}'"))

    def process(self, function: Any = None, **options: Any) -> semel.patterns.process.Stats:
        sink = options.pop("sink", None) or semel.Postgres(options.pop("dsn", self.dsn))
        options = {"stop_at_end": True, "application_id": self.application_id, **options}
        return semel.process(self.topic, sink, function or deposit, bootstrap_servers=self.bootstrap, **options)


def deposit(record: Any) -> semel.Statement:
    event = json.loads(record.value)
    return semel.Statement(
        "UPDATE accounts SET balance = balance + %s WHERE id = %s", [event["amount"], event["account"]]
    )


def test_rows_and_offsets_move_together_and_a_restart_reads_the_table(bank: Bank) -> None:
    bank.deposit(RECORDS)
    assert bank.process().records_out == RECORDS
    assert (bank.total(), sum(bank.offsets().values())) == (RECORDS, RECORDS)
    bank.deposit(10)
    assert bank.process().records_in == 10
    assert (bank.total(), sum(bank.offsets().values())) == (RECORDS + 10, RECORDS + 10)


def test_the_group_has_the_offsets_for_lag_tools(bank: Bank) -> None:
    bank.deposit(20)
    bank.process()
    consumer = Consumer({"bootstrap.servers": bank.bootstrap, "group.id": bank.application_id})
    places = [TopicPartition(bank.topic, number) for number in range(PARTITIONS)]
    until(
        lambda: {place.offset for place in consumer.committed(places, PATIENCE_S)} == {10}, "the group has no offsets"
    )
    consumer.close()


def test_the_table_decides_where_to_read_when_the_group_lags_behind(bank: Bank) -> None:
    """As after a crash between the database's commit and the group's: the records are not applied again."""
    bank.deposit(RECORDS)
    bank.process()
    consumer = Consumer({"bootstrap.servers": bank.bootstrap, "group.id": bank.application_id})
    consumer.commit(offsets=[TopicPartition(bank.topic, number, 0) for number in range(PARTITIONS)], asynchronous=False)
    consumer.close()
    assert bank.process(idle_stop_ms=300, stop_at_end=False).records_in == 0
    assert bank.total() == RECORDS


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_connection_that_breaks_during_commit_loses_and_doubles_nothing(
    bank: Bank, postgres: PostgresServer, kind: Any
) -> None:
    bank.deposit(RECORDS)
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        through = bank.dsn.replace(f":{postgres.port}/", f":{proxy.port}/")
        cut_after = []

        def settled(stats: Any) -> None:
            if stats.commits == 2 and not cut_after:
                cut_after.append(stats.commits)
                proxy.arm(kind)

        stats = bank.process(dsn=through, max_records=20, on_settled=settled)
        assert proxy.cuts == 1
        assert stats.aborts == (kind == "before"), "what did not arrive is done again, what did is not"
    assert (bank.total(), sum(bank.offsets().values())) == (RECORDS, RECORDS)


def test_the_database_may_die_under_the_loop(bank: Bank, mortal_postgres: PostgresServer) -> None:
    server = mortal_postgres
    bank.dsn = server.create_database()
    bank.execute("CREATE TABLE accounts (id int, balance int)")
    bank.execute("INSERT INTO accounts SELECT id, 0 FROM generate_series(0, 9) AS id")
    bank.deposit(RECORDS)

    def kill_backend() -> None:
        before = server.line_count
        pids = bank.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'semel process%'")
        server.kill_backend(pids[0][0])
        server.await_recovery(before)

    deaths = [lambda: server.stop("immediate"), server.kill, kill_backend, lambda: server.stop("fast")]
    died: list[int] = []

    def settled(stats: Any) -> None:
        if stats.commits % 2 == 0 and stats.commits // 2 == len(died) + 1 and deaths:
            died.append(stats.commits)
            deaths.pop(0)()
            server.start()

    stats = bank.process(max_records=20, on_settled=settled)
    assert died == [2, 4, 6, 8]
    assert stats.aborts >= len(died), "the loop met every death"
    assert bank.total() == RECORDS


def member(bank: Bank, *words: str) -> Process:
    return Process(
        [sys.executable, "-m", MEMBER, bank.bootstrap, bank.dsn, bank.application_id, bank.topic, *words], stdin=True
    )


def test_a_member_that_was_frozen_through_a_rebalance_is_refused(bank: Bank) -> None:
    """It holds records that it has not written when it is frozen; meanwhile another one gets its partitions."""
    bank.deposit(RECORDS)
    with member(bank, "hold") as frozen:
        frozen.wait_for_line(r"^holding", PATIENCE_S)
        frozen.pause()
        with member(bank) as other:
            until(lambda: bank.total() == RECORDS, "the other one did not get the partitions")
            frozen.resume()
            frozen.write("go\n")
            frozen.wait_for_line(r"belongs to generation \d+", PATIENCE_S)
            bank.deposit(10)
            until(lambda: bank.total() >= RECORDS + 10, "nobody went on")
            assert other.running
    assert (bank.total(), sum(bank.offsets().values())) == (RECORDS + 10, RECORDS + 10)


@pytest.mark.full  # `semel prove --workload outbox` does so, too
def test_two_instances_share_the_partitions_and_apply_each_record_once(bank: Bank) -> None:
    bank.deposit(RECORDS)
    with member(bank), member(bank):
        until(lambda: bank.total() == RECORDS)
        bank.deposit(RECORDS)
        until(lambda: bank.total() >= 2 * RECORDS)
    assert (bank.total(), sum(bank.offsets().values())) == (2 * RECORDS, 2 * RECORDS)


def test_kill_9_at_any_moment_loses_and_doubles_nothing(bank: Bank) -> None:
    for kill in range(2):
        bank.deposit(100)
        with member(bank, "named", f"batch={7 + kill}") as process:
            process.wait_for_line(rf"^settled {2 + kill}$", PATIENCE_S)
            process.kill()
    bank.process()
    assert (bank.total(), sum(bank.offsets().values())) == (200, 200)


# --- bad input ---


def test_records_that_the_database_refuses_are_dead_letters_of_the_same_transaction(bank: Bank) -> None:
    bank.deposit(30)
    bank.deposit(1, -1000, why=b"a test")  # balance >= 0
    bank.deposit(1, "much")  # no number
    bank.deposit(30)
    stats = bank.process(sink=semel.Postgres(bank.dsn, dead_letters=True))
    assert (stats.dead_letters, bank.total(), sum(bank.offsets().values())) == (2, 60, 62)
    letters = bank.execute("SELECT reason, value, header_names, header_values FROM semel.dead_letters ORDER BY reason")
    assert ["accounts_balance_check" in letter[0] for letter in letters].count(True) == 1
    assert sorted(json.loads(letter[1])["amount"] for letter in letters if b"-" in letter[1]) == [-1000]
    assert (["why"], [b"a test"]) in [letter[2:] for letter in letters]


def test_a_record_of_any_json_cannot_stop_the_loop(bank: Bank) -> None:
    """Types that the column does not have, half characters and NUL: in the value, and in an error that quotes it."""
    bank.execute("CREATE TABLE notes (number int, note text)")
    amounts = [True, [1], {"a": 1}, [{"a": 1}], "\ud800", "\0", 2**80, float("nan"), {"deep": "\ud800"}]
    for amount in amounts:
        bank.deposit(1, amount)

    def note(record: Any) -> list[Any]:
        amount = json.loads(record.value)["amount"]
        row = {"number": amount, "note": "a note"} if record.offset % 2 else {"number": 1, "note": amount}
        return [row, deposit(record)]

    def quote(record: Any) -> list[Any]:
        raise ValueError(f"cannot take {json.loads(record.value)['amount']}")

    bank.deposit(3)
    sink = semel.Postgres(bank.dsn, table="notes", dead_letters=True)
    assert bank.process(note, sink=sink).dead_letters == len(amounts)
    assert (bank.total(), bank.execute("SELECT count(*) FROM notes")) == (3, [(3,)])
    stats = bank.process(quote, sink=sink, application_id=f"{bank.application_id}-quoting")
    assert stats.dead_letters == len(amounts) + 3


def test_what_a_trigger_raises_or_an_index_cannot_hold_is_the_record_s_error(bank: Bank) -> None:
    bank.execute(
        "CREATE FUNCTION only_ours() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.note = 'foreign' THEN RAISE 'not ours'; END IF; RETURN NEW; END $$;"
        "CREATE TABLE notes (id int, note text); CREATE INDEX ON notes (note);"
        "CREATE TRIGGER only_ours BEFORE INSERT ON notes FOR EACH ROW EXECUTE FUNCTION only_ours()"
    )
    long = "".join(random.Random(1).choices("abcdefghijklmnop", k=30_000))
    notes = ["one", "foreign", long, "two"]
    bank.deposit(len(notes), partitions=1)
    sink = semel.Postgres(bank.dsn, table="notes", dead_letters=True)
    stats = bank.process(lambda record: {"id": record.offset, "note": notes[record.offset]}, sink=sink)
    assert (stats.dead_letters, bank.execute("SELECT id FROM notes ORDER BY id")) == (2, [(0,), (3,)])
    first, second = bank.execute("SELECT reason FROM semel.dead_letters ORDER BY record_offset")
    assert "not ours" in first[0]
    assert "maximum size" in second[0]


@pytest.mark.parametrize(
    "sql",
    ["COMMIT", " rollback", "/* done */ ROLLBACK", "/* /* */ done */\n-- so\nCOMMIT AND CHAIN", "; -- done\r commit"],
)
def test_a_statement_cannot_end_the_transaction_that_offsets_share(bank: Bank, sql: str) -> None:
    """After a ROLLBACK the rows would be gone, and the offsets of their records would be committed. COMMIT behind a
    comment was sent; with AND CHAIN nobody noticed."""
    bank.deposit(10)
    with pytest.raises(semel.DatabaseFatalError, match="leave COMMIT, ROLLBACK and BEGIN out"):
        bank.process(lambda record: [deposit(record), semel.Statement(sql)])
    assert (bank.total(), set(bank.offsets().values())) == (0, {None})


def test_names_of_tables_and_columns_may_hold_any_character(bank: Bank) -> None:
    bank.execute(
        'CREATE SCHEMA "sales 100%s"; CREATE TABLE "sales 100%s"."ord""er%" ('
        '"select" int PRIMARY KEY, "discount %" int, "%s" text, "größe; DROP TABLE accounts" text)'
    )
    bank.deposit(4)
    sink = semel.Postgres(bank.dsn, table='"sales 100%s"."ord""er%"', mode="upsert")
    for number in range(2):
        row = {"discount %": number, "%s": "x", "größe; DROP TABLE accounts": "y"}
        bank.process(
            lambda record, row=row: {"select": record.partition * 10 + record.offset, **row},
            sink=sink,
            application_id=f"{bank.application_id}-{number}",
        )
    assert bank.execute('SELECT sum("discount %"), count(*), min("%s") FROM "sales 100%s"."ord""er%"') == [(4, 4, "x")]
    assert bank.total() == 0


def test_without_dead_letters_the_loop_stops_and_names_the_record(bank: Bank) -> None:
    bank.deposit(30)
    bank.deposit(1, -1000)
    with pytest.raises(semel.RecordError, match=r"accounts_balance_check.*dead_letters=True") as caught:
        bank.process(commit_interval_ms=5_000)
    assert (caught.value.partition, caught.value.offset) == (0, 15)
    assert bank.total() == 0


@pytest.mark.parametrize("with_topics", [False, True])
def test_what_on_error_returns_may_be_refused_too(bank: Bank, with_topics: bool) -> None:
    bank.deposit(5)
    bank.deposit(1, -1000)

    def instead(record: Any, error: Exception) -> Any:
        return semel.Statement("UPDATE accounts SET balance = -1 WHERE id = 0")

    out = create_topic(bank.bootstrap, f"{bank.topic}.out", 1)

    def function(record: Any) -> Any:
        return [deposit(record), semel.Output(record.value, topic=out)] if with_topics else deposit(record)

    with pytest.raises(semel.RecordError, match=r"at offset \d+.*accounts_balance_check"):
        bank.process(function, on_error=instead, sink=semel.Postgres(bank.dsn, with_topics=with_topics))
    sink = semel.Postgres(bank.dsn, dead_letters=True, with_topics=with_topics)
    assert bank.process(function, on_error=instead, sink=sink).dead_letters == 1
    assert (bank.total(), len(read_topic(bank.bootstrap, out))) == (5, 5 if with_topics else 0)


def test_rows_of_one_record_may_refer_to_each_other_also_beside_a_refused_one(bank: Bank) -> None:
    """A deferred constraint is checked for all rows of a record, as COMMIT checks it for all records."""
    bank.execute(
        "CREATE TABLE orders (id int PRIMARY KEY);"
        "CREATE TABLE items (id int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
    )
    bank.deposit(3, partitions=1)

    def rows(record: Any) -> Any:
        number = record.offset
        wanted = -1 if number == 1 else number
        return [semel.TableRow({"id": wanted}, "items"), semel.TableRow({"id": number}, "orders")]

    assert bank.process(rows, sink=semel.Postgres(bank.dsn, dead_letters=True)).dead_letters == 1
    assert bank.execute("SELECT id FROM items JOIN orders USING (id) ORDER BY id") == [(0,), (2,)]


def test_on_error_may_say_what_to_write_instead(bank: Bank) -> None:
    bank.execute("CREATE TABLE odd (reason text)")
    bank.deposit(10)
    bank.deposit(1, -1000)
    stats = bank.process(on_error=lambda record, error: semel.TableRow({"reason": str(error)}, "odd"))
    assert stats.dead_letters == 0
    assert "accounts_balance_check" in bank.execute("SELECT reason FROM odd")[0][0]
    assert bank.total() == 10


@pytest.mark.parametrize(
    ("change", "kind", "remedy"),
    [
        ("DROP TABLE accounts", semel.DatabaseFatalError, "create the table"),
        ("ALTER TABLE accounts RENAME balance TO b", semel.DatabaseFatalError, "no such column"),
        (
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE disk_full; END $$;"
            "CREATE TRIGGER full_disk BEFORE UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION full_disk()",
            semel.DatabaseFatalError,
            "free space",
        ),
    ],
)
def test_what_no_retry_helps_ends_the_loop_without_any_effect(
    bank: Bank, change: str, kind: type[Exception], remedy: str
) -> None:
    bank.deposit(10)
    bank.execute(change)
    with pytest.raises(kind, match=remedy):
        bank.process()
    assert set(bank.offsets().values()) == {None}


def test_a_locked_table_is_waited_for(bank: Bank) -> None:
    bank.deposit(10)
    refused = threading.Event()
    with psycopg.connect(bank.dsn) as other:
        other.execute("LOCK TABLE accounts")
        loop = Processor(
            bank.topic,
            semel.Postgres(bank.dsn, lock_timeout_ms=50),
            deposit,
            application_id=bank.application_id,
            bootstrap_servers=bank.bootstrap,
            stop_at_end=True,
            on_settled=lambda stats: refused.set() if stats.aborts else None,
        )
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert refused.wait(PATIENCE_S), "the loop did not meet the lock"
        other.rollback()
        thread.join(PATIENCE_S)
    assert bank.total() == 10


@pytest.mark.parametrize(("when_behind", "total"), [("reprocess", RECORDS), ("skip", 0)])
def test_a_database_older_than_the_topics_is_refused_with_both_offsets(
    bank: Bank, when_behind: Any, total: int
) -> None:
    bank.deposit(RECORDS)
    bank.process()
    # As a backup of before: rows and offsets together.
    bank.execute("UPDATE accounts SET balance = 0; UPDATE semel.offsets SET next_offset = 0")
    with pytest.raises(semel.OlderDatabaseError, match=r"committed offset 100, semel\.offsets has 0.*reprocess"):
        bank.process()
    assert bank.total() == 0
    bank.process(sink=semel.Postgres(bank.dsn, when_behind=when_behind))
    assert bank.total() == total


def test_a_topic_that_ends_before_the_tables_offset_is_refused(bank: Bank) -> None:
    bank.deposit(10)
    bank.process()
    bank.execute("UPDATE semel.offsets SET next_offset = 1000")
    with pytest.raises(semel.OlderDatabaseError, match="at 1000, but the topic ends at 5"):
        bank.process()


def test_a_topic_that_was_created_anew_is_refused_although_it_has_grown_past_the_tables_offset(bank: Bank) -> None:
    bank.deposit(10)
    bank.process()
    with semel.Admin(bootstrap_servers=bank.bootstrap) as admin:
        admin.delete_topics(bank.topic)
    create_topic(bank.bootstrap, bank.topic, PARTITIONS)
    bank.deposit(30)
    with pytest.raises(semel.OlderDatabaseError, match=r"created anew.*delete the rows"):
        bank.process()
    bank.execute("DELETE FROM semel.offsets")
    bank.process()
    assert bank.total() == 10 + 30


def test_offsets_that_somebody_changed_under_the_loop_stop_it(bank: Bank) -> None:
    bank.deposit(RECORDS)

    def settled(stats: Any) -> None:
        if stats.commits == 2:
            bank.execute("UPDATE semel.offsets SET next_offset = 1")

    with pytest.raises(semel.DatabaseFatalError, match="changed by hand or the database was restored"):
        bank.process(max_records=20, on_settled=settled)


# --- rows ---


def test_rows_are_inserted_upserted_and_deleted_by_key_in_their_order(bank: Bank) -> None:
    bank.execute('CREATE SCHEMA shop; CREATE TABLE shop."Stock" (sku text PRIMARY KEY, n int, more jsonb)')
    bank.execute("CREATE TABLE log (sku text, more jsonb)")
    bank.execute('ALTER TABLE shop."Stock" DROP CONSTRAINT "Stock_pkey", ADD PRIMARY KEY (sku) INCLUDE (n)')
    bank.deposit(9, partitions=1)

    def rows(record: Any) -> Any:
        number = record.offset
        sku = f"s{number % 4}"
        if number == 3:
            return semel.TableRow({"sku": sku}, mode="delete")
        entry = {"sku": sku, "more": [{"at": number}, None]}
        return [{"sku": sku, "n": number, "more": {"at": number}}, semel.TableRow(entry, "log", "insert")]

    stats = bank.process(rows, sink=semel.Postgres(bank.dsn, table="shop.Stock", mode="upsert"))
    assert stats.records_out == 8 * 2 + 1
    assert bank.execute("SELECT more FROM log WHERE sku = 's0'")[0] == ([{"at": 0}, None],)
    assert bank.execute('SELECT sku, n, more FROM shop."Stock" ORDER BY 1') == [
        ("s0", 8, {"at": 8}),
        ("s1", 5, {"at": 5}),
        ("s2", 6, {"at": 6}),
        ("s3", 7, {"at": 7}),
    ]
    assert bank.execute("SELECT count(*) FROM log") == [(8,)]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (b"bytes", "expected None, a dict of columns"),
        ({"id": 1}, "names no table"),
        (semel.TableRow({"balance": 1}, "accounts", "upsert"), "lacks id"),
        (semel.TableRow({"id": 1}, "missing", "upsert"), "does not exist or has no primary key"),
        (semel.TableRow({}, "accounts"), "lacks all columns"),
        (semel.TableRow({"id": object()}, "accounts"), "cannot adapt"),
        (semel.TableRow({"id": 1}, 'x"; DROP TABLE y; --'), "invalid table name"),
    ],
)
def test_a_function_that_returns_nonsense_is_told_what_was_expected(bank: Bank, returned: Any, problem: str) -> None:
    bank.deposit(1)
    with pytest.raises(semel.KafkaError, match=problem):
        bank.process(lambda record: returned)
    assert bank.total() == 0


# --- columns instead of rows ---


ITEMS = """
CREATE TYPE mood AS ENUM ('fine');
CREATE TABLE items (id int PRIMARY KEY, n int CHECK (n < 1000), name text NOT NULL, mood mood, price numeric(10, 2),
    tags text[], doc jsonb, at timestamptz, never date)
"""


def items(table: Any) -> Any:
    """100 ids, each again and again. Offset 5 is a bug of the function, 17 breaks a constraint, 18 is no text."""
    offsets = table.column("offset").to_pylist()
    if 5 in offsets:
        raise ValueError("five")
    count = len(offsets)
    return pa.table(
        {
            "id": pa.array([offset % 100 for offset in offsets], pa.uint8()),
            "n": [1_000 if offset == 17 else offset for offset in offsets],
            "name": pa.array(["n\0" if offset == 18 else f"n{offset}" for offset in offsets]).dictionary_encode(),
            "mood": ["fine"] * count,
            "price": pa.array([Decimal(12)] * count, pa.decimal128(2, 0)),
            "tags": [["a", None]] * count,
            "doc": ['{"a": []}'] * count,
            "at": pa.array([0] * count, pa.timestamp("ns", "UTC")),
            "never": pa.nulls(count),
        }
    )


def test_tables_are_written_as_columns_and_their_bad_records_are_dead_letters(bank: Bank) -> None:
    bank.execute(ITEMS)
    bank.deposit(250, partitions=1)
    sink = semel.Postgres(bank.dsn, table="items", mode="upsert", dead_letters=True)
    stats = bank.process(items, sink=sink, tables=True)
    assert (stats.records_out, stats.dead_letters, bank.offsets()[0]) == (247, 3, 250)
    row = (49, 249, "n249", "fine", Decimal(12), ["a", None], {"a": []}, datetime.fromtimestamp(0, UTC), None)
    assert bank.execute("SELECT * FROM items WHERE id = 49") == [row], "the last one of a key counts"
    assert bank.execute("SELECT sum(n) FROM items") == [(sum(range(150, 250)),)]
    letters = bank.execute("SELECT record_offset, reason FROM semel.dead_letters ORDER BY 1")
    assert [offset for offset, _ in letters] == [5, 17, 18]
    for (_, reason), words in zip(letters, ("ValueError: five", "items_n_check", "0x00"), strict=True):
        assert words in reason


def test_tables_for_several_tables_and_what_on_error_makes_of_a_record(bank: Bank) -> None:
    bank.execute(ITEMS)
    bank.deposit(20, partitions=1)

    def function(table: Any) -> Any:
        return {"items": items(table).slice(0, 3), "accounts": pa.table({"id": table.column("offset")})}

    def instead(table: Any, error: Exception) -> Any:
        return {"items": pa.table({"id": [100 + table.column("offset")[0].as_py()], "name": [type(error).__name__]})}

    bank.execute("DELETE FROM accounts; ALTER TABLE accounts ALTER balance SET DEFAULT 1")
    stats = bank.process(function, sink=semel.Postgres(bank.dsn), tables=True, on_error=instead, max_records=7)
    assert (bank.total(), stats.dead_letters) == (19, 0)
    assert bank.execute("SELECT name FROM items WHERE id > 99") == [("ValueError",)]
    bank.deposit(20, partitions=1)
    sink = semel.Postgres(bank.dsn, table="accounts", mode="delete")
    bank.process(lambda table: pa.table({"id": [1, 2], "more": [1, 2]}), sink=sink, tables=True)
    assert bank.total() == 17


def test_tables_are_written_as_their_rows_would_be(bank: Bank) -> None:
    """A deferred constraint is checked when all rows of a record are there; of rows with one key the last one counts,
    however the key is spelt; lists without values have the type of their column."""
    bank.execute(
        "CREATE TABLE orders (id int PRIMARY KEY);"
        "CREATE TABLE items (id int REFERENCES orders DEFERRABLE INITIALLY DEFERRED);"
        "CREATE TABLE seen (id uuid PRIMARY KEY, n int, tags text[], times timestamp[])"
    )

    def related(table: Any) -> Any:
        offsets = table.column("offset").to_pylist()
        wanted = [-1 if offset == 1 else offset for offset in offsets]
        return {"items": pa.table({"id": wanted}), "orders": pa.table({"id": offsets})}

    bank.deposit(3, partitions=1)
    assert bank.process(related, sink=semel.Postgres(bank.dsn, dead_letters=True), tables=True).dead_letters == 1
    assert bank.execute("SELECT id FROM items JOIN orders USING (id) ORDER BY id") == [(0,), (2,)]

    def spelt(table: Any) -> Any:
        offsets = table.column("offset").to_pylist()
        ids = ["abcdefab-" * (offset % 2) or "ABCDEFAB-" for offset in offsets]
        times = pa.array([[2_000 + (offset == 4)] for offset in offsets], pa.list_(pa.timestamp("ns")))
        keys = [f"{each}0000-0000-0000-000000000000" for each in ids]
        return pa.table({"id": keys, "n": offsets, "tags": [[] for _ in offsets], "times": times})

    bank.deposit(4, partitions=1)
    sink = semel.Postgres(bank.dsn, table="seen", mode="upsert", dead_letters=True)
    assert bank.process(spelt, sink=sink, tables=True).dead_letters == 1
    assert bank.execute("SELECT n, tags, times FROM seen") == [(6, [], [datetime(1970, 1, 1, microsecond=2)])]
    reasons = bank.execute("SELECT reason FROM semel.dead_letters ORDER BY record_offset")
    assert ["items_id_fkey" in reasons[0][0], "would lose data" in reasons[1][0]] == [True, True]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([{"id": 1}], "expected None, a pyarrow.Table"),
        ({"id": pa.array([1])}, "expected None, a pyarrow.Table"),
        (pa.table({"id": [1], "balance": ["much"]}), "column 'balance' is string in the rows and integer in the table"),
        (pa.table({"balance": [1]}), "lack id"),
        (pa.table({"id": [1], "balance": [-1]}), "deposits-.*offset .*accounts_balance_check"),
        (pa.table({"id": pa.array([None], pa.int32()), "balance": [1]}), "key column 'id' is null"),
        ({"missing": pa.table({"id": [1]})}, "'missing' is not there"),
    ],
)
def test_tables_that_do_not_fit_end_the_loop_and_write_nothing(bank: Bank, returned: Any, problem: str) -> None:
    bank.deposit(1)
    sink = semel.Postgres(bank.dsn, table="accounts", mode="upsert")
    with pytest.raises(semel.KafkaError, match=problem):
        bank.process(lambda table: returned, sink=sink, tables=True)
    assert (bank.total(), bank.offsets()[0]) == (0, None)


def test_options_that_do_not_go_with_a_table_are_refused(bank: Bank) -> None:
    inbox = semel.Postgres(bank.dsn, event_id="id")
    for options in ({"guarantee": "at_least_once"}, {"dead_letter_topic": "dead"}, {"tables": True, "sink": inbox}):
        with pytest.raises(semel.ConfigError, match="Postgres sink"):
            bank.process(**options)
