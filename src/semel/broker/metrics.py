"""Prometheus metrics on an HTTP port of their own. Numbers are collected when they are asked for, so they cost nothing
until then; the library is only loaded if metrics are switched on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from semel.broker.broker import BrokerNode
from semel.broker.server import Server


class BrokerCollector(Collector):
    """What the broker's objects know, as metrics."""

    def __init__(self, broker: BrokerNode, server: Server) -> None:
        self._broker, self._server = broker, server

    def collect(self) -> Iterator[Metric]:
        yield from self._traffic()
        yield from self._topics()
        yield from self._groups()

    def _traffic(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("semel_requests", "Requests taken, by API.", labels=["api"])
        seconds = CounterMetricFamily(
            "semel_request_seconds", "Time from request to answer, waiting included, by API.", labels=["api"]
        )
        for served in tuple(self._server.dispatcher.served.values()):
            requests.add_metric([served.name], served.requests)
            seconds.add_metric([served.name], served.seconds)
        yield requests
        yield seconds
        yield CounterMetricFamily("semel_bytes_in", "Bytes read from clients.", self._server.bytes_in)
        yield CounterMetricFamily("semel_bytes_out", "Bytes sent to clients.", self._server.bytes_out)
        yield GaugeMetricFamily("semel_connections", "Open connections.", len(self._server.connections))
        yield GaugeMetricFamily("semel_waiting_fetches", "Fetches in a long poll.", len(self._broker.fetches.waiting))
        yield GaugeMetricFamily("semel_fetch_sessions", "Fetch sessions.", len(self._broker.fetches.sessions))

    def _topics(self) -> Iterator[Metric]:
        topics = tuple(self._broker.topics)
        yield GaugeMetricFamily("semel_topics", "Topics.", len(topics))
        labels = ["topic", "partition"]
        end = GaugeMetricFamily("semel_log_end_offset", "Offset that the next record gets.", labels=labels)
        start = GaugeMetricFamily("semel_log_start_offset", "Offset of the first record.", labels=labels)
        size = GaugeMetricFamily("semel_log_size_bytes", "Bytes of a partition's segments.", labels=labels)
        stable = GaugeMetricFamily("semel_last_stable_offset", "What read_committed may read.", labels=labels)
        for topic in topics:
            for part in topic.partitions:
                if part.log.is_open:
                    where = [topic.name, str(part.index)]
                    end.add_metric(where, part.log.end_offset)
                    start.add_metric(where, part.log.start_offset)
                    size.add_metric(where, part.log.size_bytes)
                    stable.add_metric(where, part.log.last_stable_offset)
        yield from (end, start, size, stable)

    def _groups(self) -> Iterator[Metric]:
        coordinator = self._broker.groups
        groups = GaugeMetricFamily("semel_groups", "Groups, by state.", labels=["state"])
        states = Counter(group.state.value for group in coordinator.groups())
        states.update(group.state.value for group in coordinator.consumer_groups())
        for state, count in states.items():
            groups.add_metric([state], count)
        yield groups
        labels = ["group", "topic", "partition"]
        committed = GaugeMetricFamily("semel_group_offset", "Committed offset.", labels=labels)
        lag = GaugeMetricFamily("semel_group_lag", "Records that the group has still to read.", labels=labels)
        for (group, topic, index), found in coordinator.all_offsets():
            where = [group, topic, str(index)]
            committed.add_metric(where, found.offset)
            log = self._broker.topics.find_log(topic, index)
            if log is not None and log.is_open:
                lag.add_metric(where, max(log.high_watermark - found.offset, 0))
        yield from (committed, lag)


@contextlib.contextmanager
def serve_metrics(broker: BrokerNode, server: Server, host: str, port: int) -> Iterator[None]:
    """Answers HTTP requests for as long as the block runs."""
    registry = CollectorRegistry()
    registry.register(BrokerCollector(broker, server))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    http, thread = start_http_server(port, host, registry)
    try:
        yield
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
