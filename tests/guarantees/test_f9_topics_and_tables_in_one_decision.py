"""F9: topics and PostgreSQL in one decision: both commit or neither, through every crash and timeout.

Tables are read through psycopg, topics through confluent-kafka. Both kinds of broker: with two-phase commit, where a
prepared transaction waits for its end; and without, as Apache Kafka is, where the coordinator may abort what the
database has decided, and the output is written again from the database's copy.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel import faults
from semel.client.admin import Admin
from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresServer
from semel.local.processes import Process
from semel.patterns import process_decisions
from semel.prove.database import PostgresProxy
from semel.prove.injection import Injection, command
from semel.sinks.postgres.errors import FencedInDatabaseError
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.sinks import execute
from tests.support.waiting import PATIENCE_S, until

PARTITIONS = 2
RECORDS = 120
MEMBER = "tests.guarantees.decision_member"
OPTIONS: dict[str, Any] = {
    "max_records": 20,
    "commit_interval_ms": 20,
    "consumer": {"session.timeout.ms": 1_500, "heartbeat.interval.ms": 200},
}
SETTINGS = (
    "--set=group.min.session.timeout.ms=500",
    "--set=transaction.abort.timed.out.transaction.cleanup.interval.ms=50",
)
TWO_PHASE = "--set=transaction.two.phase.commit.enable=true"
POINTS = ("decision.prepared", "decision.made", "decision.ended")
KILLS = [
    pytest.param(named, point, id=f"{'same name' if named else 'another instance'}-{point}", marks=marks)
    for named in (True, False)
    for point in POINTS
    for marks in [() if point == "decision.made" else pytest.mark.full]
]
WITH_COPY = pytest.mark.parametrize("broker", [()], indirect=True, ids=["with a copy"])
WITH_TWO_PHASE = pytest.mark.parametrize("broker", [(TWO_PHASE,)], indirect=True, ids=["two-phase"])


@pytest.fixture(scope="module", params=[(), (TWO_PHASE,)], ids=["with a copy", "two-phase"])
def broker(request: pytest.FixtureRequest) -> Iterator[SemelBroker]:
    with SemelBroker(None, "--fsync", "os", *SETTINGS, *request.param) as broker:
        yield broker


@pytest.fixture
def ledger(broker: SemelBroker, dsn: str) -> Ledger:
    return Ledger(Cluster("semel", broker), dsn)


def both(output: str) -> Callable[[Any], list[Any]]:
    """For each record a row and a record with its number."""
    return lambda record: [{"number": int(record.value)}, semel.Output(record.value, key=b"k", topic=output)]


class Ledger:
    """Numbers that must be in the table and in the output topic, each once."""

    def __init__(self, cluster: Cluster, dsn: str) -> None:
        self.bootstrap, self.dsn = cluster.bootstrap, dsn
        self.application_id = cluster.unique("decided")
        self.topic = create_topic(self.bootstrap, cluster.unique("numbers"), PARTITIONS)
        self.output = create_topic(self.bootstrap, cluster.unique("entries"), 1)
        self.sent = 0
        self.execute("CREATE TABLE entries (number int PRIMARY KEY CHECK (number >= 0))")

    def produce(self, count: int = RECORDS) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in range(self.sent, self.sent + count):
            producer.produce(self.topic, str(number), partition=number % PARTITIONS)
        assert producer.flush(PATIENCE_S) == 0
        self.sent += count

    def execute(self, statement: str) -> list[Any]:
        return execute(self.dsn, statement)

    def rows(self) -> set[int]:
        return {number for (number,) in self.execute("SELECT number FROM entries")}

    def records(self) -> Counter[int]:
        return Counter(int(row.value or b"") for row in read_topic(self.bootstrap, self.output))

    def decisions(self) -> list[tuple[str, bool]]:
        return self.execute("SELECT state, copy IS NOT NULL FROM semel.loop_decisions ORDER BY 1")

    def process(self, function: Any = None, **options: Any) -> Any:
        sink = options.pop("sink", None) or semel.Postgres(
            options.pop("dsn", self.dsn), table="entries", with_topics=True
        )
        given = {**OPTIONS, "stop_at_end": True, "application_id": self.application_id, **options}
        return semel.process(self.topic, sink, function or both(self.output), bootstrap_servers=self.bootstrap, **given)

    def member(self, faults: str = "", *words: str) -> Process:
        arguments = (self.bootstrap, self.dsn, self.application_id, self.topic, self.output, *words)
        return Process(command(Injection(faults), "-m", MEMBER, *arguments))

    def check(self) -> None:
        expected = set(range(self.sent))
        records = self.records()
        assert self.rows() == expected
        assert set(records) == expected, f"missing: {sorted(expected - set(records))}"
        assert max(records.values()) == 1, f"twice: {sorted(n for n, times in records.items() if times > 1)}"


class At(faults.Injector):
    """Does something at a point, once."""

    def __init__(self, point: str, act: Callable[[], None], nth: int = 2) -> None:
        self._point, self._act, self._left = point, act, nth
        self.fired = False

    def hit(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if not self._left:
                self.fired = True
                self._act()


@pytest.fixture
def at() -> Iterator[Callable[..., At]]:
    def install(point: str, act: Callable[[], None], nth: int = 2) -> At:
        injector = At(point, act, nth)
        faults.install(injector)
        return injector

    yield install
    faults.install(None)


def test_rows_and_records_appear_together_and_no_copy_is_left(ledger: Ledger) -> None:
    ledger.produce()
    stats = ledger.process()
    assert stats.records_out == 2 * RECORDS
    ledger.check()
    assert ledger.decisions() == []  # this instance ended in order and does not come back
    ledger.produce(10)
    assert ledger.process(instance="one").records_in == 10
    ledger.check()
    assert ledger.decisions() == [("finished", False)]


@pytest.mark.parametrize(("named", "point"), KILLS)
def test_a_kill_at_any_point_leaves_both_or_neither(ledger: Ledger, named: bool, point: str) -> None:
    """By its next process, or by the instance that gets its partitions."""
    ledger.produce()
    with ledger.member(f"{point}:kill:2", *(["named"] if named else [])) as member:
        assert member.wait(PATIENCE_S) == -9, member.output
    decided = [state for state, _ in ledger.decisions()]
    assert decided == ["decided"]  # of the first unit of work, or the second
    ledger.process(instance="the one" if named else None)
    ledger.check()


def test_the_coordinator_may_abort_what_is_decided(ledger: Ledger, broker: SemelBroker, at: Callable[..., At]) -> None:
    """A pause between the two commits that exceeds transaction.timeout.ms. With two-phase commit there is none."""
    ledger.produce()

    def exceed_the_timeout() -> None:
        with Admin(bootstrap_servers=ledger.bootstrap) as admin:

            def states() -> list[str]:
                mine = [each for each in admin.list_transactions() if ledger.application_id in each.transactional_id]
                return [each.state for each in mine]

            if TWO_PHASE in broker.options:
                assert states() == ["Ongoing"]
            else:
                until(lambda: states() == ["CompleteAbort"], "the coordinator did not abort it")

    fault = at("decision.made", exceed_the_timeout)
    ledger.process(transaction_timeout_ms=3_000)
    assert fault.fired
    ledger.check()


@WITH_COPY
@pytest.mark.parametrize(
    "point", [pytest.param("decision.copy_written", marks=pytest.mark.full), "decision.copy_decided"]
)
def test_a_kill_while_the_copy_is_written_does_not_write_it_twice(
    ledger: Ledger, broker: SemelBroker, point: str
) -> None:
    ledger.produce()
    with ledger.member("decision.made:kill:2", "named") as member:
        member.wait(PATIENCE_S)
    with Admin(bootstrap_servers=ledger.bootstrap) as admin:
        admin.abort_transaction(f"{ledger.application_id}-the one")
    with ledger.member(f"{point}:kill", "named") as member:
        assert member.wait(PATIENCE_S) == -9, member.output
    ledger.process(instance="the one")
    ledger.check()


@pytest.mark.parametrize("kind", ["before", "after"])
def test_an_unknown_commit_of_the_database_is_settled(ledger: Ledger, postgres: PostgresServer, kind: Any) -> None:
    ledger.produce()
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        through = ledger.dsn.replace(f":{postgres.port}/", f":{proxy.port}/")

        def settled(stats: Any) -> None:
            if stats.commits == 2 and not proxy.cuts:
                proxy.arm(kind)

        ledger.process(dsn=through, on_settled=settled)
        assert proxy.cuts == 1
    ledger.check()


@pytest.mark.full
def test_a_frozen_instance_cannot_decide_after_its_partitions_went(ledger: Ledger) -> None:
    ledger.produce()
    with ledger.member("decision.prepared:stop:2") as frozen:
        stat = Path(f"/proc/{frozen.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it did not stop")
        ledger.process()
        ledger.check()
        frozen.resume()
        ledger.produce(20)
        ledger.process(idle_stop_ms=500, stop_at_end=False)
        until(lambda: len(ledger.rows()) == ledger.sent, "the rest was not processed")
    ledger.check()


@WITH_TWO_PHASE
def test_an_instance_that_was_frozen_before_it_took_its_id_cannot_abort_what_another_one_decided(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the claim of its row and InitProducerId: the broker keeps the transaction that the other one decided."""
    deaths: list[int] = []

    class Frozen(semel.Producer):
        def init_transactions(self, *args: Any, **options: Any) -> Any:
            if not deaths:
                with ledger.member("decision.made:kill", "named") as other:
                    deaths.append(other.wait(PATIENCE_S))
            return super().init_transactions(*args, **options)

    ledger.produce()
    monkeypatch.setattr(process_decisions, "Producer", Frozen)
    with pytest.raises(FencedInDatabaseError, match="another one with the same name"):
        ledger.process(instance="the one")
    assert deaths[0] < 0, "the other one died when it had decided"
    ledger.process(instance="the one")
    ledger.check()


@WITH_COPY
def test_an_instance_that_was_replaced_leaves_the_entries_of_the_new_owner_alone(ledger: Ledger) -> None:
    """By it the next owner of a partition finds what the new owner has decided and not ended."""
    ledger.produce(20)

    def holders() -> set[str]:
        return {holder.rpartition(" ")[2] for (holder,) in ledger.execute("SELECT holder FROM semel.offsets")}

    with ledger.member("", "named") as first:
        until(lambda: len(ledger.rows()) == 20)
        first.pause()
        with ledger.member("", "named") as second:
            until(lambda: holders() == {str(second.pid)}, "the second one did not take over")
            until(lambda: ledger.execute("SELECT 1 FROM semel.loop_partitions"))
            os.kill(first.pid, signal.SIGTERM)
            first.resume()
            first.wait(PATIENCE_S)
            left = ledger.execute("SELECT transactional_id FROM semel.loop_partitions")
    assert left == [(f"{ledger.application_id}-the one",)] * PARTITIONS


@pytest.mark.full
def test_a_broker_that_restarts_between_the_two_commits_loses_nothing(
    dsn: str, at: Callable[..., At], broker: SemelBroker
) -> None:
    with SemelBroker(None, *broker.options) as mortal:
        ledger = Ledger(Cluster("semel", mortal), dsn)
        ledger.produce()

        def restart() -> None:
            mortal.kill()
            mortal.start()

        fault = at("decision.made", restart)
        ledger.process()
        assert fault.fired
        ledger.check()


@pytest.mark.full
def test_the_database_may_die_around_its_commit(
    broker: SemelBroker, mortal_postgres: PostgresServer, at: Callable[..., At]
) -> None:
    ledger = Ledger(Cluster("semel", broker), mortal_postgres.create_database())
    ledger.produce()

    def restart() -> None:
        mortal_postgres.kill()
        mortal_postgres.start()

    fault = at("decision.prepared", restart)
    ledger.process()
    assert fault.fired
    ledger.check()


def test_what_the_database_refuses_is_in_no_topic(ledger: Ledger) -> None:
    ledger.produce()

    def function(record: Any) -> list[Any]:
        number = int(record.value)
        wrong = number == 50
        return [{"number": -1 if wrong else number}, semel.Output(record.value, topic=ledger.output)]

    sink = semel.Postgres(ledger.dsn, table="entries", with_topics=True, dead_letters=True)
    assert ledger.process(function, sink=sink).dead_letters == 1
    assert ledger.rows() == set(range(RECORDS)) - {50}
    assert ledger.records() == Counter(set(range(RECORDS)) - {50})


@WITH_COPY
@pytest.mark.parametrize("output", [b"x" * 2_000_000, "\ud800"], ids=["too large", "half a character"])
def test_an_output_that_no_producer_takes_makes_its_record_a_dead_letter(ledger: Ledger, output: Any) -> None:
    ledger.produce(4)

    def make(record: Any) -> list[Any]:
        value = output if record.value == b"2" else record.value
        return [{"number": int(record.value)}, semel.Output(value, topic=ledger.output)]

    sink = semel.Postgres(ledger.dsn, table="entries", with_topics=True, dead_letters=True)
    assert ledger.process(make, sink=sink).dead_letters == 1
    assert (ledger.rows(), set(ledger.records())) == ({0, 1, 3}, {0, 1, 3})


@WITH_TWO_PHASE
def test_a_decided_transaction_that_was_ended_by_force_is_reported(ledger: Ledger) -> None:
    ledger.produce(20)
    with ledger.member("decision.made:kill", "named") as member:
        member.wait(PATIENCE_S)
    with Admin(bootstrap_servers=ledger.bootstrap) as admin:
        admin.abort_transaction(f"{ledger.application_id}-the one")
    with pytest.raises(semel.DecisionLostError, match="by force"):
        ledger.process(instance="the one")


@WITH_COPY
def test_outputs_need_a_topic_and_no_event_id(ledger: Ledger) -> None:
    ledger.produce(2)
    with pytest.raises(semel.ConfigError, match="without a topic"):
        ledger.process(lambda record: semel.Output(record.value))
    with pytest.raises(semel.ConfigError, match="event_id"):
        semel.Postgres(ledger.dsn, with_topics=True, event_id="id")


@pytest.mark.kafka
def test_it_holds_on_apache_kafka(apache_kafka: ApacheKafka, dsn: str, at: Callable[..., At]) -> None:
    """Nothing lost and nothing twice, although the transaction was ended between the two commits."""
    cluster = Cluster("apache_kafka", apache_kafka)
    ledger = Ledger(cluster, dsn)
    ledger.produce()

    def end_it() -> None:
        with Admin(bootstrap_servers=ledger.bootstrap) as admin:
            (mine,) = [each for each in admin.list_transactions() if ledger.application_id in each.transactional_id]
            admin.abort_transaction(mine.transactional_id)

    fault = at("decision.made", end_it)
    ledger.process(consumer={})
    assert fault.fired
    ledger.check()
