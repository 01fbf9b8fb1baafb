"""Prometheus metrics of the broker, and the HTTP port that serves them.

Numbers are collected for each request, on the broker's own event loop and in turns with other requests: there are no
locks and no second thread that would take the interpreter from the first. How many series there are is bounded, however
many partitions and groups there are; where a choice has to be made, those that lag most are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import os
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple

from semel.broker.broker import BrokerNode
from semel.broker.connection import Server
from semel.broker.counters import LATENCY_BOUNDS_S
from semel.broker.topics import Partition, Topic
from semel.broker.transactions.states import PREPARED, Transaction, TxnState
from semel.broker.turns import Turns
from semel.exposition import CONTENT_TYPE, escaped, family, histogram

MOST_PARTITIONS = 500  # that have series of their own
PARTITIONS_PER_SECOND = 2_500  # in use: for each so many, what is collected of them is a second older
MOST_GROUP_PARTITIONS = 500
MOST_GROUPS = 500
LATE_AFTER_MS = 5 * 60_000  # more than transaction.max.timeout.ms, as in Kafka
REQUEST_LIMIT_S = 10.0
LONGEST_REQUEST_BYTES = 16 << 10


class Metric(NamedTuple):
    kind: str
    text: str
    kafka: str = ""  # Kafka's metric that has the same meaning


METRICS: dict[str, Metric] = {
    # traffic
    "semel_request_total_time_seconds": Metric(
        "histogram", "From request to response, waiting included, by API.", "RequestMetrics,name=TotalTimeMs"
    ),
    "semel_bytes_in_total": Metric("counter", "Bytes read from clients.", "BrokerTopicMetrics,name=BytesInPerSec"),
    "semel_bytes_out_total": Metric("counter", "Bytes sent to clients.", "BrokerTopicMetrics,name=BytesOutPerSec"),
    "semel_connections": Metric("gauge", "Open connections.", "socket-server-metrics,connection-count"),
    "semel_waiting_fetches": Metric("gauge", "Fetches in a long poll.", "DelayedOperationPurgatory,name=PurgatorySize"),
    "semel_fetch_sessions": Metric("gauge", "Fetch sessions.", "FetchSessionCache,name=NumIncrementalFetchSessions"),
    # producers
    "semel_duplicate_batches_total": Metric("counter", "Batches that were recognised as stored before."),
    "semel_out_of_order_batches_total": Metric("counter", "Batches that were refused: not the next sequence."),
    "semel_fenced_requests_total": Metric("counter", "Requests of a producer with an older epoch, by API."),
    "semel_producer_ids": Metric("gauge", "Producers that partitions know.", "ReplicaManager,name=ProducerIdCount"),
    # transactions
    "semel_transactional_ids": Metric("gauge", "Transactional ids that the coordinator knows."),
    "semel_transactions": Metric("gauge", "Transactions that are under way, by state."),
    "semel_oldest_transaction_seconds": Metric("gauge", "Age of the oldest transaction that is under way; 0: none."),
    "semel_transactions_ended_total": Metric("counter", "Decided transactions, by outcome and reason."),
    "semel_markers_outstanding": Metric(
        "gauge",
        "Partitions that wait for the marker of a decided transaction.",
        "TransactionMarkerChannelManager,name=LogAppendRetryQueueSize",
    ),
    "semel_last_stable_offset_lag": Metric(
        "gauge",
        "Offsets between the last stable offset and the high watermark; partitions without are left out.",
        "Partition,name=LastStableOffsetLag",
    ),
    "semel_last_stable_offset_lag_max": Metric("gauge", "The largest lag of a last stable offset."),
    "semel_partitions_with_open_transactions": Metric("gauge", "Partitions that hold back readers of committed data."),
    "semel_partitions_with_late_transactions": Metric(
        "gauge",
        "Partitions with a transaction that is open longer than any timeout allows.",
        "ReplicaManager,name=PartitionsWithLateTransactionsCount",
    ),
    # topics
    "semel_topics": Metric("gauge", "Topics.", "KafkaController,name=GlobalTopicCount"),
    "semel_partitions": Metric("gauge", "Partitions.", "ReplicaManager,name=PartitionCount"),
    "semel_log_end_offset": Metric("gauge", "Offset that the next record gets.", "Log,name=LogEndOffset"),
    "semel_log_start_offset": Metric("gauge", "Offset of the first record.", "Log,name=LogStartOffset"),
    "semel_log_size_bytes": Metric("gauge", "Bytes of a partition's segments.", "Log,name=Size"),
    "semel_last_stable_offset": Metric("gauge", "Offset up to which read_committed reads."),
    "semel_partitions_left_out": Metric("gauge", "Partitions in use that have no series of their own here."),
    # groups
    "semel_groups": Metric("gauge", "Groups, by state.", "GroupMetadataManager,name=NumGroups"),
    "semel_group_offset": Metric("gauge", "Committed offset."),
    "semel_group_lag": Metric("gauge", "Offsets that the group has still to read."),
    "semel_group_lag_sum": Metric("gauge", "Offsets that the group has still to read, of all partitions."),
    "semel_group_partitions_left_out": Metric("gauge", "Committed offsets that have no series of their own here."),
    # the process
    "semel_disk_free_bytes": Metric("gauge", "Free space on the disk of the data folder."),
    "process_resident_memory_bytes": Metric("gauge", "Memory of the process."),
    "process_cpu_seconds_total": Metric("counter", "Processor time of the process."),
    "process_open_fds": Metric("gauge", "Open files and connections."),
    "process_start_time_seconds": Metric("gauge", "When the process started, in seconds since 1970."),
}

_OPEN_STATES = (TxnState.ONGOING, TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BrokerMetrics:
    """What the broker's objects know, as Prometheus' text."""

    def __init__(self, broker: BrokerNode, server: Server) -> None:
        self._broker, self._server = broker, server
        self._started_s = time.time()
        self._kept_topics = ("", 0)  # text, and until when it is served again, in milliseconds

    async def text(self) -> str:
        turns = Turns()
        parts = [self._traffic(), self._producers(), self._transactions()]
        parts += [await self._topics(turns), await self._groups(turns), self._process()]
        return "".join(parts)

    def _traffic(self) -> str:
        server, fetches = self._server, self._broker.fetches
        name = "semel_request_total_time_seconds"
        series = [
            (f'api="{served.name}"', served.latencies.buckets, served.latencies.sum_s)
            for served in server.dispatcher.served.values()
        ]
        return histogram(name, METRICS[name].text, LATENCY_BOUNDS_S, series) + _plain(
            semel_bytes_in_total=server.bytes_in,
            semel_bytes_out_total=server.bytes_out,
            semel_connections=len(server.connections),
            semel_waiting_fetches=len(fetches.waiting),
            semel_fetch_sessions=len(fetches.sessions),
        )

    def _producers(self) -> str:
        counters = self._broker.counters
        return _plain(
            semel_duplicate_batches_total=counters.duplicates, semel_out_of_order_batches_total=counters.out_of_order
        ) + _written(
            "semel_fenced_requests_total", ((f'{{api="{api}"}}', count) for api, count in counters.fenced.items())
        )

    def _transactions(self) -> str:
        broker = self._broker
        under_way = [each.txn for each in broker.transactions.ids.active() if each.txn.state in _OPEN_STATES]
        states = Counter(txn.state for txn in under_way)
        now_ms = broker.clock.now_ms()
        ages_ms = [now_ms - txn.started_ms for txn in under_way if txn.started_ms >= 0]
        return (
            _plain(
                semel_transactional_ids=len(broker.transactions.ids),
                semel_oldest_transaction_seconds=max([0, *ages_ms]) / 1000,
                semel_markers_outstanding=sum(map(_outstanding, under_way)),
            )
            + _written("semel_transactions", ((f'{{state="{state.label}"}}', states[state]) for state in _OPEN_STATES))
            + _written(
                "semel_transactions_ended_total",
                (
                    (f'{{outcome="{"commit" if is_commit else "abort"}",reason="{reason}"}}', count)
                    for (is_commit, reason), count in broker.counters.ends.items()
                ),
            )
        )

    async def _topics(self, turns: Turns) -> str:
        """Of ten thousand partitions in use it takes long: it is then some seconds old, or a scrape every second would
        take the broker more than a hundredth of its time."""
        text, until_ms = self._kept_topics
        now_ms = self._broker.clock.now_ms()
        if now_ms < until_ms:
            return text
        text, partitions = await self._read_topics(turns, now_ms)
        self._kept_topics = (text, now_ms + partitions // PARTITIONS_PER_SECOND * 1000)
        return text

    async def _read_topics(self, turns: Turns, now_ms: int) -> tuple[str, int]:
        """And of how many partitions."""
        topics = list(self._broker.topics)
        found = _Partitions(now_ms, self._late_after_ms())
        for topic in topics:
            for part in topic.partitions:
                found.add(topic, part)
            await turns.next()
        counts = _plain(
            semel_topics=len(topics),
            semel_partitions=sum(len(topic.partitions) for topic in topics),
            semel_producer_ids=found.producers,
            semel_last_stable_offset_lag_max=max((lag for lag, _ in found.lags), default=0),
            semel_partitions_with_open_transactions=found.with_open,
            semel_partitions_with_late_transactions=found.with_late,
            semel_partitions_left_out=max(0, found.opened - MOST_PARTITIONS),
        )
        await turns.next()
        most = heapq.nlargest(MOST_PARTITIONS, found.lags)
        lags = _written("semel_last_stable_offset_lag", ((labels, lag) for lag, labels in most))
        series = "".join(_written(name, samples) for name, samples in found.series.items())
        return counts + lags + series, found.opened

    def _late_after_ms(self) -> int:
        limit_ms: int = self._broker.settings["transaction.max.timeout.ms"]
        return limit_ms + LATE_AFTER_MS

    async def _groups(self, turns: Turns) -> str:
        coordinator, topics = self._broker.groups, self._broker.topics
        states = Counter(group.state.value for group in coordinator.groups())
        states.update(group.state.value for group in coordinator.consumer_groups())
        lags: list[tuple[int, str, int]] = []
        sums: Counter[str] = Counter()
        for number, ((group, topic, index), found) in enumerate(coordinator.all_offsets()):
            log = topics.find_log(topic, index)
            lag = max(log.high_watermark - found.offset, 0) if log is not None and log.is_open else -1
            labels = f'{{group="{escaped(group)}",partition="{index}",topic="{escaped(topic)}"}}'
            lags.append((lag, labels, found.offset))
            sums[group] += max(lag, 0)
            if number % 64 == 0:
                await turns.next()
        most = heapq.nlargest(MOST_GROUP_PARTITIONS, lags)
        return (
            _written("semel_groups", ((f'{{state="{state}"}}', count) for state, count in states.items()))
            + _written("semel_group_offset", ((labels, offset) for _, labels, offset in most))
            + _written("semel_group_lag", ((labels, lag) for lag, labels, _ in most if lag >= 0))
            + _written(
                "semel_group_lag_sum",
                ((f'{{group="{escaped(group)}"}}', lag) for group, lag in sums.most_common(MOST_GROUPS)),
            )
            + _plain(semel_group_partitions_left_out=max(0, len(lags) - MOST_GROUP_PARTITIONS))
        )

    def _process(self) -> str:
        used = resource.getrusage(resource.RUSAGE_SELF)
        disk = os.statvfs(self._broker.data_dir.path)
        numbers = {
            "semel_disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "process_cpu_seconds_total": used.ru_utime + used.ru_stime,
            "process_start_time_seconds": self._started_s,
        }
        with contextlib.suppress(OSError):  # Linux has these
            with open("/proc/self/statm", "rb") as statm:
                numbers["process_resident_memory_bytes"] = int(statm.read().split()[1]) * _PAGE_BYTES
            numbers["process_open_fds"] = len(os.listdir("/proc/self/fd"))
        return _plain(**numbers)


class _Partitions:
    """What is collected of all partitions in one pass. Those that were not used since the start are not opened."""

    def __init__(self, now_ms: int, late_after_ms: int) -> None:
        self._late_before_ms = now_ms - late_after_ms
        self.opened = self.producers = self.with_open = self.with_late = 0
        self.lags: list[tuple[int, str]] = []
        names = ("semel_log_end_offset", "semel_log_start_offset", "semel_log_size_bytes", "semel_last_stable_offset")
        self.series: dict[str, list[tuple[str, float]]] = {name: [] for name in names}

    def add(self, topic: Topic, part: Partition) -> None:
        log = part.log
        if not log.is_open:
            return
        opened = log.opened
        self.opened += 1
        states = opened.states
        self.producers += len(states.producers)
        stable = opened.last_stable_offset
        lag = opened.high_watermark - stable
        if not lag and self.opened > MOST_PARTITIONS:
            return
        labels = f'{{partition="{part.index}",topic="{escaped(topic.name)}"}}'
        if lag:
            self.lags.append((lag, labels))
        if states.open_transactions:
            self.with_open += 1
            open_ones = [states.producers[producer_id] for producer_id in states.open_transactions.values()]
            self.with_late += any(entry.last_append_ms < self._late_before_ms for entry in open_ones)
        if self.opened <= MOST_PARTITIONS:
            numbers = (opened.end_offset, opened.start_offset, opened.segments.size_bytes, stable)
            for samples, number in zip(self.series.values(), numbers, strict=True):
                samples.append((labels, number))


def _outstanding(txn: Transaction) -> int:
    return len(txn.partitions) if txn.state in PREPARED else 0


def _written(name: str, samples: Iterable[tuple[str, float]]) -> str:
    metric = METRICS[name]
    return family(name, metric.kind, metric.text, samples)


def _plain(**numbers: float) -> str:
    return "".join(_written(name, [("", number)]) for name, number in numbers.items())


# --- the port ---------------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def serve_metrics(broker: BrokerNode, server: Server, host: str, port: int) -> AsyncIterator[None]:
    """Serves HTTP for as long as the block runs."""
    metrics = BrokerMetrics(broker, server)
    connections: set[asyncio.Task[None]] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                writer.write(await _response(reader, metrics.text))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked went away, or does not speak HTTP
        finally:
            connections.discard(task)
            writer.close()

    try:
        http = await asyncio.start_server(on_connection, host, port, limit=LONGEST_REQUEST_BYTES)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    except UnicodeError as error:  # no host name, such as `a..b`
        raise OSError(errno.EINVAL, f"cannot serve metrics on {host}:{port}: {error}") from error
    try:
        yield
    finally:
        http.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _response(reader: asyncio.StreamReader, text: Callable[[], Awaitable[str]]) -> bytes:
    """One request for each connection, as scrapers are content with."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", "only GET is served here\n", "text/plain")
    if path not in (b"/", b"/metrics"):
        return _http("404 Not Found", "metrics are at /metrics\n", "text/plain")
    found = _http("200 OK", await text(), CONTENT_TYPE)
    return found if method == b"GET" else found[: found.index(b"\r\n\r\n") + 4]


def _http(status: str, body: str, content_type: str) -> bytes:
    data = body.encode()
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(data)}", "Connection: close")
    return "\r\n".join((*lines, "", "")).encode() + data
