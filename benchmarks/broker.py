"""semel's broker side by side with Apache Kafka: start, memory, throughput, latency, many partitions, many connections.

Both run as real processes with the same clients: confluent-kafka in this process, Kafka's own performance tools, and a
load generator over bare connections in a process of its own. fsync is alike: "os" leaves writing to the system, as a
stock Kafka does; "commit" has every acknowledged batch on the disk (Kafka: log.flush.interval.messages=1).

Where a limit is all there is to compare with, the peer is that limit. Everything is lower-is-better or higher-is-better
as usual, and a ratio above 1 means that semel is better, or within the limit.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.client_rates import (
    Rates,
    confluent_consume,
    confluent_produce,
    produce_load,
    with_confluent,
    with_kafkas_tools,
)
from benchmarks.contestants import (
    KAFKA,
    MB,
    Fsync,
    Node,
    create_topics,
    pair,
    resident_mb,
    start_to_metadata_s,
    topic,
    write_to_all,
)
from benchmarks.harness import Better, Report, compare, interleave, median, spread
from semel.local.brokers import SemelBroker

SIZES = {"100 B": 100, "1 KB": 1_000}
RECORDS_MAX = 1_500_000  # through a client in one run


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    runs: int
    warmup: int
    starts: int
    client_bytes: int  # through a client in one run
    memory_bytes: int
    latency_s: float
    latency_runs: int
    requests: int  # over bare connections in one run
    topics: int
    log_bytes: int


FULL = Scale(5, 1, 5, 250 * MB, 2_000 * MB, 2.5, 11, 30_000, 1_000, 10_000 * MB)
QUICK = Scale(3, 0, 2, 40 * MB, 200 * MB, 2, 3, 5_000, 200, 500 * MB)


def run(report: Report, quick: bool = False) -> None:
    scale = QUICK if quick else FULL
    for case in (
        start_and_idle_memory,
        throughput,
        durable_throughput,
        latency,
        connections,
        memory,
        growth,
        many_topics,
    ):
        _say(case.__name__.replace("_", " "))
        case(report, scale)


def _say(what: str) -> None:
    print(f"  broker: {what} ...", file=sys.stderr, flush=True)


def against_limit(
    report: Report, case: str, unit: str, values: list[float], limit: float, better: Better = "lower"
) -> None:
    """A comparison with what was promised."""
    ours = median(values)
    report(
        bench="broker",
        case=case,
        unit=unit,
        semel=ours,
        peer="limit",
        peer_value=limit,
        ratio=limit / ours if better == "lower" else ours / limit,
        runs=len(values),
        spread=spread(values),
    )


# --- start and memory ---


def start_and_idle_memory(report: Report, scale: Scale) -> None:
    """From the start of the process to the first response about its metadata, on a folder that was used before."""
    with pair() as nodes:
        memory: dict[str, list[float]] = {name: [] for name in nodes}
        for node in nodes.values():
            node.stop()

        def contestant(name: str, node: Node) -> Callable[[], float]:
            def measure() -> float:
                took_s = start_to_metadata_s(node)
                time.sleep(1)
                memory[name].append(resident_mb(node))
                node.stop()
                return took_s

            return measure

        contestants = {name: contestant(name, node) for name, node in nodes.items()}
        values = interleave(contestants, runs=scale.starts, warmup=0)
    compare(report, bench="broker", case="start to first metadata", unit="s", values=values, better="lower")
    against_limit(report, "start to first metadata", "s", values["semel"], 0.3)
    compare(report, bench="broker", case="resident memory, idle", unit="MB", values=memory, better="lower")
    against_limit(report, "resident memory, idle", "MB", memory["semel"], 80)


def memory(report: Report, scale: Scale) -> None:
    """After so much was written and read through confluent-kafka."""
    count, case = scale.memory_bytes // 1_000, f"resident memory after {scale.memory_bytes / 1e9:g} GB in and out"
    values: dict[str, list[float]] = {}
    with pair() as nodes:
        for name, node in nodes.items():
            with topic(node) as into:
                confluent_produce(node, into, 1_000, count)
                confluent_consume(node, into, count)
                values[name] = [resident_mb(node)]
    compare(report, bench="broker", case=case, unit="MB", values=values, better="lower")
    against_limit(report, case, "MB", values["semel"], 150)


# --- throughput through clients ---


Client = Callable[[Node, int, int], Rates]  # node, record bytes, how many


def throughput(report: Report, scale: Scale) -> None:
    with pair() as nodes:
        for label, record_bytes in SIZES.items():
            count = min(scale.client_bytes // record_bytes, RECORDS_MAX)
            through_clients(report, scale, nodes, "confluent-kafka", with_confluent, label, record_bytes, count)
            through_clients(report, scale, nodes, "Kafka's tools", with_kafkas_tools, label, record_bytes, count)


def durable_throughput(report: Report, scale: Scale) -> None:
    with pair("commit") as nodes:
        count = scale.client_bytes // 4_000
        through_clients(report, scale, nodes, "confluent-kafka, fsync=commit", with_confluent, "1 KB", 1_000, count)


def through_clients(
    report: Report,
    scale: Scale,
    nodes: dict[str, Node],
    client_name: str,
    client: Client,
    label: str,
    record_bytes: int,
    count: int,
) -> None:
    consumed: dict[str, list[float]] = {name: [] for name in nodes}

    def contestant(name: str, node: Node) -> Callable[[], float]:
        def measure() -> float:
            rates = client(node, record_bytes, count)
            consumed[name].append(rates.consume)
            return rates.produce

        return measure

    contestants = {name: contestant(name, node) for name, node in nodes.items()}
    produced = interleave(contestants, runs=scale.runs, warmup=scale.warmup)
    consumed = {name: rates[scale.warmup :] for name, rates in consumed.items()}
    for what, values in (("produce", produced), ("consume", consumed)):
        compare(report, bench="broker", case=f"{what} {label}, {client_name}", unit="records/s", values=values)


# --- bare connections ---


def latency(report: Report, scale: Scale) -> None:
    """From the moment at which a request was due to its response, at 5,000 requests a second.

    Many short runs in turns, and the median of their percentiles: one stall of the machine spoils one run only.
    """
    rate, over = 5_000, 10
    fsyncs: tuple[Fsync, ...] = ("os", "commit")
    for fsync in fsyncs:
        with pair(fsync) as nodes:
            medians: dict[str, list[float]] = {name: [] for name in nodes}

            def contestant(name: str, node: Node, medians: dict[str, list[float]] = medians) -> Callable[[], float]:
                def measure() -> float:
                    with topic(node, over) as into:
                        found = produce_load(
                            "open", node, into, partitions=over, connections=over, rate=rate, seconds=scale.latency_s
                        )
                    medians[name].append(found["p50"])
                    return float(found["p99"])

                return measure

            contestants = {name: contestant(name, node) for name, node in nodes.items()}
            warmup = 3 * scale.warmup  # a JVM needs some ten thousand requests before it is at its best
            values = interleave(contestants, runs=scale.latency_runs, warmup=warmup)
            medians = {name: found[warmup:] for name, found in medians.items()}
        case = f"produce latency at {rate:,} requests/s, fsync={fsync}"
        compare(report, bench="broker", case=f"{case}, p99", unit="ms", values=values, better="lower")
        compare(report, bench="broker", case=f"{case}, p50", unit="ms", values=medians, better="lower")


def connections(report: Report, scale: Scale) -> None:
    """Batches of 16 KB, five under way on each connection; few and many connections take turns, as the brokers do."""
    counts = (1, 10, 50, 200)
    with pair() as nodes:
        each = {f"{name} {count}": _closed(node, scale, count) for count in counts for name, node in nodes.items()}
        found = interleave(each, runs=scale.runs, warmup=scale.warmup)
    for count in counts:
        case = f"produce batches of 16 KB over {count} connection{'s' if count > 1 else ''}"
        values = {name: found[f"{name} {count}"] for name in nodes}
        compare(report, bench="broker", case=case, unit="batches/s", values=values)
    compare(
        report,
        bench="broker",
        case="produce over 200 connections against 1",
        unit="batches/s",
        values={"semel": found["semel 200"], "semel, 1 connection": found["semel 1"]},
    )


def _closed(node: Node, scale: Scale, count: int) -> Callable[[], float]:
    def measure() -> float:
        with topic(node, 8) as into:
            done = produce_load(
                "closed", node, into, partitions=8, connections=count, records=16, requests=scale.requests
            )
        return float(done["requests_per_s"])

    return measure


def growth(report: Report, scale: Scale) -> None:
    """Is a long log slower than a short one? Both on the same broker, in turns."""
    count, gigabytes = scale.client_bytes // 1_000, scale.log_bytes / 1e9
    with pair() as nodes:
        node = nodes["semel"]
        nodes[KAFKA].stop()
        with topic(node, 1) as long:
            requests = scale.log_bytes // (900 * 1_000)
            produce_load(
                "closed", node, long, connections=4, records=900, record_bytes=1_000, requests=requests, in_flight=2
            )
            ends = itertools.count(requests * 900, count)
            consumed: dict[str, list[float]] = {"semel": [], "semel, empty log": []}

            def on_long() -> float:
                rate = confluent_produce(node, long, 1_000, count)
                consumed["semel"].append(confluent_consume(node, long, count, 1, next(ends)))
                return rate

            def on_empty() -> float:
                with topic(node, 1) as short:
                    rate = confluent_produce(node, short, 1_000, count)
                    consumed["semel, empty log"].append(confluent_consume(node, short, count, 1))
                return rate

            contestants = {"semel": on_long, "semel, empty log": on_empty}
            produced = interleave(contestants, runs=scale.runs, warmup=scale.warmup)
    case = f"1 KB with {gigabytes:g} GB in the log"
    compare(report, bench="broker", case=f"produce {case}", unit="records/s", values=produced)
    values = {name: rates[scale.warmup :] for name, rates in consumed.items()}
    compare(report, bench="broker", case=f"consume {case}", unit="records/s", values=values)


# --- many topics ---


def many_topics(report: Report, scale: Scale) -> None:
    """Start to the first response with ten partitions in every topic, each with records in it, and what that costs.

    A log is read when it is first used: the cost is taken after the start, and when all of them are in use.
    """
    with SemelBroker(None, "--fsync", "os") as node:
        names = create_topics(node, scale.topics, 10)
        write_to_all(node, names, 10)
        used_mb = [resident_mb(node)]
        starts, fresh_mb = [], []
        for _ in range(scale.starts):
            node.stop(timeout_ms=300_000)  # ten thousand logs are put in order
            starts.append(start_to_metadata_s(node))
            time.sleep(1)
            fresh_mb.append(resident_mb(node))
        write_to_all(node, names, 10)
        used_mb.append(resident_mb(node))
    case = f"{scale.topics:,} topics x 10 partitions"
    against_limit(report, f"{case}: start to first metadata", "s", starts, 5)
    against_limit(report, f"{case}: resident memory after the start", "MB", fresh_mb, 300)
    against_limit(report, f"{case}: resident memory with all in use", "MB", used_mb, 300)
