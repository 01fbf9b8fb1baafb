"""What a workload says of itself."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from semel.prove.checker import Expectation, Seen
from semel.prove.decks import network_cards, process_cards
from semel.prove.inputs import by_key, forbidden_up_to, values_up_to
from semel.prove.schedule import Fault
from semel.prove.stage import Actor, Stage

PARTITIONS = 4
PRODUCER = "producer"  # the actor that fills the source; it ends when it is done
FEED_PACE_MS = 60
SESSION_TIMEOUT_MS = {True: 2_000, False: 6_000}  # with a broker of one's own; the least that Kafka allows by default
PRODUCER_APIS = ("InitProducerId", "Produce", "EndTxn")


class Workload(ABC):
    """A pipeline from a source topic to output topics, as processes."""

    name: ClassVar[str]
    help: ClassVar[str]
    has_sink: ClassVar[bool] = False  # whether it reaches the named points of the Spark sink
    faults_per_round: ClassVar[int] = 8
    spread_ms: ClassVar[int] = 1_200  # faults of a round begin within so long
    patience_s: ClassVar[float] = 120.0  # after that a pipeline that has not caught up is stuck

    def __init__(self, stage: Stage, prefix: str, guarantee: str, options: Mapping[str, str]) -> None:
        self.stage = stage
        self.prefix = prefix
        self.guarantee = guarantee
        self.options = dict(options)
        self.source = f"{prefix}.in"
        self.checkpoint: Path | None = None

    # --- for planning ---

    @classmethod
    @abstractmethod
    def deck(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        """Every fault that makes sense; with those of the broker's process if it is ours."""

    @staticmethod
    def producer_cards() -> list[Fault]:
        return [*process_cards("producer", PRODUCER_APIS), *network_cards(PRODUCER_APIS, "producer")]

    # --- for running ---

    @property
    def outputs(self) -> tuple[str, ...]:
        """The topics at the end."""
        return (f"{self.prefix}.out",)

    @property
    def application(self) -> str:
        return f"{self.prefix}-app"

    def topics(self) -> dict[str, int]:
        """All topics to be made, with their partitions."""
        return dict.fromkeys((self.source, *self.outputs), PARTITIONS)

    @abstractmethod
    def start(self) -> None:
        """Starts its processes, as actors of the stage."""

    def groups(self) -> list[tuple[str, str]]:
        """(group, topic it reads): when all of them stand at the end, the work is done."""
        return [(self.application, self.source)]

    def expectation(self, transactions: int) -> Expectation:
        """What the outputs must hold after so many transactions of input. By default: every record, in order."""
        return self.copied(self.outputs, transactions)

    def further_expectations(self, transactions: int) -> list[Expectation]:
        """Of topics in between, looked at when a scene ends."""
        return []

    def copied(self, topics: tuple[str, ...], transactions: int, **changes: Any) -> Expectation:
        fields: dict[str, Any] = {
            "ids": dict.fromkeys(values_up_to(transactions), 1),
            "order": by_key,
            "forbidden": forbidden_up_to(transactions),
            **changes,
        }
        return Expectation(topics, **fields)

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        """Whether a reader has everything. Asked again and again, so it should be quick."""
        return len({record.value for record in seen}) >= len(values_up_to(transactions))

    # --- pieces ---

    @property
    def session_timeout_ms(self) -> int:
        return SESSION_TIMEOUT_MS[self.stage.own is not None]

    def run(self, actor: str, module: str, options: Mapping[str, Any], *, spark: bool = False) -> Actor:
        """Starts a module of `semel.prove.workers` with options as JSON."""
        started = self.stage.actor(actor, "-m", f"semel.prove.workers.{module}", json.dumps(options), spark=spark)
        started.start()
        return started

    def feed(self, transactions: int) -> Actor:
        """Starts the producer that fills the source up to so many transactions, and then ends."""
        return self.run(
            PRODUCER,
            "producer",
            {
                "brokers": self.stage.proxy.bootstrap,
                "direct": self.stage.direct,
                "topic": self.source,
                "transactional_id": f"{self.prefix}-producer",
                "state": str(self.stage.folder / f"{self.prefix}.acknowledged"),
                "upto": transactions,
                "pace_ms": FEED_PACE_MS,
            },
        )
