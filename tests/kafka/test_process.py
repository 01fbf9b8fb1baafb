"""The processing loop on both brokers: what it writes, how it stops, and what it does when things go wrong."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import semel
from semel.client.admin import Admin
from semel.client.errors import ConfigError, FencedError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.types import TopicPartition
from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from semel.patterns.process import Output, Processor
from semel.protocol.messages.groups import HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, LeaveGroupRequest, MemberIdentity
from semel.protocol.messages.offsets import OFFSET_COMMIT
from semel.protocol.messages.records import FETCH, PRODUCE
from semel.protocol.messages.transactions import END_TXN, TXN_OFFSET_COMMIT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import ROOT, Cluster
from tests.support.direct import DirectClient
from tests.support.process_campaign import Pipeline
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually

COUNT = 500


@pytest.fixture
def topics(cluster: Cluster) -> tuple[str, str]:
    """A source with records 0 to COUNT-1, and an empty sink."""
    return fill(cluster, COUNT)


def fill(cluster: Cluster, count: int) -> tuple[str, str]:
    stem = cluster.unique("processed")
    source = create_topic(cluster.bootstrap, stem, partitions=3)
    sink = create_topic(cluster.bootstrap, f"{stem}.out", partitions=3)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(count):
            producer.send(source, b"%d" % number, key=b"k%d" % number, headers=[("n", b"%d" % number)])
    return source, sink


def values(cluster: Cluster, topic: str) -> Counter[bytes]:
    return Counter(seen.value for seen in read_topic(cluster.bootstrap, topic))


def expected(count: int = COUNT) -> Counter[bytes]:
    return Counter(b"%d" % number for number in range(count))


def options(cluster: Cluster, **more: object) -> dict:
    return {
        "application_id": cluster.unique("app"),
        "bootstrap_servers": cluster.bootstrap,
        "stop_at_end": True,
        **more,
    }


@contextmanager
def running(processor: Processor) -> Iterator[None]:
    """The loop in a thread of its own, until it ends by itself. Raises what it raised."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(processor.run)
        try:
            yield
            run.result(PATIENCE_S)
        finally:
            processor.stop()


# --- what is written ---


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "at_most_once"])
def test_undisturbed_every_guarantee_writes_every_record_once(cluster: Cluster, topics, guarantee: str) -> None:
    source, sink = topics
    settings = options(cluster, guarantee=guarantee)
    stats = semel.process(source, sink, lambda record: record, **settings)
    assert (stats.records_in, stats.records_out, stats.aborts) == (COUNT, COUNT, 0)
    written = read_topic(cluster.bootstrap, sink)
    assert {(row.key, row.value, tuple(row.headers)) for row in written} == {
        (b"k%d" % number, b"%d" % number, (("n", b"%d" % number),)) for number in range(COUNT)
    }
    assert len(written) == COUNT
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        positions = admin.group_lag(settings["application_id"])
        assert sum(position.committed for position in positions) == COUNT
    again = semel.process(source, sink, lambda record: record, **settings)
    assert again.records_in == 0, "a second run starts where the first one ended"


def test_tables_are_processed_whole(cluster: Cluster, topics) -> None:
    source, sink = topics

    def double_even(table: pa.Table) -> pa.Table:
        number = pc.cast(pc.cast(table.column("value"), pa.string()), pa.int64())
        chosen = table.filter(pc.equal(pc.bit_wise_and(number, 1), 0))
        return chosen.set_column(
            chosen.column_names.index("value"), "value", pc.cast(chosen.column("value"), pa.binary())
        )

    stats = semel.process(source, sink, double_even, **options(cluster, tables=True))
    assert stats.records_in == COUNT
    assert values(cluster, sink) == Counter(b"%d" % number for number in range(0, COUNT, 2))


def test_function_may_filter_multiply_and_choose_topics(cluster: Cluster, topics) -> None:
    source, sink = topics
    other = create_topic(cluster.bootstrap, f"{sink}.other")

    def route(record):
        number = int(record.value)
        if number % 3 == 0:
            return None
        if number % 3 == 1:
            return [record.value, Output(b"copy", key=b"c")]
        return Output(record.value, topic=other, partition=0, headers=[("from", source.encode())])

    semel.process(source, sink, route, **options(cluster))
    ones = [b"%d" % number for number in range(COUNT) if number % 3 == 1]
    assert values(cluster, sink) == Counter(ones) + Counter({b"copy": len(ones)})
    routed = read_topic(cluster.bootstrap, other)
    assert Counter(row.value for row in routed) == Counter(b"%d" % n for n in range(COUNT) if n % 3 == 2)
    assert routed[0].headers == [("from", source.encode())]


def test_output_and_offsets_become_visible_together(cluster: Cluster, topics) -> None:
    """D1: while a transaction is open, neither its records nor its positions can be seen."""
    source, sink = topics
    settings = options(cluster, commit_interval_ms=60_000, transaction_timeout_ms=90_000, max_records=100_000)
    processor = Processor(source, sink, lambda record: record, **{**settings, "stop_at_end": False})
    thread = threading.Thread(target=processor.run, daemon=True)
    thread.start()
    eventually(lambda: processor.stats.records_in, lambda count: count >= COUNT)
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        assert admin.group_offsets(settings["application_id"]) == {}
        assert read_topic(cluster.bootstrap, sink) == []
        processor.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        # The commit is decided; Apache Kafka writes the markers a moment later.
        eventually(lambda: admin.group_offsets(settings["application_id"]), lambda found: _sum(found) == COUNT)
    eventually(lambda: values(cluster, sink), lambda found: found == expected())


def _sum(offsets: dict) -> int:
    return sum(position.offset for position in offsets.values())


# --- stopping ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_transaction_and_leaves_the_group(cluster: Cluster, topics, number: int) -> None:
    source, sink = topics
    pipeline = Pipeline(cluster, "exactly_once", source, sink, cluster.unique("signalled"))
    pipeline.start("a")
    worker = pipeline.workers["a"]
    with worker, Admin(bootstrap_servers=cluster.bootstrap) as admin:
        worker.wait_for_line("settled")
        code = worker.terminate() if number == signal.SIGTERM else worker.interrupt()
        assert code == 0, worker.output
        assert "stopped" in worker.output
        positions = admin.group_lag(pipeline.application)
        committed = sum(position.committed or 0 for position in positions)
    assert sum(values(cluster, sink).values()) == committed > 0


def test_error_in_the_function_aborts_and_is_raised(cluster: Cluster, topics) -> None:
    source, sink = topics
    settings = options(cluster)

    def fail(record):
        if record.value == b"250":
            raise ValueError("no good")
        return record

    with pytest.raises(semel.RecordError, match=f"{source}-[0-2] at offset [0-9]+.*no good"):
        semel.process(source, sink, fail, **settings)
    assert b"250" not in values(cluster, sink)
    semel.process(source, sink, lambda record: record, **settings)
    assert values(cluster, sink) == expected()


# --- trouble ---


@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE])
@pytest.mark.parametrize("api", [END_TXN, TXN_OFFSET_COMMIT, PRODUCE, FETCH, HEARTBEAT], ids=lambda api: api.name)
def test_exactly_once_survives_cut_connections(cluster: Cluster, topics, api, effect) -> None:
    source, sink = topics
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(api, effect, times=2))
        settings = options(cluster, bootstrap_servers=proxy.bootstrap, commit_interval_ms=50, max_records=60)
        settings["consumer"] = {"heartbeat_interval_ms": 100}
        if api is HEARTBEAT:  # it must live long enough to send some
            settings |= {"stop_at_end": False, "idle_stop_ms": 1500}
        semel.process(source, sink, lambda record: record, **settings)
        injected.assert_fired()
    assert values(cluster, sink) == expected()


def test_at_least_once_loses_nothing_when_the_commit_of_offsets_fails(cluster: Cluster, topics) -> None:
    source, sink = topics
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(OFFSET_COMMIT, Effect.DROP_RESPONSE, times=2))
        settings = options(cluster, bootstrap_servers=proxy.bootstrap, guarantee="at_least_once", max_records=60)
        semel.process(source, sink, lambda record: record, **settings)
        injected.assert_fired()
    assert set(values(cluster, sink)) == set(expected())


def test_broker_restart_is_survived(semel_broker: SemelBroker) -> None:
    cluster = Cluster("semel", semel_broker)
    source, sink = fill(cluster, 3000)
    settings = options(cluster, commit_interval_ms=20, max_records=50)
    in_the_middle, dead = threading.Event(), threading.Event()

    def step(record: object) -> object:
        if processor.stats.commits >= 5 and not dead.is_set():
            in_the_middle.set()
            dead.wait(PATIENCE_S)
        return record

    processor = Processor(source, sink, step, **settings)
    with running(processor):
        assert in_the_middle.wait(PATIENCE_S)
        semel_broker.kill()
        dead.set()
        semel_broker.start()
    assert values(cluster, sink) == expected(3000)


@pytest.mark.parametrize("rejoin_s", [0.0, 4.0], ids=["back at once", "back when the commit is due"])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_partitions_that_are_lost_while_reading_are_read_again(
    cluster: Cluster, topics, guarantee: str, rejoin_s: float
) -> None:
    source, sink = topics
    settings = options(cluster, guarantee=guarantee, commit_interval_ms=3000, stop_at_end=False, idle_stop_ms=3500)
    settings["consumer"] = {"heartbeat_interval_ms": 50}
    with Proxy(cluster.bootstrap) as proxy:
        processor = Processor(source, sink, lambda record: record, **settings | {"bootstrap_servers": proxy.bootstrap})
        _lose_everything_in_the_middle(processor, cluster, settings["application_id"], proxy, rejoin_s)
    assert processor.stats.aborts == 1
    found = values(cluster, sink)
    assert found == expected() if guarantee == "exactly_once" else set(found) == set(expected())


def _lose_everything_in_the_middle(
    processor: Processor, cluster: Cluster, group: str, proxy: Proxy, rejoin_s: float
) -> None:
    with running(processor), DirectClient(cluster.bootstrap) as client:
        eventually(lambda: processor.stats.records_in, lambda count: count >= COUNT)
        with Admin(bootstrap_servers=cluster.bootstrap) as admin:
            (member,) = admin.describe_group(group).members
        rejoining = proxy.add(Rule(JOIN_GROUP, Effect.DELAY_RESPONSE, delay_ms=int(1_000 * rejoin_s)))
        assert processor.stats.commits == 0, "it must be lost in the middle"
        gone = LeaveGroupRequest(group, members=[MemberIdentity(member.member_id)])
        assert client.call(LEAVE_GROUP, gone, 5).error_code == 0
    rejoining.assert_fired()


@pytest.mark.parametrize("interval_ms", [20, 2000], ids=["between transactions", "in a transaction"])
def test_instance_with_a_taken_name_stops_the_first_one(cluster: Cluster, topics, interval_ms: int) -> None:
    source, sink = topics
    settings = {**options(cluster, instance="same", commit_interval_ms=interval_ms), "stop_at_end": False}
    name = f"{settings['application_id']}-same"
    first = Processor(source, sink, lambda record: record, **settings)
    usurper = Producer(bootstrap_servers=cluster.bootstrap, transactional_id=name)
    last = Producer(bootstrap_servers=cluster.bootstrap)
    with last, usurper, Admin(bootstrap_servers=cluster.bootstrap) as admin:
        with pytest.raises(FencedError), running(first):  # noqa: PT012  the loop's error comes at the end of it
            eventually(lambda: first.stats.records_in, lambda count: count >= COUNT)
            state = "Ongoing" if interval_ms == 2000 else "CompleteCommit"
            eventually(lambda: admin.describe_transaction(name).state, lambda found: found == state)
            usurper.init_transactions()
            last.send(source, b"last").result()
        usurper.begin_transaction()
        usurper.send(sink, b"the name is still the second one's").result()
        usurper.commit_transaction()


def test_a_named_instance_that_was_killed_gets_its_partitions_back_at_once(cluster: Cluster, topics) -> None:
    """Its session lasts longer than this test may: a member without a name would wait for the end of it."""
    source, sink = topics
    settings = {
        **options(cluster, instance="only"),
        "source": source,
        "sink": sink,
        "guarantee": "exactly_once",
        "consumer": {"session_timeout_ms": 1_200_000, "heartbeat_interval_ms": 1_000},
    }
    endless = {**settings, "stop_at_end": False, "delay_ms": 2}
    command = [sys.executable, "-m", "tests.support.process_worker"]
    with Process([*command, json.dumps(endless)], cwd=ROOT) as first:
        first.wait_for_line("^settled", PATIENCE_S)
        first.kill()
    with Process([*command, json.dumps(settings)], cwd=ROOT) as second:
        second.wait_for_line("^stopped", 2 * PATIENCE_S)
    assert values(cluster, sink) == expected()


def test_a_named_instance_that_has_reached_the_end_leaves_its_group(cluster: Cluster, topics) -> None:
    """Another one would wait for the end of its session, and end without its partitions."""
    settings = options(cluster, instance="first")
    assert semel.process(*topics, lambda record: record, **settings).records_in == COUNT
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        assert admin.describe_group(settings["application_id"]).members == []


# --- bad input ---


def test_wrong_options_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="guarantee"):
        semel.process("a", "b", print, application_id="x", guarantee="twice")
    with pytest.raises(ConfigError, match="application_id"):
        semel.process("a", "b", print, application_id="")
    with pytest.raises(ConfigError, match="transaction_timeout_ms"):
        semel.process("a", "b", print, application_id="x", commit_interval_ms=20_000)
    with pytest.raises(ConfigError, match="no option"):
        semel.process("a", "b", print, application_id="x", consumer={"fetch.min.byte": 1})


def test_unreachable_brokers_are_an_error_not_a_wait() -> None:
    started_s = time.monotonic()
    with pytest.raises((TimedOutError, KafkaError), match=r"127\.0\.0\.1:1"):
        semel.process(
            "a", "b", print, application_id="x", bootstrap_servers="127.0.0.1:1", producer={"max.block.ms": 1000}
        )
    with pytest.raises((TimedOutError, KafkaError), match=r"127\.0\.0\.1:1"):
        semel.process("a", "b", print, application_id="x", bootstrap_servers="127.0.0.1:1", guarantee="at_least_once")
    assert time.monotonic() - started_s < 40


def test_function_that_returns_nonsense_is_told_so(cluster: Cluster, topics) -> None:
    source, sink = topics
    with pytest.raises(ConfigError, match="the function returned int"):
        semel.process(source, sink, lambda record: 5, **options(cluster))
    with pytest.raises(ConfigError, match="no sink topic"):
        semel.process(source, None, lambda record: record, **options(cluster))
    assert TopicPartition(source, 0)
