"""Structured Streaming queries with `semel.sink`, on local Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

from semel.prove.checker import Expectation, OffsetsRule, Seen
from semel.prove.decks import (
    COMMIT_POINTS,
    PLAIN_APIS,
    READ_APIS,
    SINK_POINTS,
    TASK_POINTS,
    TRANSACTION_APIS,
    broker_cards,
    network_cards,
    point_cards,
)
from semel.prove.inputs import key_of, values_up_to
from semel.prove.schedule import Fault
from semel.prove.workloads.base import Workload
from semel.prove.workloads.loop import value_of

LOCAL = "local[2,4]"  # a task may fail three times before its job does
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"  # drivers live for seconds: starting fast counts
CONF = {
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "768m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
DESCRIBE = ("DescribeProducers",)


class SparkWorkload(Workload):
    name = "spark"
    help = "a stateless Structured Streaming query: rows keep their keys and their order"
    has_sink = True
    faults_per_round = 5
    spread_ms = 2_500
    patience_s = 240.0

    query: ClassVar[str] = "copy"
    master: ClassVar[str] = LOCAL

    @classmethod
    def deck(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        exactly = guarantee == "exactly_once"
        apis = (*TRANSACTION_APIS, *DESCRIBE) if exactly else PLAIN_APIS
        cards = [*network_cards((*apis, "ListOffsets", *READ_APIS), "driver"), *cls.producer_cards()]
        cards += [Fault("kill", "driver"), Fault("stop", "driver", for_ms=1_500), Fault("kill", "task")]
        cards += cls.guarantee_cards(guarantee)
        if exactly:
            cards += [
                Fault("stop", "driver", point, for_ms=1_000) for point in ("sink.after_write", "sink.after_offsets")
            ]
            cards += [Fault("takeover", "driver", point) for point in ("sink.before_begin", "sink.after_offsets")]
            cards += cls.checkpoint_cards()
        if broker:
            cards += broker_cards((*COMMIT_POINTS, "EndTxn.before_response", "EndTxn.after_response"))
        return cards

    @classmethod
    def guarantee_cards(cls, guarantee: str) -> list[Fault]:
        """The points of the sink's protocol that a guarantee passes, and those of its tasks."""
        if guarantee == "exactly_once":
            tasks = [Fault("stop", "task", point, for_ms=1_500) for point in TASK_POINTS]
            return [*point_cards("driver", SINK_POINTS), *point_cards("task", TASK_POINTS), *tasks]
        point = "sink.after_write" if guarantee == "at_least_once" else "sink.after_offsets"
        return [Fault("kill", "driver", point)] * 3

    @classmethod
    def checkpoint_cards(cls) -> list[Fault]:
        return [Fault("checkpoint_lost", "driver")]

    def sink_options(self) -> dict[str, Any]:
        return {"topic": self.outputs[0]}

    def start(self) -> None:
        self.checkpoint = self.stage.folder / self.prefix / "checkpoint"
        exactly = self.guarantee == "exactly_once"
        job = {
            "query": self.query,
            "master": self.master,
            "conf": CONF,
            "brokers": self.stage.proxy.bootstrap,
            "checkpoint": str(self.checkpoint),
            "trigger": "100 milliseconds",
            "source": {
                "subscribe": self.source,
                "startingOffsets": "committed" if exactly and self.query != "count" else "earliest",
                "maxOffsetsPerTrigger": self.options.get("per_batch", "120"),
                "applicationId": self.application,
                "kafka.request.timeout.ms": "3000",
                "kafka.client.id": "driver-source",
            },
            "sink": {
                "application_id": self.application,
                "guarantee": self.guarantee,
                "transaction_timeout_ms": 60_000,
                "client": {"request.timeout.ms": 3_000, "client.id": "driver", **self._batch_size()},
                **self.sink_options(),
            },
        }
        self.run("driver", "spark", job, spark=True)

    def _batch_size(self) -> dict[str, Any]:
        return {"batch.size": int(self.options["batch_bytes"])} if "batch_bytes" in self.options else {}

    def expectation(self, transactions: int) -> Expectation:
        rule = OffsetsRule(self.application, self.source, value_of)
        return self.copied(self.outputs, transactions, offsets=(rule,), one_epoch_each=True)


class AnyOrderWorkload(SparkWorkload):
    name = "spark-any-order"
    help = "a stateless query whose rows come in another order with every attempt, and go to either of two topics"

    query = "any_order"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.prefix}.out", f"{self.prefix}.more")[: int(self.options.get("topics", "2"))]

    def sink_options(self) -> dict[str, Any]:
        return {"topics": list(self.outputs)}

    def expectation(self, transactions: int) -> Expectation:
        rule = OffsetsRule(self.application, self.source, value_of)
        return self.copied(self.outputs, transactions, offsets=(rule,), one_epoch_each=True, order=None)


class ExecutorsWorkload(AnyOrderWorkload):
    name = "spark-executors"
    help = "the same on two executors that are processes of their own (needs about 3 GB of memory)"
    has_sink = False  # its deck is about executors
    patience_s = 300.0

    master = "local-cluster[2,1,1024]"

    @classmethod
    def guarantee_cards(cls, guarantee: str) -> list[Fault]:
        at_once = [Fault("kill", "executor", api=api, side="response") for api in ("Produce", "Fetch")]
        return [*at_once, Fault("kill", "executor"), Fault("stop", "executor", for_ms=3_000)] * 3

    @classmethod
    def checkpoint_cards(cls) -> list[Fault]:
        return []


class StatefulWorkload(SparkWorkload):
    name = "spark-stateful"
    help = "a stateful query: how often each key was seen; state and output must agree"

    query = "count"

    @classmethod
    def checkpoint_cards(cls) -> list[Fault]:
        return []  # a stateful query that lost its state cannot go on, and says so

    def expectation(self, transactions: int) -> Expectation:
        """Each count once, rising, and the last one right."""
        return Expectation(
            self.outputs,
            identify=lambda seen: f"{(seen.key or b'').decode()}={(seen.value or b'').decode()}",
            order=_count_of,
            totals=self._totals(transactions),
            total_of=_count_of,
            one_epoch_each=True,
        )

    def _totals(self, transactions: int) -> Counter[str]:
        return Counter(key_of(int(value)).decode() for value in values_up_to(transactions))

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        last = dict(map(_count_of, seen))
        return all(last.get(name, 0) >= number for name, number in self._totals(transactions).items())


def _count_of(record: Seen) -> tuple[str, int]:
    return (record.key or b"").decode(), int(record.value or b"0")
