"""The processing loop, `semel.process`: two instances of one application, and a chain of three applications."""

from __future__ import annotations

from itertools import pairwise

from semel.prove.checker import Expectation, OffsetsRule, Seen
from semel.prove.decks import (
    ABORT_POINTS,
    COMMIT_POINTS,
    GROUP_APIS,
    PLAIN_APIS,
    READ_APIS,
    TRANSACTION_APIS,
    broker_cards,
    network_cards,
    process_cards,
)
from semel.prove.schedule import Fault
from semel.prove.workloads.base import Workload

TRANSACTION_TIMEOUT_MS = 4_000
REQUEST_TIMEOUT_MS = 1_500
RESPONSE_POINTS = ("InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn", "OffsetFetch", "JoinGroup")


def value_of(record: Seen) -> list[str]:
    return [(record.value or b"").decode()]


def unit_of(record: Seen) -> str | None:
    tag = record.header("txn")
    return tag.decode() if tag else None


def loop_deck(guarantee: str, broker: bool, workers: tuple[str, ...]) -> list[Fault]:
    exactly = guarantee == "exactly_once"
    apis = TRANSACTION_APIS if exactly else PLAIN_APIS
    cards = [*network_cards((*apis, *GROUP_APIS, *READ_APIS), workers[0].partition("-")[0]), *Workload.producer_cards()]
    for worker in workers:
        cards += process_cards(worker, apis)
        if exactly:
            cards += [Fault("takeover", worker, api=api, side="request") for api in ("EndTxn", "TxnOffsetCommit")]
    if broker:
        responses = tuple(f"{api}.{when}_response" for api in RESPONSE_POINTS for when in ("before", "after"))
        cards += broker_cards((*COMMIT_POINTS, *ABORT_POINTS, *responses))
        cards.append(Fault("delay", "broker", "marker.before", for_ms=400, times=3))
    return cards


class LoopWorkload(Workload):
    name = "loop"
    help = "semel.process: two instances share a topic and copy it"

    @classmethod
    def deck(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        return loop_deck(guarantee, broker, ("worker-a", "worker-b"))

    def start(self) -> None:
        for name in ("worker-a", "worker-b"):
            is_static = name == "worker-a" and self.options.get("static") != "no"
            self.start_link(name, self.application, self.source, self.outputs[0], static=is_static)

    def start_link(self, name: str, application: str, source: str, sink: str, *, static: bool) -> None:
        """`name` is the actor; a static member keeps its partitions over a restart."""
        consumer = {
            "session_timeout_ms": self.session_timeout_ms,
            "heartbeat_interval_ms": 300,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            **({"group_instance_id": name} if static else {}),
        }
        options = {
            "source": source,
            "sink": sink,
            "application_id": application,
            "guarantee": self.guarantee,
            "bootstrap_servers": self.stage.proxy.bootstrap,
            "instance": name,
            "delay_ms": 1,
            "commit_interval_ms": int(self.options.get("commit_ms", "100")),
            "max_records": 200,
            "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
            "consumer": consumer,
            "producer": {"request_timeout_ms": REQUEST_TIMEOUT_MS},
        }
        self.run(name, "loop", options)

    def expectation(self, transactions: int) -> Expectation:
        rule = OffsetsRule(self.application, self.source, value_of)
        return self.copied(self.outputs, transactions, offsets=(rule,), transaction=unit_of)


class ChainWorkload(LoopWorkload):
    name = "chain"
    help = "three services one after the other, each exactly once"

    SERVICES = ("service-1", "service-2", "service-3")

    @classmethod
    def deck(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        return loop_deck(guarantee, broker, cls.SERVICES)

    @property
    def stations(self) -> list[str]:
        return [self.source, f"{self.prefix}.one", f"{self.prefix}.two", f"{self.prefix}.out"]

    def topics(self) -> dict[str, int]:
        return dict.fromkeys(self.stations, 4)

    def groups(self) -> list[tuple[str, str]]:
        return [(f"{self.prefix}-{name}", source) for name, source in zip(self.SERVICES, self.stations, strict=False)]

    def start(self) -> None:
        for name, (source, sink) in zip(self.SERVICES, pairwise(self.stations), strict=True):
            self.start_link(name, f"{self.prefix}-{name}", source, sink, static=True)

    def expectation(self, transactions: int) -> Expectation:
        group, source = self.groups()[-1]
        rule = OffsetsRule(group, source, value_of)
        return self.copied(self.outputs, transactions, offsets=(rule,), transaction=unit_of)

    def further_expectations(self, transactions: int) -> list[Expectation]:
        return [
            self.copied((sink,), transactions, offsets=(OffsetsRule(group, source, value_of),), transaction=unit_of)
            for (group, source), sink in zip(self.groups()[:2], self.stations[1:3], strict=True)
        ]
