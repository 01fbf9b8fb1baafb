"""The consumer on both brokers with answers so large that a thread reads them: all that it promises stays true."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from semel.client.consumer import Consumer
from semel.client.errors import AuthenticationError
from semel.client.producer import Producer
from semel.protocol.messages.records import FETCH
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, STALL_S

PARTITIONS = 2
ROWS = 1200  # of 10 KB in each partition: six answers of 4 MiB
FETCH_BYTES = 2 * 1024 * 1024


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = create_topic(cluster.bootstrap, cluster.unique("large-answers"), partitions=PARTITIONS)
    rows = range(ROWS * PARTITIONS)
    table = pa.table(
        {
            "value": pa.array([b"%05d" % (row // PARTITIONS) * 2000 for row in rows], pa.binary()),
            "partition": pa.array([row % PARTITIONS for row in rows], pa.int32()),
        }
    )
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        producer.send_table(name, table)
        producer.flush()
    return name


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.bootstrap) as proxy:
        yield proxy


def reading(proxy: Proxy, topic: str, **options: object) -> Consumer:
    consumer = Consumer(
        bootstrap_servers=proxy.bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=FETCH_BYTES,
        fetch_max_wait_ms=100,
        **options,
    )
    consumer.assign([(topic, number) for number in range(PARTITIONS)])
    return consumer


class Watched:
    """A fault that notes whether the thread was reading when it struck."""

    def __init__(self, proxy: Proxy, consumer: Consumer, fault: Rule) -> None:
        self.while_thread_reads = False
        self._consumer = consumer
        fault.then = self._note
        self.fault = proxy.add(fault)

    def _note(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S  # the broker may be faster than the consumer's next line of code
        while not self.while_thread_reads and time.monotonic() < deadline_s:
            self.while_thread_reads = is_reading(self._consumer)
            time.sleep(0.001)

    def assert_fired(self) -> None:
        self.fault.assert_fired()
        assert self.while_thread_reads, "the thread was to be reading"


def is_reading(consumer: Consumer) -> bool:
    return any(each._ahead is not None and each._ahead.busy for each in consumer._engine.fetching.connections())


def read_all(consumer: Consumer, views: bool = False, timeout_s: float = PATIENCE_S) -> None:
    """Reads to the end; every record must come once, in order, with its value."""
    at = [0] * PARTITIONS
    deadline_s = time.monotonic() + timeout_s
    while at != [ROWS] * PARTITIONS and time.monotonic() < deadline_s:
        table = consumer.poll_table(500, views=views)
        values = table["value"].cast(pa.binary()).to_pylist()
        for number, offset, value in zip(
            table["partition"].to_pylist(), table["offset"].to_pylist(), values, strict=True
        ):
            assert offset == at[number]
            assert value == b"%05d" % offset * 2000
            at[number] += 1
    assert at == [ROWS] * PARTITIONS
    assert consumer.poll_table(200).num_rows == 0


@pytest.mark.parametrize("views", [False, True])
def test_every_record_comes_once_and_in_order(proxy: Proxy, topic: str, views: bool) -> None:
    with reading(proxy, topic) as consumer:
        read_all(consumer, views)


@pytest.mark.parametrize("effect", [Effect.TRUNCATE_RESPONSE, Effect.DROP_RESPONSE])
def test_a_cut_while_the_thread_reads_loses_and_doubles_nothing(proxy: Proxy, topic: str, effect) -> None:
    with reading(proxy, topic) as consumer:
        watched = Watched(proxy, consumer, Rule(FETCH, effect, nth=3))
        read_all(consumer)
        watched.assert_fired()


def test_silence_while_the_thread_reads_costs_only_the_request_timeout(proxy: Proxy, topic: str) -> None:
    with reading(proxy, topic, request_timeout_ms=700) as consumer:
        watched = Watched(proxy, consumer, Rule(FETCH, Effect.SILENCE_RESPONSE, nth=3))
        read_all(consumer, timeout_s=20)  # less than the 30 s that a request may take by default
        watched.assert_fired()


def test_wakeup_ends_a_poll_that_waits_for_the_thread(proxy: Proxy, topic: str) -> None:
    with reading(proxy, topic) as consumer:
        watched = Watched(proxy, consumer, Rule(FETCH, Effect.SILENCE_RESPONSE, nth=2))
        first = consumer.poll_table(10_000)
        timer = threading.Timer(0.2, consumer.wakeup)
        timer.start()
        started_s = time.monotonic()
        while first.num_rows and consumer.poll_table(60_000).num_rows:
            pass
        assert time.monotonic() - started_s < STALL_S
        timer.join()
        watched.assert_fired()


def test_close_while_the_thread_reads_waits_for_nobody(proxy: Proxy, topic: str) -> None:
    consumer = reading(proxy, topic)
    watched = Watched(proxy, consumer, Rule(FETCH, Effect.SILENCE_RESPONSE, nth=2))
    assert consumer.poll_table(10_000).num_rows
    assert watched.fault.fired.wait(PATIENCE_S)
    started_s = time.monotonic()
    consumer.close()
    assert time.monotonic() - started_s < STALL_S
    watched.assert_fired()


def test_seek_and_pause_while_the_thread_reads_are_obeyed(proxy: Proxy, topic: str) -> None:
    with reading(proxy, topic) as consumer:
        assert consumer.poll_table(10_000).num_rows
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_reading(consumer) and time.monotonic() < deadline_s:
            assert consumer.poll_table(10_000).num_rows, "the topic ended before the thread had read"
        assert is_reading(consumer)
        consumer.pause((topic, 1))
        consumer.seek((topic, 0), 7)
        table = consumer.poll_table(10_000)
        assert set(table["partition"].to_pylist()) == {0}
        assert table["offset"][0].as_py() == 7
        consumer.seek((topic, 0), 0)
        consumer.resume((topic, 1))
        consumer.seek((topic, 1), 0)
        read_all(consumer)


def test_paused_partitions_with_full_buffers_do_not_starve_the_others(proxy: Proxy, topic: str) -> None:
    with reading(proxy, topic, prefetch_bytes=FETCH_BYTES // 2) as consumer:
        consumer.pause((topic, 0))
        assert consumer.poll_table(10_000, max_records=1).num_rows  # and it asks for more of partition 1
        consumer.pause((topic, 1))
        assert consumer.poll_table(500).num_rows == 0, "what comes is kept, and fills what may be read ahead"
        assert consumer._engine.fetcher._chunks, "the buffer was to be full"
        consumer.resume((topic, 0))
        assert consumer.poll_table(5_000, max_records=10)["partition"].to_pylist() == [0] * 10


def test_records_are_handed_out_before_an_error_that_came_after_them(
    proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(proxy, topic) as consumer:
        assert consumer.poll_table(10_000, max_records=1)["offset"].to_pylist() == [0]

        async def no_turn() -> None: ...

        def refuse(*_: object, **__: object) -> None:
            raise AuthenticationError("the password was changed")

        with monkeypatch.context() as patch:
            patch.setattr(consumer._engine, "turn", no_turn)
            patch.setattr(consumer._engine.fetching, "send", refuse)
            assert consumer.poll_table(10_000, max_records=1)["offset"].to_pylist() == [1]
            with pytest.raises(AuthenticationError, match="password was changed"):
                consumer.poll_table(10_000, max_records=1)
        assert consumer.poll_table(10_000, max_records=1)["offset"].to_pylist() == [2]
