"""The programs that a campaign runs and kills: `python -m semel.prove.workers NAME JSON`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semel.client.errors import FencedError, KafkaError
from semel.client.producer import Producer
from semel.patterns.process import Output, Processor
from semel.patterns.state import KeyedState
from semel.prove import pattern_workers
from semel.prove.checker.reading import read
from semel.prove.inputs import ABORT_EVERY, aborted_records, records_of, tag_of, transaction_of
from semel.prove.table_workloads import event_of
from semel.prove.testbed import SHOWS_STACKS
from semel.prove.workloads import load_function

# --- producer: fills the source in transactions ---
#
# Each transaction has a number and numbered records; some are preceded by one that is aborted. It notes in a file which
# one was acknowledged last, as an application does in its database, and never sends it again: what is acknowledged must
# be there. After a crash it also looks in the topic, through a client that is not ours, for what was committed without
# a response, and goes on from there.


FAILURES_MAX = 5


def produce(options: dict[str, Any]) -> int:
    failures = 0
    while True:
        records = read(options["direct"], [options["topic"]])
        committed = max((transaction_of(record) or 0 for record in records), default=-1)
        done = max(committed, _acknowledged(options["state"]))
        if done + 1 >= options["upto"]:
            print(f"fed {done + 1}", flush=True)
            return 0
        try:
            _feed(options, done + 1)
        except KafkaError as error:
            failures += 1
            print(f"again after {type(error).__name__}: {error}", flush=True)
            if failures > FAILURES_MAX:
                return 3
            time.sleep(0.2)


def _acknowledged(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except FileNotFoundError:
        return -1


def _acknowledge(path: str, number: int) -> None:
    aside = Path(path + ".new")
    aside.write_text(str(number))
    aside.rename(path)


def _feed(options: dict[str, Any], first: int) -> None:
    """From a transaction on, in order. An error leaves it to the next start to see what is committed."""
    producer = Producer(
        bootstrap_servers=options["brokers"],
        transactional_id=options["transactional_id"],
        transaction_timeout_ms=10_000,
        client_id="producer",
        request_timeout_ms=2_500,
        linger_ms=0,
    )
    try:
        producer.init_transactions(timeout_ms=30_000)
        print("working", flush=True)
        for number in range(first, options["upto"]):
            if number % ABORT_EVERY == ABORT_EVERY - 1:
                _transaction(producer, options["topic"], number, aborted_records(number), commit=False)
            _transaction(producer, options["topic"], number, records_of(number), commit=True)
            _acknowledge(options["state"], number)
            time.sleep(options["pace_ms"] / 1000)
    finally:
        producer.close(timeout_ms=5000)


def _transaction(producer: Producer, topic: str, number: int, records: list[tuple[bytes, bytes]], commit: bool) -> None:
    producer.begin_transaction()
    for key, value in records:
        producer.send(topic, value, key, headers=[("txn", tag_of(number).encode())])
    if commit:
        producer.commit_transaction(timeout_ms=20_000)
    else:
        producer.flush(timeout_ms=20_000)
        producer.abort_transaction(timeout_ms=20_000)


# --- loop: an instance of the processing loop. Copies, and names the unit of work ---
FENCED = 3


class Copier:
    """Each record goes on as it is, with a header that names the unit of work."""

    def __init__(self, name: str, delay_s: float) -> None:
        self._name = f"{name}-{os.getpid()}"
        self._unit = 0
        self._delay_s = delay_s

    def __call__(self, record: Any) -> Output:
        if self._delay_s:
            time.sleep(self._delay_s)
        return Output(record.value, record.key, headers=[("txn", f"{self._name}-{self._unit}".encode())])

    def settled(self, stats: Any) -> None:
        if not self._unit:
            print("working", flush=True)
        self._unit += 1


def run_loop(options: dict[str, Any], state: KeyedState | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop has its own handler there is nothing to end
    copier = KeyCounter(options["instance"], options.pop("delay_ms") / 1000)
    function = copier if state is None else copier.count
    source, sink = options.pop("source"), options.pop("sink")
    try:
        Processor(source, sink, function, on_settled=copier.settled, state=state, **options).run()
    except FencedError as error:
        print(f"fenced: {error}", flush=True)
        return FENCED
    return 0


class KeyCounter(Copier):
    """Counts the records of each key, with state."""

    def count(self, record: Any, state: Any) -> Output:
        total = state.get(record.key, 0) + 1
        state.put(record.key, total)
        return self(record)._replace(value=b"%d" % total)


def run_counting_loop(options: dict[str, Any]) -> int:
    state = KeyedState("counts", format="int64", directory=options.pop("directory"))
    return run_loop(options, state)


# --- spark: a query as users write it, from topic to topic ---
#
# copy        rows keep their keys and their order
# any_order   rows without keys that a step may give in any order, and that go to either of two topics
# count       a stateful query: how often each key was seen
# routed      copy, written with writeStream.format("semel") in place of foreachBatch


def run_spark(job: dict[str, Any]) -> int:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    import semel

    builder = SparkSession.builder.master(job["master"]).config("spark.ui.enabled", "false")
    for name, value in job["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", job["brokers"]).options(**job["source"])
    if job["query"] == "routed":
        writer = _routed(rows.load(), job)
    elif job["query"] in ("table", "both"):
        into = _postgres_sink(job)
        rows = rows.option("committedOffsets", into.committed_offsets())
        columns = (["key"] if job["query"] == "both" else []) + ["cast(value AS string) AS value"]
        writer = rows.load().selectExpr(*columns).writeStream.foreachBatch(into)
    else:
        sink = semel.sink(job["brokers"], on_batch=_tell, **job["sink"])
        writer = QUERIES[job["query"]](rows.load(), job).writeStream.foreachBatch(sink)
    query = (
        writer.outputMode("update" if job["query"] == "count" else "append")
        .option("checkpointLocation", job["checkpoint"])
        .trigger(processingTime=job["trigger"])
        .start()
    )
    print("started", flush=True)
    query.awaitTermination()
    return 0


def _postgres_sink(job: dict[str, Any]) -> Any:
    """Into a table; with a topic into that, too."""
    import semel

    given = job["sink"]
    named = {name: given[name] for name in ("dsn", "application_id", "table")}
    if job["query"] == "table":
        return semel.postgres_sink(**named, on_batch=_tell)
    topics = semel.SinkTopics(
        job["brokers"],
        records=lambda df: df.select("key", "value"),
        rows=lambda df: df.select("value"),
        topic=given["topic"],
        transaction_timeout_ms=given["transaction_timeout_ms"],
        client=given["client"],
    )
    return semel.postgres_sink(**named, on_batch=_tell, topics=topics)


def _routed(rows: Any, job: dict[str, Any]) -> Any:
    """The options of the sink in Spark's spelling."""
    import semel

    sink = job["sink"]
    options = {
        "kafka.bootstrap.servers": job["brokers"],
        "topic": sink["topic"],
        "applicationId": sink["application_id"],
        "transactionTimeoutMs": sink["transaction_timeout_ms"],
        **{f"kafka.{name}": value for name, value in sink["client"].items()},
    }
    routed = semel.route(copy(rows, job), job["brokers"], topic=sink["topic"])
    return routed.writeStream.format("semel").options(**options)


def _tell(report: Any) -> None:
    if report.rows:
        print(
            f"working: batch {report.batch_id} {report.verdict}, {report.rows} rows, attempt {report.attempts}",
            flush=True,
        )


def copy(rows: Any, job: dict[str, Any]) -> Any:
    return rows.selectExpr("key", "value")


def any_order(rows: Any, job: dict[str, Any]) -> Any:
    topics = job["sink"]["topics"]
    return rows.selectExpr("value").mapInArrow(_scattered(topics), "value BINARY, topic STRING")


def _scattered(topics: list[str]) -> Any:
    """As if each row had been enriched by a service that answers in its own time: another order with every attempt."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import random

        import pyarrow as pa

        luck = random.Random()
        for batch in batches:
            values = batch.column(0).to_pylist()
            luck.shuffle(values)
            chosen = [luck.choice(topics) for _ in values]
            yield pa.RecordBatch.from_arrays(
                [pa.array(values, pa.binary()), pa.array(chosen, pa.string())], names=["value", "topic"]
            )

    return run


def count(rows: Any, job: dict[str, Any]) -> Any:
    counted = rows.selectExpr("cast(key AS string) AS name").groupBy("name").count()
    return counted.selectExpr("name AS key", "cast(count AS string) AS value")


QUERIES = {"copy": copy, "any_order": any_order, "count": count}


# --- app: the user's own pipeline. Calls its function until it is killed ---
def run_app(options: dict[str, Any]) -> int:
    print("working", flush=True)
    load_function(options.pop("app"))(**options)
    return 0


# --- tables and relay: a loop into PostgreSQL, whose outbox a relay brings to a topic ---
SEND = (
    "INSERT INTO semel.outbox (topic, key, value, header_names, header_values) "
    "VALUES (%s, %s, %s, ARRAY['txn'], ARRAY[convert_to(pg_current_xact_id()::text, 'UTF8')])"
)


def run_tables(options: dict[str, Any]) -> int:
    """rows: a row for each record. inbox: for each event. both: a row and a record. outbox: a row, and one of the
    outbox."""
    from semel.patterns.outbox import Outbox
    from semel.sinks.postgres.settings import Postgres, Statement

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    kind, dsn, table, topic = (options.pop(name) for name in ("kind", "dsn", "table", "topic"))
    if kind == "outbox":
        Outbox(dsn).init()

    def write(record: Any) -> list[Any]:
        text = record.value.decode()
        row = Statement(f"INSERT INTO {table} VALUES (%s)", [event_of(text) if kind == "inbox" else text])
        more: dict[str, list[Any]] = {
            "both": [Output(record.value, record.key, topic=topic)],
            "outbox": [Statement(SEND, [topic, record.key, record.value])],
        }
        return [row, *more.get(kind, ())]

    ids: dict[str, Any] = {
        "inbox": lambda record: event_of(record.value.decode()),
        "outbox": lambda record: record.value,
    }
    sink = Postgres(dsn, event_id=ids.get(kind), with_topics=kind == "both")
    Processor(
        options.pop("source"), sink, write, commit_interval_ms=60, on_settled=pattern_workers.say_working(), **options
    ).run()
    return 0


def run_relay(options: dict[str, Any]) -> int:
    from semel.patterns.outbox import Outbox

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    producer = {"request_timeout_ms": 1_500}
    Outbox(options.pop("dsn"), transaction_timeout_ms=4_000, producer=producer, **options).run()
    return 0


# --- files and compactor: a loop into a folder, whose small files are joined again and again ---
FILE_COLUMNS = {"topic": "string", "partition": "int32", "offset": "int64", "key": "string", "value": "string"}
SMALL_BYTES = 20_000


def run_files(options: dict[str, Any]) -> int:
    from semel.sinks.files.settings import Files

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for name in ("sink", "producer"):
        options.pop(name)
    delay_s = options.pop("delay_ms") / 1000

    def row(record: Any) -> dict[str, Any]:
        time.sleep(delay_s)
        return {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "key": record.key.decode(),
            "value": record.value.decode(),
        }

    sink = Files(options.pop("folder"), schema=FILE_COLUMNS)
    Processor(options.pop("source"), sink, row, on_settled=pattern_workers.say_working(), **options).run()
    return 0


def run_compactor(options: dict[str, Any]) -> int:
    from semel.sinks.files.errors import FolderError, FolderTakenError
    from semel.sinks.files.reading import compact

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("working", flush=True)
    while True:
        time.sleep(0.3)
        try:
            compact(options["folder"], target_bytes=SMALL_BYTES)
        except FolderTakenError as error:
            print(f"fenced: {error}", flush=True)
        except FolderError as error:
            if "no manifest" not in str(error):
                raise


WORKERS = {
    "entity-owner": pattern_workers.run_entity_owner,
    "entity-writers": pattern_workers.run_entity_writers,
    "saga-loop": pattern_workers.run_saga_loop,
    "saga-starts": pattern_workers.run_saga_starts,
    "files": run_files,
    "compactor": run_compactor,
    "tables": run_tables,
    "relay": run_relay,
    "producer": produce,
    "loop": run_loop,
    "counting-loop": run_counting_loop,
    "spark": run_spark,
    "app": run_app,
}

if __name__ == "__main__":
    faulthandler.register(SHOWS_STACKS)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    sys.exit(WORKERS[sys.argv[1]](json.loads(sys.argv[2])))
