"""Groups as users have them: other people's clients share partitions, come and go, and take up where they were."""

from __future__ import annotations

import asyncio
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from semel.local.apache_kafka import java_tool, start_tool
from semel.local.brokers import SemelBroker
from semel.local.processes import Process, free_ports
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S, eventually, until

PARTITIONS = 6
SESSION_MS = 45_000  # a machine that stalls must not look like a dead member
# In the consumer protocol the broker says these.
CLASSIC = {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 200}


def create_topic(bootstrap: str, name: str, partitions: int = PARTITIONS) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(PATIENCE_S)


def produce(bootstrap: str, topic: str, values: list[str], partitions: int = PARTITIONS) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for number, value in enumerate(values):
        producer.produce(topic, value.encode(), partition=number % partitions)
    assert producer.flush(PATIENCE_S) == 0


class Worker:
    """A confluent-kafka consumer in a thread of its own: what it has, what it read, what it lost."""

    def __init__(self, bootstrap: str, group: str, topic: str, **settings: Any) -> None:
        self.assigned: set[int] = set()
        self.values: list[str] = []
        self.assignments = 0
        self.revocations: list[set[int]] = []
        self._stop, self._crash = threading.Event(), False
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **(CLASSIC if "group.protocol" not in settings else {}),
                **settings,
            }
        )
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _on_assign(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assignments += 1
        self.assigned |= {each.partition for each in partitions}

    def _on_revoke(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.revocations.append({each.partition for each in partitions})
        self.assigned -= {each.partition for each in partitions}

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._consumer.poll(0.05)
            if message is not None and message.error() is None:
                self.values.append(message.value().decode())
                self._consumer.commit(message, asynchronous=False)
        self._consumer.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def workers(*made: Worker | PythonWorker) -> Iterator[tuple[Worker | PythonWorker, ...]]:
    try:
        yield made
    finally:
        for worker in made:
            worker.stop()


def shares(*members: Worker | PythonWorker) -> bool:
    """Whether the members have all partitions between them. One may have none yet."""
    sizes = [len(member.assigned) for member in members]
    return set().union(*(member.assigned for member in members)) == set(range(PARTITIONS)) and sum(sizes) == PARTITIONS


# -- confluent-kafka ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_partitions_are_shared_and_taken_over(cluster: Cluster, strategy: str) -> None:
    topic, group = cluster.unique("shared"), cluster.unique("group")
    create_topic(cluster.bootstrap, topic)
    produce(cluster.bootstrap, topic, [f"a{n}" for n in range(60)])
    settings = {"partition.assignment.strategy": strategy}
    first = Worker(cluster.bootstrap, group, topic, **settings)
    with workers(first):
        until(lambda: len(first.values) == 60 and shares(first), "the first member did not read everything")
        second = Worker(cluster.bootstrap, group, topic, **settings)
        with workers(second):
            until(lambda: shares(first, second) and len(second.assigned) == 3, "two members do not share")
            third = Worker(cluster.bootstrap, group, topic, **settings)
            with workers(third):
                until(lambda: shares(first, second, third) and len(third.assigned) == 2, "three members do not share")
                produce(cluster.bootstrap, topic, [f"b{n}" for n in range(60)])
                everything = [f"{letter}{n}" for letter in "ab" for n in range(60)]
                until(
                    lambda: sorted(first.values + second.values + third.values) == sorted(everything),
                    "not every record was read once",
                )
            until(lambda: shares(first, second), "two members do not share again")
        until(lambda: shares(first), "the last member did not get everything")
    if strategy == "cooperative-sticky":
        assert all(len(lost) < PARTITIONS for lost in first.revocations[:2]), first.revocations


MEMBER = """
import sys
from confluent_kafka import Consumer
settings = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 200}
member = Consumer({"bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], **settings})
member.subscribe([sys.argv[3]], on_assign=lambda _, partitions: print("has", len(partitions), flush=True))
while True:
    member.poll(0.1)
"""


def test_member_that_dies_is_replaced_after_its_session_time(cluster: Cluster) -> None:
    topic, group = cluster.unique("dying"), cluster.unique("group")
    create_topic(cluster.bootstrap, topic)
    with Process([sys.executable, "-c", MEMBER, cluster.bootstrap, group, topic]) as doomed:
        doomed.wait_for_line(f"^has {PARTITIONS}$", PATIENCE_S)
        doomed.kill()
        new_member = Worker(cluster.bootstrap, group, topic)
        with workers(new_member):
            until(lambda: shares(new_member), "the second member did not take over from the one that died")


def test_static_member_restarts_without_a_rebalance(cluster: Cluster) -> None:
    topic, group = cluster.unique("static"), cluster.unique("group")
    create_topic(cluster.bootstrap, topic)
    steady = Worker(cluster.bootstrap, group, topic, **{"group.instance.id": "steady"})
    with workers(steady):
        until(lambda: shares(steady), "the first member did not get all")
        restarted = Worker(cluster.bootstrap, group, topic, **{"group.instance.id": "restarted"})
        until(lambda: restarted.assigned and shares(steady, restarted), "two members do not share")
        before, had = steady.assignments, restarted.assigned.copy()
        restarted.stop()  # a static member does not leave when it closes
        again = Worker(cluster.bootstrap, group, topic, **{"group.instance.id": "restarted"})
        with workers(again):
            until(lambda: again.assigned == had, "the restarted member did not get what it had")
        assert steady.assignments == before


# -- kafka-python and aiokafka -----------------------------------------------------------------------------------------
class PythonWorker:
    """A kafka-python consumer in a thread of its own.

    It polls long: a poll of kafka-python 3.0 that ends in the middle of a join may leave its heartbeats off for good,
    on every broker.
    """

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        from kafka import KafkaConsumer

        self.assigned: set[int] = set()
        self.values: list[str] = []
        self._stop = threading.Event()
        self._consumer = KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=300,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for records in self._consumer.poll(timeout_ms=2000).values():
                self.values.extend(record.value.decode() for record in records)
                self._consumer.commit()
            self.assigned = {each.partition for each in self._consumer.assignment()}
        self._consumer.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_kafka_python_members_share_and_commit(cluster: Cluster) -> None:
    topic, group = cluster.unique("kafka-python"), cluster.unique("group")
    create_topic(cluster.bootstrap, topic)
    produce(cluster.bootstrap, topic, [str(n) for n in range(30)])
    first, second = (PythonWorker(cluster.bootstrap, group, topic) for _ in range(2))
    with workers(first, second):
        until(lambda: shares(first, second) and len(first.assigned) == 3, "two kafka-python members do not share")
        until(lambda: len(set(first.values + second.values)) == 30, "they did not read everything")
    with workers(late := PythonWorker(cluster.bootstrap, group, topic)):
        until(lambda: shares(late), "a late member did not get all partitions")
    assert late.values == [], "and nothing is left to read: the positions were committed"
    assert sum(reader_positions(cluster.bootstrap, group, topic, PARTITIONS).values()) == 30


def test_aiokafka_members_share_and_commit(cluster: Cluster) -> None:
    from aiokafka import AIOKafkaConsumer

    topic, group = cluster.unique("aiokafka"), cluster.unique("group")
    create_topic(cluster.bootstrap, topic)
    produce(cluster.bootstrap, topic, [str(n) for n in range(30)])

    async def play() -> None:
        def member() -> Any:
            return AIOKafkaConsumer(
                topic, bootstrap_servers=cluster.bootstrap, group_id=group, auto_offset_reset="earliest",
                enable_auto_commit=False, session_timeout_ms=SESSION_MS, heartbeat_interval_ms=300,
            )  # fmt: skip

        first, second = member(), member()
        values: list[str] = []

        async def read(consumer: Any) -> None:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                values.extend(record.value.decode() for record in records)
                await consumer.commit()

        await first.start()
        await second.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (len(first.assignment()) == len(second.assignment()) == 3 and len(set(values)) == 30):
                    await asyncio.gather(read(first), read(second))
        finally:
            await first.stop()
            await second.stop()
        late = member()
        await late.start()
        try:
            committed = [await late.committed(each) for each in late.assignment()]
            assert sum(offset for offset in committed if offset is not None) == 30
        finally:
            await late.stop()

    asyncio.run(play())


# -- the consumer protocol (KIP-848) -----------------------------------------------------------------------------------
@pytest.fixture
def brisk_broker(tmp_path: Path) -> Iterator[SemelBroker]:
    """A broker that asks for many heartbeats, so that members notice changes soon."""
    with SemelBroker(tmp_path / "broker", "--set", "group.consumer.heartbeat.interval.ms=200") as broker:
        yield broker


def test_partitions_are_shared_by_the_broker_also_over_kill_9(brisk_broker: SemelBroker) -> None:
    bootstrap, settings = brisk_broker.bootstrap, {"group.protocol": "consumer", "reconnect.backoff.max.ms": 200}
    create_topic(bootstrap, "shared")
    produce(bootstrap, "shared", [f"a{n}" for n in range(60)])
    first = Worker(bootstrap, "g", "shared", **settings)
    with workers(first):
        until(lambda: len(first.values) == 60 and shares(first), "the first member did not read everything")
        second, third = Worker(bootstrap, "g", "shared", **settings), Worker(bootstrap, "g", "shared", **settings)
        with workers(second):
            with workers(third):
                members = (first, second, third)
                until(
                    lambda: shares(*members) and all(len(m.assigned) == 2 for m in members),
                    "three members do not share",
                )
                had = [member.assigned.copy() for member in members]
                brisk_broker.kill()
                brisk_broker.start()
                produce(bootstrap, "shared", [f"b{n}" for n in range(60)])
                everything = sorted(f"{letter}{n}" for letter in "ab" for n in range(60))
                until(
                    lambda: sorted(first.values + second.values + third.values) == everything,
                    "not every record was read once",
                )
                assert [member.assigned for member in members] == had, "the assignment survived"
            until(lambda: shares(first, second), "two members do not share again")
        until(lambda: shares(first), "the last member did not get everything")


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_group_moves_to_the_consumer_protocol_and_back_while_it_reads(brisk_broker: SemelBroker, strategy: str) -> None:
    bootstrap, settings = brisk_broker.bootstrap, {"partition.assignment.strategy": strategy}
    create_topic(bootstrap, "moved")
    produce(bootstrap, "moved", [f"a{n}" for n in range(60)])
    first = Worker(bootstrap, "g", "moved", **settings)
    with workers(first):
        until(lambda: len(first.values) == 60 and shares(first), "the first member did not read everything")
        second = Worker(bootstrap, "g", "moved", **{"group.protocol": "consumer"})
        with workers(second):
            until(lambda: shares(first, second) and len(second.assigned) == 3, "two members do not share")
            produce(bootstrap, "moved", [f"b{n}" for n in range(60)])
            everything = sorted(f"{letter}{n}" for letter in "ab" for n in range(60))
            until(lambda: sorted(first.values + second.values) == everything, "not every record was read once")
        until(lambda: shares(first), "the last member did not get everything")
        produce(bootstrap, "moved", ["c"])
        until(lambda: "c" in first.values, "the group did not read on")


def test_kafkas_java_consumer_and_tools_use_the_consumer_protocol(
    brisk_broker: SemelBroker, kafka_installation: Path
) -> None:
    bootstrap = brisk_broker.bootstrap
    create_topic(bootstrap, "java", 2)
    produce(bootstrap, "java", [str(n) for n in range(20)], 2)
    words = ("--bootstrap-server", bootstrap, "--topic", "java", "--group-id", "g", "--group-protocol", "consumer")
    with start_tool("VerifiableConsumer", *words, "--reset-policy", "earliest", "--max-messages", "1000") as reader:
        reader.wait_for_line(r'"name":"partitions_assigned".*"partition":1', 60)
        reader.wait_for_line(r'"name":"records_consumed"', 60)

        def described() -> dict[str, list[str]]:
            shown = java_tool(
                "ConsumerGroupCommand", "--bootstrap-server", bootstrap, "--describe", "--group", "g"
            ).stdout
            return {row[2]: row[3:6] for row in map(str.split, shown.splitlines()) if row[:1] == ["g"]}

        done = {"0": ["10", "10", "0"], "1": ["10", "10", "0"]}
        eventually(described, lambda rows: rows == done, otherwise="the tool should show that nothing is left to read")
        state = java_tool(
            "ConsumerGroupCommand", "--bootstrap-server", bootstrap, "--describe", "--group", "g", "--state"
        ).stdout
        assert "Stable" in state
        assert "uniform" in state


# -- over kill -9 ------------------------------------------------------------------------------------------------------
def test_members_take_up_where_they_were_after_kill_9_of_the_broker(semel_broker: SemelBroker) -> None:
    create_topic(semel_broker.bootstrap, "killed")
    produce(semel_broker.bootstrap, "killed", [f"a{n}" for n in range(60)])
    settings = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
    first = Worker(semel_broker.bootstrap, "g", "killed", **settings)
    second = Worker(semel_broker.bootstrap, "g", "killed", **settings)
    with workers(first, second):
        settled = lambda: shares(first, second) and len(first.assigned) == 3  # noqa: E731
        until(lambda: settled() and len(first.values + second.values) >= 60, "two members did not share and read all")
        before = (first.assignments, second.assignments)
        semel_broker.kill()
        semel_broker.start()
        produce(semel_broker.bootstrap, "killed", [f"b{n}" for n in range(60)])
        values = lambda: [value for value in first.values + second.values if value.startswith("b")]  # noqa: E731
        until(lambda: len(values()) >= 60, "the members did not go on reading")
        assert sorted(values()) == sorted(f"b{n}" for n in range(60))
        assert (first.assignments, second.assignments) == before, "the generation survived: nobody had to rebalance"


def test_committed_offsets_survive_kill_9(semel_broker: SemelBroker) -> None:
    create_topic(semel_broker.bootstrap, "positions")
    consumer = Consumer({"bootstrap.servers": semel_broker.bootstrap, "group.id": "g"})
    acknowledged: dict[int, int] = {}
    for round_ in range(5):
        for offset in range(round_ * 20, round_ * 20 + 20):
            consumer.commit(offsets=[TopicPartition("positions", offset % 6, offset)], asynchronous=False)
            acknowledged[offset % 6] = offset
        semel_broker.kill()
        semel_broker.start()
        asked = [TopicPartition("positions", partition) for partition in range(6)]
        seen = {each.partition: each.offset for each in consumer.committed(asked, PATIENCE_S)}
        assert seen == acknowledged
    consumer.close()


# -- metrics -----------------------------------------------------------------------------------------------------------
def test_lag_is_a_metric(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with SemelBroker(tmp_path / "broker", "--metrics", f"127.0.0.1:{port}") as broker:
        create_topic(broker.bootstrap, "watched", 1)
        produce(broker.bootstrap, "watched", [str(n) for n in range(10)], 1)
        reader = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
        reader.commit(offsets=[TopicPartition("watched", 0, 4)], asynchronous=False)
        reader.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            shown = answer.read().decode().splitlines()
    assert 'semel_groups{state="Empty"} 1' in shown
    assert 'semel_group_offset{group="g",partition="0",topic="watched"} 4' in shown
    assert 'semel_group_lag{group="g",partition="0",topic="watched"} 6' in shown


# -- Kafka's tools -----------------------------------------------------------------------------------------------------
def test_kafkas_tools_show_members_and_lag_and_reset_offsets(
    semel_broker: SemelBroker, kafka_installation: Path
) -> None:
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "lagging", 2)
    produce(bootstrap, "lagging", [str(n) for n in range(20)], 2)
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "client.id": "reader"})
    reader.subscribe(["lagging"])
    until(lambda: reader.poll(0.1) is None and len(reader.assignment()) == 2, "the member did not get its partitions")
    reader.commit(offsets=[TopicPartition("lagging", 0, 7), TopicPartition("lagging", 1, 10)], asynchronous=False)

    def tool(*words: str) -> str:
        return java_tool("ConsumerGroupCommand", "--bootstrap-server", bootstrap, *words).stdout

    rows = [line.split() for line in tool("--describe", "--group", "g").splitlines() if line.startswith("g ")]
    # GROUP TOPIC PARTITION CURRENT-OFFSET LOG-END-OFFSET LAG CONSUMER-ID HOST CLIENT-ID
    lag = {row[2]: (row[3], row[4], row[5], row[7], row[8]) for row in rows}
    assert lag == {"0": ("7", "10", "3", "/127.0.0.1", "reader"), "1": ("10", "10", "0", "/127.0.0.1", "reader")}
    assert "Stable" in tool("--describe", "--group", "g", "--state")
    assert "reader" in tool("--describe", "--group", "g", "--members", "--verbose")
    reader.close()
    assert "g" in tool("--list").split()
    tool("--reset-offsets", "--group", "g", "--topic", "lagging", "--to-earliest", "--execute")
    committed = reader_positions(bootstrap, "g", "lagging", 2)
    assert committed == {0: 0, 1: 0}
    tool("--delete-offsets", "--group", "g", "--topic", "lagging")
    assert reader_positions(bootstrap, "g", "lagging", 2) == {0: -1001, 1: -1001}
    tool("--delete", "--group", "g")
    assert "g" not in tool("--list").split()


def reader_positions(bootstrap: str, group: str, topic: str, partitions: int) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    asked = [TopicPartition(topic, partition) for partition in range(partitions)]
    try:
        return {each.partition: each.offset for each in consumer.committed(asked, PATIENCE_S)}
    finally:
        consumer.close()


def test_kafkas_dump_tool_reads_what_groups_wrote(semel_broker: SemelBroker, kafka_installation: Path) -> None:
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "dumped", 2)
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "dumped-group", "group.instance.id": "i"})
    reader.subscribe(["dumped"])
    until(lambda: reader.poll(0.1) is None and len(reader.assignment()) == 2, "the member did not get its partitions")
    reader.commit(offsets=[TopicPartition("dumped", 0, 7, "note")], asynchronous=False)
    semel_broker.kill()
    logs = [path for path in semel_broker.directory.glob("__consumer_offsets-*/*.log") if path.stat().st_size]
    (log,) = logs
    shown = java_tool("DumpLogSegments", "--offsets-decoder", "--files", log).stdout
    assert '"group":"dumped-group","topic":"dumped","partition":0' in shown
    assert '"offset":7' in shown
    assert '"protocolType":"consumer","generation":1' in shown
    assert '"groupInstanceId":"i"' in shown
    assert "isvalid: false" not in shown
    semel_broker.start()
    reader.close()
