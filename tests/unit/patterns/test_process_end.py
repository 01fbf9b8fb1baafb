"""When a processing loop ends by itself: at the end offsets, when nothing more comes, or because there is no source."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

import semel
from semel.client.admin import Admin
from semel.client.errors import TimedOutError
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from semel.patterns import process as process_module
from semel.patterns.process import MissingSourceError, Processor
from semel.protocol.messages.offsets import OFFSET_COMMIT
from semel.protocol.messages.records import FETCH, PRODUCE
from semel.protocol.messages.transactions import TXN_OFFSET_COMMIT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.reading import read_topic
from tests.support.waiting import PATIENCE_S, until

GUARANTEES = ["exactly_once", "at_least_once", "at_most_once"]
COUNT = 60
_numbers = count()


class Pipe:
    """A source with COUNT records in three partitions, an empty sink, and the options of a loop between them."""

    def __init__(self, broker: SemelBroker) -> None:
        stem = f"end-{next(_numbers)}"
        self.bootstrap = broker.bootstrap
        self.source, self.sink, self.application = stem, f"{stem}.out", f"{stem}-app"
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            for topic in (self.source, self.sink):
                admin.create_topic(topic, partitions=3)
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for number in range(COUNT):
                producer.send(self.source, b"%d" % number, partition=number % 3)

    def options(self, **more: Any) -> dict[str, Any]:
        return {"application_id": self.application, "bootstrap_servers": self.bootstrap, **more}

    def written(self) -> Counter[bytes]:
        return Counter(seen.value for seen in read_topic(self.bootstrap, self.sink) if seen.value is not None)


@pytest.fixture
def pipe(shared_semel_broker: SemelBroker) -> Pipe:
    return Pipe(shared_semel_broker)


EVERYTHING = Counter(b"%d" % number for number in range(COUNT))


def copy(record: Any) -> Any:
    return record


# --- at the end ---


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_stop_at_end_reads_everything_however_slow_the_broker_is(pipe: Pipe, guarantee: str) -> None:
    with Proxy(pipe.bootstrap) as proxy:
        slow = proxy.add(Rule(FETCH, Effect.DELAY_RESPONSE, delay_ms=1_000, times=2))
        options = pipe.options(bootstrap_servers=proxy.bootstrap, guarantee=guarantee, stop_at_end=True)
        stats = semel.process(pipe.source, pipe.sink, copy, **options)
        slow.assert_fired()
    assert stats.records_in == COUNT
    assert pipe.written() == EVERYTHING
    again = semel.process(pipe.source, pipe.sink, copy, **pipe.options(guarantee=guarantee, stop_at_end=True))
    assert again.records_in == 0, "a second run starts where the first one ended, and ends there"


@pytest.mark.parametrize(
    ("guarantee", "api"), [("exactly_once", TXN_OFFSET_COMMIT), ("at_least_once", OFFSET_COMMIT)], ids=str
)
def test_stop_at_end_ends_only_when_the_last_work_is_committed(pipe: Pipe, guarantee: str, api: Any) -> None:
    """The end is reached once, the commit fails, and the records are read again."""
    with Proxy(pipe.bootstrap) as proxy:
        lost = proxy.add(Rule(api, Effect.DROP_REQUEST, times=3))
        options = pipe.options(bootstrap_servers=proxy.bootstrap, guarantee=guarantee, stop_at_end=True)
        semel.process(pipe.source, pipe.sink, copy, **options)
        lost.assert_fired(3)
    assert set(pipe.written()) == set(EVERYTHING)
    again = semel.process(pipe.source, pipe.sink, copy, **pipe.options(guarantee=guarantee, stop_at_end=True))
    assert again.records_in == 0, "all of it was committed"


def test_stop_at_end_does_not_wait_for_the_interval_of_commits(pipe: Pipe) -> None:
    options = pipe.options(stop_at_end=True, commit_interval_ms=600_000, transaction_timeout_ms=900_000)
    assert semel.process(pipe.source, pipe.sink, copy, **options).commits == 1
    assert pipe.written() == EVERYTHING


def test_what_comes_after_the_start_is_left_for_the_next_run(pipe: Pipe) -> None:
    sent = False

    def copy_and_add(record: Any) -> Any:
        nonlocal sent
        if not sent:
            sent = True
            with Producer(bootstrap_servers=pipe.bootstrap) as producer:
                producer.send(pipe.source, b"late", partition=record.partition)
        return record

    options = pipe.options(stop_at_end=True, max_records=10, commit_interval_ms=20)
    first = semel.process(pipe.source, pipe.sink, copy_and_add, **options)
    assert COUNT <= first.records_in <= COUNT + 1, "it ends, although more came"
    second = semel.process(pipe.source, pipe.sink, copy, **options)
    assert first.records_in + second.records_in == COUNT + 1
    assert pipe.written() == EVERYTHING + Counter([b"late"])


def test_stop_at_end_passes_aborted_records_and_stops_before_an_open_transaction(pipe: Pipe) -> None:
    """The end is the last stable offset, also where nothing but markers stands before it."""
    open_one = Producer(bootstrap_servers=pipe.bootstrap, transactional_id=f"{pipe.source}-open")
    aborted = Producer(bootstrap_servers=pipe.bootstrap, transactional_id=f"{pipe.source}-aborted")
    with open_one, aborted:
        for producer in (open_one, aborted):
            producer.init_transactions()
        aborted.begin_transaction()
        for partition in range(3):
            aborted.send(pipe.source, b"aborted", partition=partition).result()
        aborted.abort_transaction()
        open_one.begin_transaction()
        open_one.send(pipe.source, b"open", partition=0).result()
        semel.process(pipe.source, pipe.sink, copy, **pipe.options(stop_at_end=True, max_records=7))
        assert pipe.written() == EVERYTHING
        open_one.commit_transaction()
    semel.process(pipe.source, pipe.sink, copy, **pipe.options(stop_at_end=True))
    assert pipe.written() == EVERYTHING + Counter([b"open"])


def test_a_loop_can_run_again(pipe: Pipe) -> None:
    """The second run took the end of the first one for its own, and failed with an error about the group."""
    loop = Processor(pipe.source, pipe.sink, copy, **pipe.options(stop_at_end=True))
    assert loop.run().records_out == COUNT
    with Producer(bootstrap_servers=pipe.bootstrap) as producer:
        producer.send(pipe.source, b"later")
    assert (loop.run().records_in, loop.stats.records_out) == (1, 1)
    loop.stop()
    assert loop.run().records_in == 0
    assert loop.run().records_in == 0
    assert pipe.written() == EVERYTHING + Counter([b"later"])


def test_empty_source_is_at_its_end(pipe: Pipe) -> None:
    stats = semel.process(pipe.sink, pipe.source, copy, **pipe.options(stop_at_end=True))
    assert stats.records_in == 0


def test_instances_share_the_way_to_the_end(pipe: Pipe) -> None:
    """Each ends when its own partitions are done, also those that others leave to it, also without any."""
    options = pipe.options(stop_at_end=True, max_records=5, commit_interval_ms=20)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(semel.process, pipe.source, pipe.sink, copy, **options) for _ in range(4)]
        for run in runs:
            run.result(PATIENCE_S)
    assert pipe.written() == EVERYTHING
    assert semel.process(pipe.source, pipe.sink, copy, **options).records_in == 0


# --- when nothing comes ---


def test_idle_clock_starts_with_the_first_fetch_response(pipe: Pipe) -> None:
    """A busy broker is not an idle topic."""
    with Proxy(pipe.bootstrap) as proxy:
        slow = proxy.add(Rule(FETCH, Effect.DELAY_RESPONSE, delay_ms=2_000, times=1))
        options = pipe.options(bootstrap_servers=proxy.bootstrap, idle_stop_ms=300)
        stats = semel.process(pipe.source, pipe.sink, copy, **options)
        slow.assert_fired()
    assert stats.records_in == COUNT
    assert pipe.written() == EVERYTHING


def test_idle_clock_does_not_run_while_records_wait_to_be_read(pipe: Pipe) -> None:
    with Proxy(pipe.bootstrap) as proxy:
        slow = proxy.add(Rule(FETCH, Effect.DELAY_RESPONSE, delay_ms=2_000, times=2, nth=2))
        # One small batch in each response, so that the slow ones come while there is more to read.
        options = pipe.options(bootstrap_servers=proxy.bootstrap, idle_stop_ms=300)
        options["consumer"] = {"max.partition.fetch.bytes": 1, "fetch.max.bytes": 1}
        stats = semel.process(pipe.source, pipe.sink, copy, **options)
        slow.assert_fired()
    assert stats.records_in == COUNT


# --- without a source ---


@pytest.mark.parametrize("stop", [{"stop_at_end": True}, {"idle_stop_ms": 300}], ids=str)
def test_missing_source_topic_is_an_error_and_is_not_created(
    pipe: Pipe, stop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "FIRST_CONTACT_S", 3.0)
    missing = f"{pipe.source}-misspelt"
    with pytest.raises(MissingSourceError, match=missing):
        semel.process([pipe.source, missing], pipe.sink, copy, **pipe.options(**stop))
    with Admin(bootstrap_servers=pipe.bootstrap) as admin:
        assert missing not in admin.list_topics()
    assert pipe.written() == Counter()


def test_source_topic_that_is_deleted_meanwhile_is_an_error(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance without partitions waits for some: without this it would wait for ever."""
    monkeypatch.setattr(process_module, "FIRST_CONTACT_S", 3.0)
    options = pipe.options(consumer={"metadata.max.age.ms": 300})
    processor = Processor(pipe.source, pipe.sink, copy, **options)
    with ThreadPoolExecutor(1) as pool, Admin(bootstrap_servers=pipe.bootstrap) as admin:
        run = pool.submit(processor.run)
        try:
            until(lambda: sum(at.offset for at in admin.group_offsets(pipe.application).values()) == COUNT)
            admin.delete_topics([pipe.source])
            with pytest.raises(MissingSourceError, match=pipe.source):
                run.result(PATIENCE_S)
        finally:
            processor.stop()


def test_a_loop_counts_what_it_does_and_where_its_time_goes(pipe: Pipe) -> None:
    loop = Processor(pipe.source, pipe.sink, copy, **pipe.options(stop_at_end=True))
    stats = loop.run()
    found = loop.metrics()
    assert (found.records_in_total, found.records_out_total) == (stats.records_in, stats.records_out) == (COUNT, COUNT)
    assert (found.commit_total, found.abort_total, found.retry_total) == (stats.commits, 0, 0)
    assert stats.commits >= 1
    assert set(found.stage_seconds_total) == {"read", "work", "commit"}
    assert all(seconds > 0 for seconds in found.stage_seconds_total.values())
    text = semel.prometheus(found)
    assert f'semel_loop_records_in_total{{application_id="{pipe.application}"}} {COUNT}\n' in text
    assert "semel_loop_stage_seconds_total{" in text


def test_source_topic_that_comes_a_little_later_is_waited_for(pipe: Pipe) -> None:
    late = f"{pipe.source}-late"
    looked = Processor(late, pipe.sink, copy, **pipe.options(stop_at_end=True))
    with ThreadPoolExecutor(1) as pool, Admin(bootstrap_servers=pipe.bootstrap) as admin:
        run = pool.submit(looked.run)
        until(lambda: looked._consumer is not None)
        admin.create_topic(late, partitions=1)
        assert run.result(PATIENCE_S).records_in == 0


# --- when it is stopped ---


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_stop_keeps_its_deadline_though_no_broker_responds(
    pipe: Pipe, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for max.block.ms and delivery.timeout.ms, minutes, and was killed instead."""
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 0.5)
    with Proxy(pipe.bootstrap) as proxy, ThreadPoolExecutor(1) as pool:
        silent = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=1_000))
        options = pipe.options(bootstrap_servers=proxy.bootstrap, guarantee=guarantee, transaction_timeout_ms=5_000)
        loop = Processor(pipe.source, pipe.sink, copy, **options)
        run = pool.submit(loop.run)
        try:
            assert silent.fired.wait(PATIENCE_S)
        finally:
            loop.stop()
        began_s = time.monotonic()
        with pytest.raises(TimedOutError, match="stopped"):
            run.result(PATIENCE_S)
        assert time.monotonic() - began_s < 5


def test_stop_waits_for_a_slow_function(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 2.0)

    def slow(record: Any) -> Any:
        if not loop.stats.records_in and record.offset == 0:
            loop.stop()
            threading.Event().wait(3.0)
        return record

    loop = Processor(pipe.source, pipe.sink, slow, **pipe.options(guarantee="at_least_once"))
    stats = loop.run()
    assert stats.records_in == stats.records_out == pipe.written().total() > 0
