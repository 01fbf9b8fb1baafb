"""F3: outbox: a table written in the application's own transaction is relayed to topics exactly once, per key in the
order of insertion, the rows of a transaction together. Topics are read by confluent-kafka."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

import semel
from semel.cli import main
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresServer
from semel.local.processes import Process
from semel.patterns import outbox as outbox_module
from semel.prove.database import PostgresProxy
from semel.prove.injection import Injection, command
from semel.sinks.postgres import outbox_table
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, until


class Shop:
    """An application with an outbox, and two topics."""

    def __init__(self, cluster: Cluster, dsn: str) -> None:
        self.bootstrap, self.dsn = cluster.bootstrap, dsn
        self.application_id = cluster.unique("shop")
        self.topics = [create_topic(self.bootstrap, cluster.unique("out"), 2) for _ in range(2)]
        self.outbox().init()

    def outbox(self, **options: Any) -> semel.Outbox:
        dsn = options.pop("dsn", self.dsn)
        return semel.Outbox(dsn, self.application_id, bootstrap_servers=self.bootstrap, **options)

    def relay(self, **options: Any) -> Any:
        return self.outbox(**options).run(until_empty=True)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn)

    def insert(self, connection: Any, value: str, key: str = "k", topic: int = 0) -> None:
        self.outbox().send(connection, self.topics[topic], value, key)

    def insert_many(self, count: int, rows_each: int = 1) -> list[str]:
        values = [f"v{number}" for number in range(count)]
        with self.connect() as connection:
            for number, value in enumerate(values):
                self.insert(connection, value, f"k{number % 7}", number % 2)
                if (number + 1) % rows_each == 0:
                    connection.commit()
        return values

    def values(self, topic: int = 0) -> list[str]:
        return [(seen.value or b"").decode() for seen in read_topic(self.bootstrap, self.topics[topic])]

    def all_values(self) -> list[str]:
        return sorted(self.values(0) + self.values(1))

    def rows(self) -> int:
        return self.query("SELECT count(*) FROM semel.outbox")[0][0]

    def query(self, statement: str) -> list[Any]:
        with self.connect() as connection:
            return connection.execute(statement).fetchall()


@pytest.fixture
def shop(shared_semel_broker: SemelBroker, dsn: str) -> Shop:
    return Shop(Cluster("semel", shared_semel_broker), dsn)


class Running:
    """A relay in a thread, which ends with the block."""

    def __init__(self, outbox: semel.Outbox) -> None:
        self._outbox = outbox
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._outbox.run()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.stop()
        self.wait()


def test_rows_reach_their_topics_as_they_are_and_leave_the_table(shop: Shop) -> None:
    with shop.connect() as connection:
        outbox = shop.outbox()
        outbox.send(connection, shop.topics[0], b"\x00\xff", "k", headers=[("a", b"1"), ("a", None)], partition=1)
        outbox.send(connection, shop.topics[0], None, b"gone")
        connection.execute(
            "SELECT semel.outbox_send(%s, 'k', %s, %s)", [shop.topics[1], '{"a": "\\\\"}', '{"x": "y", "b": "c"}']
        )
    with shop.connect() as connection:
        shop.insert(connection, "rolled back")
        connection.rollback()
    stats = shop.relay()
    assert (stats.rows, stats.set_aside, shop.rows()) == (3, 0, 0)
    first, second = sorted(read_topic(shop.bootstrap, shop.topics[0]), key=lambda seen: seen.value is None)
    assert (first.partition, first.key, first.value) == (1, b"k", b"\x00\xff")
    assert first.headers == [("a", b"1"), ("a", None)]
    assert (second.key, second.value) == (b"gone", None), "a tombstone"
    (third,) = read_topic(shop.bootstrap, shop.topics[1])
    assert (third.value, third.headers) == (b'{"a": "\\\\"}', [("b", b"c"), ("x", b"y")])


def test_a_row_with_a_lower_id_that_commits_later_is_not_skipped(shop: Shop) -> None:
    """The gap trap."""
    with shop.connect() as late, shop.connect() as early, Running(shop.outbox()):
        shop.insert(late, "late, lower id")
        shop.insert(early, "early, higher id", "other")
        early.commit()
        time.sleep(0.3)  # nothing may happen, for which there is no sign
        assert shop.values() == [], "a transaction that began before is still open"
        late.commit()
        until(lambda: len(shop.values()) == 2, "the rows did not come")
    assert sorted(shop.values()) == ["early, higher id", "late, lower id"]


def test_a_row_does_not_pass_one_of_its_key_that_was_inserted_before(shop: Shop) -> None:
    """The reorder trap: 5 begins; 10 inserts K and commits; 5 inserts K and commits; 7 is still open."""
    with shop.connect() as five, shop.connect() as seven, shop.connect() as ten, Running(shop.outbox()):
        xids = [one.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0] for one in (five, seven, ten)]
        assert xids == sorted(xids)
        shop.insert(ten, "first")
        ten.commit()
        shop.insert(five, "second")
        five.commit()
        time.sleep(0.3)
        assert shop.values() == [], "the first one waits for 7, and the second one for the first"
        seven.rollback()
        until(lambda: len(shop.values()) == 2, "the rows did not come")
    assert shop.values() == ["first", "second"]


def test_the_rows_of_a_transaction_are_never_split_over_two_kafka_transactions(shop: Shop) -> None:
    """Also where it has more rows than a chunk: a reader sees all or nothing of it."""
    with shop.connect() as connection:
        shop.insert(connection, "one before")
        connection.commit()
        for number in range(40):
            shop.insert(connection, f"big {number:02}")
        connection.commit()
        shop.insert(connection, "one after")
    chunks: list[int] = []
    shop.relay(max_rows=4, on_chunk=lambda stats: chunks.append(stats.rows))
    assert [number for number in chunks if 1 < number < 41] == [], "a part of the transaction was a chunk"
    assert shop.values() == ["one before", *(f"big {number:02}" for number in range(40)), "one after"]


def test_a_relay_that_was_stopped_can_run_again(shop: Shop) -> None:
    outbox = shop.outbox()
    with Running(outbox):
        sent = shop.insert_many(1)
        until(lambda: shop.all_values() == sent)
    with Running(outbox):
        sent = sorted(sent + shop.insert_many(2))
        until(lambda: shop.all_values() == sent)
    until(lambda: not shop.rows())


def test_a_notification_wakes_the_relay(shop: Shop) -> None:
    with Running(shop.outbox(poll_interval_ms=600_000)) as relay:
        until(lambda: shop.query("SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN semel_outbox'"))
        with shop.connect() as connection:
            shop.insert(connection, "notified")
        until(lambda: shop.values() == ["notified"], "the notification did not wake it")
        with shop.connect() as connection:
            relay._outbox.stop()
            connection.execute("SELECT pg_notify('semel_outbox', '')")  # it looks, and sees that it shall stop


def test_polling_finds_rows_without_a_notification(shop: Shop) -> None:
    with shop.connect() as connection:
        connection.execute("ALTER TABLE semel.outbox DISABLE TRIGGER outbox_notify")
    with Running(shop.outbox(poll_interval_ms=20)), shop.connect() as connection:
        shop.insert(connection, "polled")
        connection.commit()
        until(lambda: shop.values() == ["polled"], "polling did not find it")


def test_a_second_relay_takes_over_and_the_first_one_stops(shop: Shop) -> None:
    with Running(shop.outbox(poll_interval_ms=20)) as first:
        until(lambda: shop.query("SELECT generation FROM semel.owners") == [(1,)])
        with Running(shop.outbox(poll_interval_ms=20)):
            until(lambda: shop.query("SELECT generation FROM semel.owners") == [(2,)])
            values = []
            while first.error is None:
                values += shop.insert_many(5)
            until(lambda: len(shop.all_values()) >= len(values))
    assert isinstance(first.error, semel.FencedError)
    assert shop.all_values() == sorted(values)


PLAY = """
CREATE TABLE counters (key int PRIMARY KEY, n bigint NOT NULL);
INSERT INTO counters SELECT key, 0 FROM generate_series(1, 20) AS key;
CREATE PROCEDURE play(commits int, topic_name text) LANGUAGE plpgsql AS $$
DECLARE
    chosen int; number bigint;
BEGIN
    FOR turn IN 1..commits LOOP
        IF turn % 50 = 0 THEN
            PERFORM pg_current_xact_id();  -- a long one: it has its number before the others that overtake it
            PERFORM pg_sleep(0.02);
        END IF;
        chosen := 1 + (random() * 19)::int;
        UPDATE counters SET n = n + 1 WHERE key = chosen RETURNING n INTO number;
        INSERT INTO semel.outbox (topic, key, value)
            VALUES (topic_name, convert_to(chosen::text, 'UTF8'), convert_to(number::text, 'UTF8'));
        IF turn % 10 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
    END LOOP;
END $$
"""


def test_of_interleaved_commits_and_rollbacks_none_is_skipped_and_none_out_of_order(shop: Shop) -> None:
    """Writers count under a lock per key: the values of each key must come as 1, 2, 3, ... A million: see below."""
    writers, commits = 4, 600
    with shop.connect() as connection:
        connection.execute(PLAY)

    def write() -> None:
        with psycopg.connect(shop.dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute("CALL play(%s, %s)", [commits // writers, shop.topics[0]])

    threads = [threading.Thread(target=write, daemon=True) for _ in range(writers)]
    with Running(shop.outbox(max_rows=20)) as relay:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: shop.rows() == 0 or relay.error is not None, "rows are left")
    assert relay.error is None
    seen: dict[bytes | None, list[int]] = {}
    for record in read_topic(shop.bootstrap, shop.topics[0]):
        seen.setdefault(record.key, []).append(int(record.value or b""))
    wrong = {key: values[:50] for key, values in seen.items() if values != list(range(1, len(values) + 1))}
    assert wrong == {}
    expected = {str(key).encode(): n for key, n in shop.query("SELECT key, n FROM counters WHERE n > 0")}
    assert {key: len(values) for key, values in seen.items()} == expected
    assert sum(expected.values()) == commits * 9 // 10


# --- crashes ---


@pytest.mark.parametrize(
    "point",
    [
        "outbox.after_commit",
        pytest.param("outbox.before_commit", marks=pytest.mark.full),
        pytest.param("postgres.after_commit", marks=pytest.mark.full),
    ],
)
def test_a_relay_that_dies_at_any_point_sends_nothing_twice(shop: Shop, point: str) -> None:
    """before_commit: the Kafka transaction is open. after_commit: the database does not know yet that it is sent."""
    values = shop.insert_many(60, rows_each=3)
    words = ["-m", "semel", "outbox", "run", "--dsn", shop.dsn, "--application-id", shop.application_id]
    words += ["--brokers", shop.bootstrap, "--max-rows", "9", "--until-empty"]
    with Process(command(Injection(f"{point}:kill:3"), *words)) as relay:
        assert relay.wait(PATIENCE_S) < 0, relay.output
    assert 0 < shop.rows() <= 60, "it died in the middle"
    assert shop.relay().rows > 0
    assert (shop.all_values(), shop.rows()) == (sorted(values), 0)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_connection_that_breaks_while_sent_rows_are_removed_sends_nothing_twice(
    shop: Shop, postgres: PostgresServer, kind: Any
) -> None:
    values = shop.insert_many(60)
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        through = shop.dsn.replace(f":{postgres.port}/", f":{proxy.port}/")
        stats = shop.relay(
            dsn=through, max_rows=10, on_chunk=lambda stats: proxy.arm(kind, skip=1) if stats.chunks == 2 else None
        )
        assert proxy.cuts == 1
        assert (stats.retries > 0) == (kind == "before")
    assert shop.all_values() == sorted(values)


def test_the_database_and_the_broker_may_die_under_the_relay(
    mortal_postgres: PostgresServer, semel_broker: SemelBroker
) -> None:
    shop = Shop(Cluster("semel", semel_broker), mortal_postgres.create_database())
    values = shop.insert_many(80)

    def kill_broker() -> None:
        semel_broker.kill()
        semel_broker.start()

    def kill_database() -> None:
        mortal_postgres.kill()
        mortal_postgres.start()

    deaths = {2: kill_database, 3: kill_broker, 4: lambda: mortal_postgres.restart("immediate")}
    stats = shop.relay(max_rows=10, on_chunk=lambda stats: deaths.pop(stats.chunks, lambda: None)())
    assert not deaths
    assert stats.retries >= 2
    assert shop.all_values() == sorted(values)


def test_a_frozen_relay_that_was_replaced_can_neither_send_nor_remove(shop: Shop) -> None:
    values = shop.insert_many(40)
    words = ["-m", "semel", "outbox", "run", "--dsn", shop.dsn, "--application-id", shop.application_id]
    words += ["--brokers", shop.bootstrap, "--max-rows", "10"]
    with Process([sys.executable, *words]) as frozen:
        until(lambda: shop.rows() < 40)
        frozen.pause()
        shop.relay()
        with shop.connect() as connection:
            shop.insert(connection, "later")
        frozen.resume()
        assert frozen.wait(PATIENCE_S) == 1
        assert "took over" in frozen.output or "fenced" in frozen.output.lower(), frozen.output
    shop.relay()
    assert shop.all_values() == sorted([*values, "later"])


# --- bad input ---


def test_rows_that_cannot_be_sent_are_set_aside_with_the_reason(shop: Shop) -> None:
    with shop.connect() as connection:
        outbox = shop.outbox()
        shop.insert(connection, "good")
        outbox.send(connection, "no-such-topic", "x")
        outbox.send(connection, "not a topic's name", "x")
        outbox.send(connection, shop.topics[0], "x", partition=99)
        outbox.send(connection, shop.topics[0], b"x" * 2_000_000)
        shop.insert(connection, "also good")
    stats = shop.relay(missing_topic_timeout_ms=300)
    assert (stats.rows, stats.set_aside, shop.rows()) == (2, 4, 0)
    assert shop.values() == ["good", "also good"]
    reasons = " ".join(reason for (reason,) in shop.query("SELECT reason FROM semel.outbox_set_aside"))
    for words in ("no-such-topic", "not a topic", "partition 99", "max.request.size"):
        assert words in reasons


def test_a_record_that_the_broker_finds_too_large_is_set_aside_alone(
    shop: Shop, shared_semel_broker: SemelBroker
) -> None:
    small = create_topic(shop.bootstrap, f"{shop.topics[0]}-small", 1, max_message_bytes="20000")
    with shop.connect() as connection:
        for number in range(10):
            size = 50_000 if number in (3, 7) else 1_000
            shop.outbox().send(connection, small, bytes([number]) * size)
    stats = shop.relay()
    assert (stats.rows, stats.set_aside) == (8, 2)
    assert [seen.value[0] for seen in read_topic(shop.bootstrap, small)] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert shop.query("SELECT count(*) FROM semel.outbox_set_aside WHERE get_byte(value, 0) IN (3, 7)") == [(2,)]


def test_one_row_that_nobody_can_send_does_not_hold_up_the_others(shop: Shop) -> None:
    compacted = create_topic(shop.bootstrap, f"{shop.topics[0]}-compacted", 1, cleanup_policy="compact")
    strict = create_topic(shop.bootstrap, f"{shop.topics[0]}-strict", 1, message_timestamp_after_max_ms="3600000")
    bad = {
        "without a key": f"(topic, value) VALUES ('{compacted}', 'x')",
        "too late": f"(topic, created_at) VALUES ('{strict}', now() + interval '1 day')",
        "internal": "(topic) VALUES ('__consumer_offsets')",
        "the relay's": f"(topic) VALUES ('{shop.application_id}.outbox')",
        "no header": f"(topic, header_names, header_values) VALUES ('{strict}', '{{NULL}}', '{{NULL}}')",
        "names": f"(topic, header_names, header_values) VALUES ('{strict}', '{{{{a,b}}}}', '{{a,b}}')",
        "values": f"(topic, header_names, header_values) VALUES ('{strict}', '{{a,b}}', '{{{{a,b}}}}')",
    }
    with shop.connect() as connection:
        for row in bad.values():
            connection.execute(f"INSERT INTO semel.outbox {row}")
        shop.insert(connection, "good")
    stats = shop.relay()
    assert (stats.rows, stats.set_aside) == (1, len(bad))
    assert shop.values() == ["good"]
    shop.relay()  # its own topic can be read


def test_many_rows_that_nobody_can_send_are_found_at_once(shop: Shop) -> None:
    """Each of them took an attempt, in which every row of the chunk was a batch of its own: minutes, or for ever where
    that exceeded the transaction's timeout."""
    compacted = create_topic(shop.bootstrap, f"{shop.topics[0]}-compacted", 1, cleanup_policy="compact")
    with shop.connect() as connection:
        for number in range(300):
            shop.outbox().send(connection, compacted, b"%d" % number, None if number % 5 == 0 else b"key")
    stats = shop.relay()
    assert (stats.rows, stats.set_aside, stats.retries) == (240, 60, 1)
    assert [int(seen.value) for seen in read_topic(shop.bootstrap, compacted)] == [n for n in range(300) if n % 5]
    (reason,) = shop.query("SELECT DISTINCT reason FROM semel.outbox_set_aside")
    assert "INVALID_RECORD (Compacted topic cannot accept message without key" in reason[0]


def test_a_topic_is_awaited_once_however_many_rows_name_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rows of a misspelled topic would hold up all others for hours."""
    asked: list[tuple[str, int]] = []

    class Counting(semel.Consumer):
        def partitions_for(self, topic: str, *args: Any) -> Any:
            asked.extend((topic, timeout_ms) for timeout_ms in args)
            return super().partitions_for(topic, 100)

    monkeypatch.setattr(outbox_module, "Consumer", Counting)
    with shop.connect() as connection:
        for _ in range(20):
            shop.outbox().send(connection, "misspelled", "x")
            shop.outbox().send(connection, shop.topics[0], "x", partition=7)
        shop.insert(connection, "good")
    outbox = shop.outbox(missing_topic_timeout_ms=60_000)
    stats = outbox.run(until_empty=True)
    assert (stats.rows, stats.set_aside, shop.values()) == (1, 40, ["good"])
    assert asked == [("misspelled", 60_000), (shop.topics[0], 60_000)]
    with shop.connect() as connection:
        outbox.send(connection, "misspelled", "x")
    assert outbox.run(until_empty=True).set_aside == 41
    assert asked[2:] == [("misspelled", 500)]


@pytest.mark.parametrize("at", ["infinity", "-infinity", "1960-01-01", "0044-03-15 BC"])
def test_a_time_that_kafka_cannot_hold_is_replaced_by_the_current_one(shop: Shop, at: str) -> None:
    with shop.connect() as connection:
        connection.execute(
            "INSERT INTO semel.outbox (topic, value, created_at) VALUES (%s, 'x', %s)", [shop.topics[0], at]
        )
    assert shop.relay().rows == 1
    assert shop.values() == ["x"]


def test_the_rows_of_a_topic_that_was_deleted_are_set_aside(shop: Shop) -> None:
    outbox = shop.outbox(missing_topic_timeout_ms=300, producer={"delivery.timeout.ms": 1_000, "max.block.ms": 1_000})
    with Running(outbox) as running:
        with shop.connect() as connection:
            shop.insert(connection, "before")
        until(lambda: not shop.rows())
        admin = AdminClient({"bootstrap.servers": shop.bootstrap})
        admin.delete_topics([shop.topics[0]])[shop.topics[0]].result()
        with shop.connect() as connection:
            shop.insert(connection, "after")
            shop.insert(connection, "of another topic", topic=1)
        until(lambda: not shop.rows())
        assert running.error is None
    assert shop.values(1) == ["of another topic"]
    assert shop.query("SELECT convert_from(value, 'UTF8') FROM semel.outbox_set_aside") == [("after",)]


def test_rows_of_a_dump_do_not_wait_for_transactions_of_another_server(shop: Shop) -> None:
    """pg_dump keeps the ids of the transactions, and a new server counts from the beginning."""
    with shop.connect() as connection:
        connection.execute(
            "INSERT INTO semel.outbox (topic, key, value, transaction_id) VALUES (%s, 'k', 'dumped', '4000000000')",
            [shop.topics[0]],
        )
        shop.insert(connection, "new")
    with Running(shop.outbox()):
        until(lambda: not shop.rows())
    assert shop.values() == ["dumped", "new"]


def test_large_rows_are_few_to_a_chunk_and_a_transaction_of_them_is_whole(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog of max_rows large rows would not fit into memory, after every start anew."""
    monkeypatch.setattr(outbox_table, "WINDOW_BYTES", 10_000)
    values = [f"{number:02}{'x' * 4_000}" for number in range(30)]
    with shop.connect() as connection:
        for number, value in enumerate(values):
            shop.insert(connection, value)
            if not 10 <= number < 20:
                connection.commit()
    chunks: list[int] = []
    shop.relay(on_chunk=lambda stats: chunks.append(stats.rows))
    assert shop.values() == values
    assert chunks[:3] == [3, 6, 9]
    assert [number for number in chunks if 10 < number < 21] == [], "a part of the transaction was a chunk"


def test_the_ids_of_a_chunk_need_not_fit_into_one_record(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large transactions that insert at the same time have every second id each."""
    with shop.connect() as connection:
        connection.execute(
            "INSERT INTO semel.outbox (id, topic, key, value) OVERRIDING SYSTEM VALUE SELECT 2 * n, %s, 'k', "
            "convert_to(n::text, 'UTF8') FROM generate_series(1, 3000) AS n",
            [shop.topics[0]],
        )
    small = {"producer": {"max.request.size": 20_000}}
    outbox = shop.outbox(**small)
    monkeypatch.setattr(outbox, "_relay", dying_after_commit(outbox))
    with pytest.raises(Died):
        outbox.run()
    assert shop.rows() == 3000, "they are in the topic, and the database does not know it"
    stats = shop.relay(**small)
    assert (stats.rows, shop.rows()) == (0, 0)
    assert shop.values() == [str(number) for number in range(1, 3001)]


class Died(Exception):
    pass


def dying_after_commit(outbox: Any) -> Any:
    def relay(rows: Any) -> None:
        outbox._send(1, rows)
        raise Died

    return relay


def test_a_prepared_transaction_that_rows_wait_for_is_named(postgres_installation: Path) -> None:
    """It has no process, and nobody finishes it by itself."""
    with PostgresServer({"max_prepared_transactions": "2"}) as server:
        outbox = semel.Outbox(server.dsn())
        outbox.init()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("BEGIN")
            connection.execute("CREATE TABLE anything ()")
            connection.execute("PREPARE TRANSACTION 'forgotten'")
        status = outbox.status()
        outbox.close()
    assert "prepared transaction 'forgotten'" in (status.held_by or "")


def test_what_was_sent_is_on_disk_although_the_application_does_not_wait_for_it(
    shared_semel_broker: SemelBroker, postgres_installation: Path
) -> None:
    """Else the row is lost by a crash of the server, and its id is given to another one, which the relay then removes
    as sent."""
    with PostgresServer({"wal_writer_delay": "10s", "synchronous_commit": "off"}) as server:
        shop = Shop(Cluster("semel", shared_semel_broker), server.dsn())
        words = ["-m", "semel", "outbox", "run", "--dsn", shop.dsn, "--application-id", shop.application_id]
        with Process(command(Injection("outbox.after_commit:kill"), *words, "--brokers", shop.bootstrap)) as relay:
            until(lambda: shop.query("SELECT FROM pg_stat_activity WHERE application_name LIKE '%listener%'"))
            with shop.connect() as connection:
                shop.insert(connection, "sent")
            assert relay.wait(PATIENCE_S) < 0, relay.output
        server.restart("immediate")
        assert (shop.values(), shop.rows()) == (["sent"], 1)


def test_a_restored_database_is_refused_with_both_numbers(shop: Shop) -> None:
    shop.insert_many(30)
    shop.relay(max_rows=10)
    with shop.connect() as connection:
        connection.execute("UPDATE semel.outbox_progress SET chunk = 1")
    with pytest.raises(semel.OutboxProgressError, match=r"chunk 1 as its last one.*chunk 3.*accept_database=True"):
        shop.relay()
    with shop.connect() as connection:
        connection.execute("DELETE FROM semel.outbox_progress")
    with pytest.raises(semel.OutboxProgressError, match="no chunk"):
        shop.relay()
    shop.relay(accept_database=True)
    with shop.connect() as connection:
        shop.insert(connection, "on it goes")
    shop.relay()
    assert "on it goes" in shop.all_values()


def test_rows_that_got_the_ids_of_sent_ones_are_not_taken_for_them(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fail-over to a replica that lacks the last transactions: their ids are given again, the relay has sent them."""
    with shop.connect() as connection:
        for value in ("sent and lost", "sent and lost, too"):
            shop.insert(connection, value)
    outbox = shop.outbox()
    monkeypatch.setattr(outbox, "_relay", dying_after_commit(outbox))
    with pytest.raises(Died):
        outbox.run()
    with shop.connect() as connection:
        connection.execute("DELETE FROM semel.outbox; ALTER TABLE semel.outbox ALTER id RESTART")
    with shop.connect() as connection:
        shop.insert(connection, "inserted after the fail-over")
    with pytest.raises(semel.OutboxProgressError, match=r"chunk 1.*other rows.*accept_database=True"):
        shop.relay()
    assert shop.rows() == 1
    shop.relay(accept_database=True)
    assert shop.values() == ["sent and lost", "sent and lost, too", "inserted after the fail-over"]


def test_two_names_for_one_outbox_are_refused(shop: Shop) -> None:
    shop.relay()
    shop.application_id += "-other"
    with pytest.raises(semel.ConfigError, match="both send every row"):
        shop.relay()


def test_the_command_line(shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_DSN", shop.dsn)
    shop.insert_many(5)
    assert main(["outbox", "init", "--json"]) == 0
    assert main(["outbox", "status"]) == 0
    assert "waiting        5 rows" in capsys.readouterr().out
    run = ["outbox", "run", "--application-id", shop.application_id, "--brokers", shop.bootstrap, "--until-empty"]
    assert main([*run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 5
    assert main(["outbox", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["waiting_rows"], status["sent_rows"]) == (0, 5)
    assert main(["outbox", "status", "--schema", "elsewhere"]) == 1
    assert "`semel outbox init` creates it" in capsys.readouterr().err
    monkeypatch.delenv("SEMEL_DSN")
    assert main(["outbox", "status", "--dsn", ""]) == 2


# --- a million ---
COMMITS, SESSIONS, COUNTERS, LONG_ONES = 1_000_000, 8, 64, 40
FLOOD = """
CREATE TABLE counters (key int PRIMARY KEY, n int NOT NULL) WITH (fillfactor = 10);
INSERT INTO counters SELECT key, 0 FROM generate_series(0, {counters}) AS key;
CREATE PROCEDURE flood(times int) LANGUAGE plpgsql AS $$
DECLARE chosen int; number int;
BEGIN
    FOR i IN 1..times LOOP
        chosen := floor(random() * {counters});
        UPDATE counters SET n = n + 1 WHERE key = chosen RETURNING n INTO number;
        INSERT INTO semel.outbox (topic, key, value)
            VALUES ('{topic}', convert_to(chosen::text, 'UTF8'), convert_to(number::text, 'UTF8'));
        COMMIT;
    END LOOP;
END $$
"""


def hold_back(shop: Shop, stop: threading.Event) -> int:
    """Transactions that take their ids, and their numbers under a lock, long before they commit; how many."""
    done = 0
    with shop.connect() as connection, shop.connect() as looking:
        looking.autocommit = True
        while not stop.is_set():
            for topic in (0, 0, 1):
                connection.execute("UPDATE counters SET n = n + 1 WHERE key = %s", [COUNTERS])
                shop.insert(connection, f"{done}", "long", topic)
            (before,) = looking.execute("SELECT last_value FROM semel.outbox_id_seq").fetchone() or (0,)
            while not stop.wait(0.01):
                (now,) = looking.execute("SELECT last_value FROM semel.outbox_id_seq").fetchone() or (0,)
                if now > before + COMMITS // LONG_ONES // 2:
                    break
            connection.commit()
            done += 1
    return done


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_of_a_million_interleaved_commits_none_is_skipped_and_none_out_of_order(
    shared_semel_broker: SemelBroker, dsn: str
) -> None:
    """Sessions commit in turns that the machine chooses, each key under a lock that gives its rows their numbers; other
    transactions stay open over thousands of commits. The relay runs all the time."""
    shop = Shop(Cluster("semel", shared_semel_broker), dsn)
    with shop.connect() as connection:
        connection.execute("ALTER TABLE semel.outbox DISABLE TRIGGER outbox_notify")
        connection.execute(FLOOD.format(counters=COUNTERS, topic=shop.topics[0]))

    def session(_: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute("CALL flood(%s)", [COMMITS // SESSIONS])

    stop = threading.Event()
    with Running(shop.outbox(poll_interval_ms=20)), ThreadPoolExecutor(SESSIONS + 1) as pool:
        long_ones = pool.submit(hold_back, shop, stop)
        try:
            list(pool.map(session, range(SESSIONS)))
        finally:
            stop.set()
        held = long_ones.result()
        until(
            lambda: shop.query("SELECT NOT EXISTS (SELECT FROM semel.outbox)") == [(True,)],
            "the relay did not send everything",
            timeout_s=1_200,
        )
    assert held >= LONG_ONES // 2, "too few transactions were long"
    numbers: dict[bytes, list[int]] = {}
    for seen in read_topic(shop.bootstrap, shop.topics[0]):
        numbers.setdefault(seen.key or b"", []).append(int(seen.value or b""))
    assert numbers.pop(b"long") == [number for number in range(held) for _ in range(2)]
    assert sum(map(len, numbers.values())) == COMMITS
    for key, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), f"key {key!r} has gaps, or another order"
    assert shop.values(1) == [str(number) for number in range(held)]
