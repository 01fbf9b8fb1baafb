"""PostgreSQL -> Kafka: semel's outbox relay, exactly once, beside the relay that people write by hand, at-least-once.

The peer reads the rows in the order of their ids, produces them by confluent-kafka (idempotent, acks=all), waits for
the answers, deletes the rows and commits; it looks every 10 ms. It writes rows again that it sent before it died, and
passes over rows whose transaction commits late: it is here for its speed.

    drain     rows of 20,000 transactions of ten, to an empty table: rows per second of wall time
    latency   1,000 rows a second in transactions of five, each relay a process of its own: from the moment before the
              INSERT until a consumer with read_committed has the record, median and 99th percentile
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg

import semel
from benchmarks.harness import Report, compare, interleave, rate
from semel.local.brokers import SemelBroker, semel_command
from semel.local.postgres import PostgresServer
from semel.local.processes import Process

BENCH = "outbox"
PEER = "relay by hand"
TOPIC, PARTITIONS = "announced", 4
ROWS, QUICK_ROWS, PER_TRANSACTION = 200_000, 20_000, 10
CHUNK, PEER_POLL_S = 5_000, 0.01
PER_S, AT_ONCE = 1_000, 5
WARM_S, MEASURED_S, QUICK_MEASURED_S = 2.0, 10.0, 3.0

FILL = """DO $$ BEGIN
    FOR number IN 1..{transactions} LOOP
        INSERT INTO semel.outbox (topic, key, value)
            SELECT '{topic}', convert_to(n::text, 'UTF8'), convert_to(repeat('x', 100), 'UTF8')
            FROM generate_series(1, {per_transaction}) AS n;
        COMMIT;
    END LOOP;
END $$"""


def run(report: Report, quick: bool = False) -> None:
    runs = 2 if quick else 5
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    with SemelBroker(folder) as broker, PostgresServer(durable=True) as server:
        with semel.Admin(bootstrap_servers=broker.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        dsn = server.create_database()
        semel.Outbox(dsn).init()
        _drain(report, broker.bootstrap, dsn, QUICK_ROWS if quick else ROWS, runs)
        _latency(report, broker.bootstrap, dsn, QUICK_MEASURED_S if quick else MEASURED_S, runs)


# --- how fast rows go ---
def _drain(report: Report, bootstrap: str, dsn: str, rows: int, runs: int) -> None:
    def once(relay: Callable[[], int]) -> float:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            transactions = rows // PER_TRANSACTION
            connection.execute(FILL.format(transactions=transactions, topic=TOPIC, per_transaction=PER_TRANSACTION))
            connection.execute("VACUUM ANALYZE semel.outbox")
            connection.execute("CHECKPOINT")
        sent = 0

        def work() -> None:
            nonlocal sent
            sent = relay()

        speed = rate(work, rows)
        assert sent == rows, f"{sent} of {rows} rows were sent"
        return speed

    contestants = {
        "semel": lambda: semel.Outbox(dsn, "bench", bootstrap_servers=bootstrap).run(until_empty=True).rows,
        PEER: lambda: by_hand(bootstrap, dsn, until_empty=True),
    }
    values = interleave({name: partial(once, relay) for name, relay in contestants.items()}, runs)
    compare(report, bench=BENCH, case=f"drain {rows:,} rows", unit="rows/s", values=values)


def by_hand(bootstrap: str, dsn: str, *, until_empty: bool = False) -> int:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 1})
    sent = 0
    with psycopg.connect(dsn) as connection:
        while True:
            rows = connection.execute(
                f"SELECT id, topic, key, value FROM semel.outbox ORDER BY id LIMIT {CHUNK} FOR UPDATE"
            ).fetchall()
            for _, topic, key, value in rows:
                producer.produce(topic, value, key)
                producer.poll(0)
            producer.flush()
            if rows:
                connection.execute("DELETE FROM semel.outbox WHERE id = ANY(%s)", [[row[0] for row in rows]])
            connection.commit()
            sent += len(rows)
            if not rows and until_empty:
                return sent
            if not rows:
                time.sleep(PEER_POLL_S)


# --- how soon a record is there ---
def _latency(report: Report, bootstrap: str, dsn: str, measured_s: float, runs: int) -> None:
    commands = {
        "semel": semel_command("outbox", "run", "--dsn", dsn, "--application-id", "bench", "-b", bootstrap),
        PEER: [sys.executable, "-m", "benchmarks.outbox", bootstrap, dsn],
    }
    tails: dict[str, list[float]] = {name: [] for name in commands}

    def once(name: str) -> float:
        with _running(commands[name]), Reader(bootstrap) as reader:
            insert(dsn, WARM_S)
            reader.await_rows(int(WARM_S * PER_S))
            first = len(reader.latencies_ms)
            insert(dsn, measured_s)
            reader.await_rows(first + int(measured_s * PER_S))
        cuts = statistics.quantiles(reader.latencies_ms[first:], n=100)
        tails[name].append(cuts[98])
        return cuts[49]

    values = interleave({name: partial(once, name) for name in commands}, runs, warmup=0)
    case = f"insert to visible, {PER_S:,} rows/s"
    compare(report, bench=BENCH, case=f"{case}, median", unit="ms", values=values, better="lower")
    compare(report, bench=BENCH, case=f"{case}, 99th percentile", unit="ms", values=tails, better="lower")


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    relay = Process(command)
    try:
        yield
    finally:
        relay.kill()


def insert(dsn: str, for_s: float) -> None:
    """At an even rate, by the clock; a row's value is the moment before its INSERT."""
    statement = "INSERT INTO semel.outbox (topic, key, value) SELECT %s, %s, %s FROM generate_series(1, %s)"
    with psycopg.connect(dsn, autocommit=True) as connection:
        started_s = time.monotonic()
        for number in range(int(for_s * PER_S / AT_ONCE)):
            time.sleep(max(0.0, started_s + number * AT_ONCE / PER_S - time.monotonic()))
            connection.execute(statement, [TOPIC, b"%d" % (number % 100), b"%d" % time.time_ns(), AT_ONCE])


class Reader:
    """Follows the topic in a thread and notes how old each record is when it comes."""

    def __init__(self, bootstrap: str) -> None:
        self.latencies_ms: list[float] = []
        self._consumer = semel.Consumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )
        self._partitions = [(TOPIC, number) for number in range(PARTITIONS)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="reader")

    def __enter__(self) -> Reader:
        self._consumer.assign(self._partitions)
        self._consumer.seek_to_end(*self._partitions)
        for partition in self._partitions:
            self._consumer.position(partition)  # from here on, before anything is inserted
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._consumer.close()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            records = self._consumer.poll(100)
            now_ns = time.time_ns()
            self.latencies_ms += [(now_ns - int(record.value or b"0")) / 1e6 for record in records]

    def await_rows(self, rows: int) -> None:
        deadline_s = time.monotonic() + 60
        while len(self.latencies_ms) < rows:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(self.latencies_ms)} of {rows} records came within 60 s")
            time.sleep(0.01)


if __name__ == "__main__":
    by_hand(*sys.argv[1:])
