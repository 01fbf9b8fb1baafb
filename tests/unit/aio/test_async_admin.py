"""`AsyncAdmin`: the calls of `Admin` in an event loop, which none of them blocks."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading

import pytest

from semel.aio import AsyncAdmin
from semel.client.admin import LATEST, Admin
from semel.client.errors import ClosedError, IllegalStateError, KafkaError, TimedOutError
from semel.client.types import TopicPartition
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import METADATA
from semel.protocol.messages.topics import CREATE_TOPICS
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.event_loop import in_loop, in_other_thread
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, STALL_S

PATIENCE_MS = PATIENCE_S * 1000


def public_calls(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(function)).replace("self, ", "")
        for name, function in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name != "calls"
    }


def test_every_call_of_the_admin_is_there_with_the_same_parameters() -> None:
    assert public_calls(AsyncAdmin) == public_calls(Admin)


def test_topics_configurations_groups_and_offsets(shared_semel_broker: SemelBroker) -> None:
    async def main() -> None:
        async with AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
            assert await admin.create_topic("aio-admin", partitions=3, configs={"retention.ms": "5000"})
            assert not await admin.create_topic("aio-admin", if_not_exists=True)
            assert "aio-admin" in await admin.list_topics()
            (topic,) = await admin.describe_topics("aio-admin", offsets=True)
            assert [(part.partition, part.latest_offset) for part in topic.partitions] == [(0, 0), (1, 0), (2, 0)]
            assert (await admin.describe_configs(topic="aio-admin"))["retention.ms"].value == "5000"
            await admin.create_partitions("aio-admin", 4)
            assert (await admin.list_offsets({("aio-admin", 3): LATEST}))[TopicPartition("aio-admin", 3)].offset == 0
            await admin.alter_group_offsets("aio-group", {("aio-admin", 0): 0})
            assert [lag.lag for lag in await admin.group_lag("aio-group")] == [0]
            assert "aio-group" in [group.group_id for group in await admin.list_groups()]
            assert (await admin.describe_cluster()).brokers
            assert await admin.list_transactions(producer_ids=[987654321]) == []
            await admin.delete_topics(["aio-admin"])

    threads = threading.active_count()
    in_loop(main())
    assert threading.active_count() == threads


def test_many_tasks_share_an_admin(shared_semel_broker: SemelBroker) -> None:
    create_topic(shared_semel_broker.bootstrap, "aio-shared", partitions=2)

    async def main() -> None:
        async with AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
            found = await asyncio.gather(*(admin.describe_topics(["aio-shared"], offsets=True) for _ in range(50)))
            assert {len(topics[0].partitions) for topics in found} == {2}

    in_loop(main())


def test_the_loop_goes_on_while_a_broker_does_not_respond_and_the_call_keeps_its_timeout() -> None:
    async def main() -> None:
        turns = 0
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with AsyncAdmin(bootstrap_servers=f"127.0.0.1:{silent.getsockname()[1]}") as admin:
                listing = asyncio.create_task(admin.list_topics(timeout_ms=500))
                while not listing.done():
                    await asyncio.sleep(0.01)
                    turns += 1
                with pytest.raises(TimedOutError, match="did not respond to ApiVersions"):
                    await listing
        assert turns > 10

    in_loop(main())


def test_a_broker_that_cannot_be_reached_is_named(shared_semel_broker: SemelBroker) -> None:
    async def main() -> None:
        async with AsyncAdmin(bootstrap_servers="127.0.0.1:1") as admin:
            with pytest.raises(TimedOutError, match="is a broker running there"):
                await admin.list_topics(timeout_ms=300)
        async with AsyncAdmin(bootstrap_servers="two..dots:9092") as admin:
            with pytest.raises(TimedOutError, match="check the host name"):
                await admin.list_topics(timeout_ms=300)
        async with AsyncAdmin(bootstrap_servers=f"two..dots:9092,{shared_semel_broker.bootstrap}") as admin:
            assert (await admin.describe_cluster()).brokers

    in_loop(main())


def test_a_lost_connection_is_replaced_and_the_request_sent_again(shared_semel_broker: SemelBroker) -> None:
    async def main() -> None:
        with Proxy(shared_semel_broker.bootstrap) as proxy:
            async with AsyncAdmin(bootstrap_servers=proxy.bootstrap) as admin:
                fault = proxy.add(Rule(METADATA, Effect.DROP_RESPONSE))
                await admin.list_topics(timeout_ms=PATIENCE_MS)
                fault.assert_fired()

    in_loop(main())


def test_a_cancelled_call_leaves_an_admin_that_can_be_used(shared_semel_broker: SemelBroker) -> None:
    async def main() -> None:
        with Proxy(shared_semel_broker.bootstrap) as proxy:
            async with AsyncAdmin(bootstrap_servers=proxy.bootstrap) as admin:
                fault = proxy.add(Rule(CREATE_TOPICS, Effect.DELAY_RESPONSE, delay_ms=5_000))
                creating = asyncio.create_task(admin.create_topic("aio-cancelled", partitions=1))
                await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
                creating.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await creating
                assert "aio-cancelled" in await admin.list_topics(timeout_ms=PATIENCE_MS)  # the response was dropped

    in_loop(main())


def test_cancelling_a_task_that_connects_does_not_fail_another_that_waits_for_it(
    shared_semel_broker: SemelBroker,
) -> None:
    async def main() -> None:
        async with AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
            first, second = (asyncio.create_task(admin.list_topics(timeout_ms=PATIENCE_MS)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            await second
            assert first.cancelled()

    in_loop(main())


def test_a_closed_admin_and_one_that_is_closed_during_a_call(shared_semel_broker: SemelBroker) -> None:
    async def main() -> None:
        with Proxy(shared_semel_broker.bootstrap) as proxy:
            admin = AsyncAdmin(bootstrap_servers=proxy.bootstrap)
            fault = proxy.add(Rule(CREATE_TOPICS, Effect.SILENCE_RESPONSE))
            creating = asyncio.create_task(admin.create_topic("aio-closing"))
            await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
            await admin.close()
            await admin.close()
            with pytest.raises(ClosedError):
                async with asyncio.timeout(STALL_S):
                    await creating
            with pytest.raises(ClosedError, match="make a new one"):
                await admin.list_topics()

    in_loop(main())


def test_another_event_loop_is_refused(shared_semel_broker: SemelBroker) -> None:
    admin = AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap)

    async def main() -> None:
        await admin.list_topics()
        with pytest.raises(IllegalStateError, match="another event loop, which runs elsewhere"):
            await asyncio.to_thread(in_other_thread, admin.list_topics())

    in_loop(main())
    with pytest.raises(IllegalStateError, match="another event loop, which is closed"):
        in_loop(admin.list_topics())
    in_loop(admin.close())


def test_two_event_loops_with_an_admin_each(shared_semel_broker: SemelBroker) -> None:
    create_topic(shared_semel_broker.bootstrap, "aio-two-loops", partitions=2)

    async def offsets() -> object:
        async with AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
            return await admin.list_offsets({("aio-two-loops", 0): LATEST})

    async def main() -> None:
        here, there = await asyncio.gather(offsets(), asyncio.to_thread(in_other_thread, offsets()))
        assert here == there

    in_loop(main())


def test_a_loop_that_is_closed_while_a_request_is_out_leaves_no_warning(
    shared_semel_broker: SemelBroker, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        fault = proxy.add(Rule(CREATE_TOPICS, Effect.SILENCE_RESPONSE))
        admin = AsyncAdmin(bootstrap_servers=proxy.bootstrap)

        async def main() -> None:
            task = asyncio.create_task(admin.create_topic("aio-loop-closed"))
            await asyncio.to_thread(fault.fired.wait, PATIENCE_S)
            assert not task.done()

        asyncio.run(main())
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
    assert "Task was destroyed" not in caplog.text


def test_an_error_of_the_broker_is_the_same_as_that_of_the_blocking_admin(shared_semel_broker: SemelBroker) -> None:
    async def failure() -> KafkaError:
        async with AsyncAdmin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
            try:
                await admin.create_topic("not/a/name")
            except KafkaError as error:
                return error
            raise AssertionError("it was created")

    found = in_loop(failure())
    with Admin(bootstrap_servers=shared_semel_broker.bootstrap) as admin, pytest.raises(type(found)) as expected:
        admin.create_topic("not/a/name")
    assert str(found) == str(expected.value)
    assert expected.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
