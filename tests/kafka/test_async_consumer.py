"""`AsyncConsumer` on semel's broker and on Apache Kafka: groups, commits, static members, transactions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.aio import AsyncConsumer, AsyncProducer
from semel.client.consumer.core import RebalanceListener
from semel.client.producer import Producer
from semel.client.types import TopicPartition
from tests.support.broker import Cluster
from tests.support.event_loop import in_loop
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually

PATIENCE_MS = PATIENCE_S * 1000
COUNT, PARTITIONS = 300, 3


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = create_topic(cluster.bootstrap, cluster.unique("aio-read"), partitions=PARTITIONS)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(COUNT):
            producer.send(name, b"%d" % number, partition=number % PARTITIONS)
    return name


@pytest.fixture(params=["classic", "consumer"])
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def member_of(cluster: Cluster, group: str, topic: str, listener: Any = None, **options: Any) -> AsyncConsumer:
    consumer = AsyncConsumer(
        bootstrap_servers=cluster.bootstrap, group_id=group, auto_offset_reset="earliest", **options
    )
    consumer.subscribe([topic], listener)
    return consumer


async def assigned(*members: AsyncConsumer) -> None:
    """Polls until all partitions are shared out, each member having some; the members have read everything."""
    while True:
        await asyncio.gather(*(member.poll(100) for member in members))
        owned = [member.assignment() for member in members]
        if all(owned) and sum(map(len, owned)) == PARTITIONS:
            return


def test_members_share_a_topic_and_every_record_is_read_once(cluster: Cluster, topic: str, protocol: str) -> None:
    group, found = cluster.unique("g"), list[int]()

    class Committing(RebalanceListener):
        def __init__(self) -> None:
            self.revoked = 0

        async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            self.revoked += 1
            await first.commit()

    async def read(consumer: AsyncConsumer, wanted: int) -> None:
        async for record in consumer:
            found.append(int(record.value))
            if len(found) == wanted:
                return

    async def main() -> None:
        nonlocal first
        listener = Committing()
        options = {"enable_auto_commit": False, "max_poll_records": 7, "group_protocol": protocol}
        first = member_of(cluster, group, topic, listener, **options)
        async with first:
            await read(first, COUNT // 2)
            async with member_of(cluster, group, topic, **options) as second:
                while len(found) < COUNT or not second.assignment():
                    for records in await asyncio.gather(first.poll(100), second.poll(100)):
                        found.extend(int(record.value) for record in records)
                    await asyncio.gather(*(each.commit() for each in (first, second) if each.assignment()))
                assert listener.revoked
            assert (await first.partitions_for(topic)) == set(range(PARTITIONS))
            committed = await first.committed([(topic, number) for number in range(PARTITIONS)])
            assert sum(at.offset for at in committed.values()) == COUNT

    first: Any = None
    in_loop(main())
    assert sorted(found) == list(range(COUNT))


def test_a_static_member_that_comes_back_keeps_its_partitions(cluster: Cluster, topic: str) -> None:
    group, revoked = cluster.unique("g"), list[str]()

    class Noting(RebalanceListener):
        def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            revoked.append("other")

    async def main() -> None:
        static = {"group_instance_id": "one", "session_timeout_ms": 45_000}
        one = member_of(cluster, group, topic, **static)
        async with member_of(cluster, group, topic, Noting(), group_instance_id="other") as other:
            await assigned(one, other)
            revoked.clear()
            before, of_other = one.assignment(), other.assignment()
            await one.close()
            async with member_of(cluster, group, topic, **static) as back:
                await assigned(back, other)
                assert (back.assignment(), other.assignment()) == (before, of_other)
                assert revoked == []

    in_loop(main())


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_what_a_transaction_reads_and_writes_belongs_together(cluster: Cluster, topic: str, protocol: str) -> None:
    """Consume, process, produce: units that are aborted are read again, and their output is never seen."""
    output = create_topic(cluster.bootstrap, cluster.unique("aio-written"), partitions=PARTITIONS)
    group = cluster.unique("g")

    async def main() -> None:
        done = units = 0
        options = {"enable_auto_commit": False, "max_poll_records": 20, "group_protocol": protocol}
        async with (
            member_of(cluster, group, topic, **options) as consumer,
            AsyncProducer(bootstrap_servers=cluster.bootstrap, transactional_id=group) as producer,
        ):
            await producer.init_transactions()
            while done < COUNT:
                records = await consumer.poll(PATIENCE_MS)
                units += 1
                try:
                    async with producer.transaction() as txn:
                        for record in records:
                            await txn.send(output, record.value, partition=record.partition)
                        await txn.send_offsets(consumer.consumed(), consumer.group_metadata())
                        if units % 3 == 0:
                            raise ZeroDivisionError
                    done += len(records)
                except ZeroDivisionError:
                    consumer.seek_to_committed()
            assert units > COUNT / 20
        async with member_of(cluster, group, topic, group_protocol=protocol) as consumer:
            await consumer.poll(500)
            assert sum((await consumer.lag()).values()) == 0

    in_loop(main())
    rows = eventually(lambda: read_topic(cluster.bootstrap, output), lambda found: len(found) >= COUNT)
    assert sorted(int(row.value or b"") for row in rows) == list(range(COUNT))
