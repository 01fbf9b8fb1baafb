"""Ctrl-C in a consumer of a group: whatever the call was doing, the consumer joins, reads, commits and beats on."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semel.client import Consumer, Producer, connection, frames, network, wire
from semel.client.consumer import assigned_partitions, commits, engine, fetcher
from semel.client.consumer import core as consumer_core
from semel.client.group import consumer_protocol_core, core, member
from semel.client.immediate import run
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic

PATIENCE_MS = 60_000
SHORT_MS = 6000  # of the session: a member that does not beat is expelled within the test
COUNT = 60
TOPIC = "interrupted-members"
numbers = itertools.count()

CLASSIC: list[tuple[Any, str]] = [
    (core.MemberCore, "join"),
    (core.MemberCore, "joined"),
    (core.MemberCore, "sync"),
    (core.MemberCore, "synced"),
    (core.MemberCore, "take_change"),
    (core, "decode_assignment"),
]
CONSUMER: list[tuple[Any, str]] = [
    (consumer_protocol_core.ConsumerProtocolCore, "join"),
    (consumer_protocol_core.ConsumerProtocolCore, "_request"),
    (consumer_protocol_core.ConsumerProtocolCore, "_accepted"),
    (consumer_protocol_core.ConsumerProtocolCore, "_apply"),
    (consumer_protocol_core.ConsumerProtocolCore, "_keep_only"),
    (consumer_protocol_core.ConsumerProtocolCore, "take_change"),
    (consumer_protocol_core.ConsumerProtocolCore, "adopted"),
    (consumer_core.Rebalancer, "apply_change"),
    (consumer_core.Rebalancer, "adopt"),
    (assigned_partitions.AssignedPartitions, "assign"),
]
POINTS: list[tuple[Any, str]] = [
    (network, "in_thread"),
    (member.GroupMember, "_start_heartbeats"),
    (network.BlockingNetwork, "background"),
    (consumer_core.Rebalancer, "apply_change"),
    (consumer_core.Rebalancer, "adopt"),
    (assigned_partitions.AssignedPartitions, "assign"),
    (engine, "offset_commit_request"),
    (engine, "offset_commit_error"),
    (commits.CommitsCore, "sent"),
    (commits.CommitsCore, "responded"),
    (fetcher.Fetcher, "absorb"),
    (connection.BrokerConnection, "send"),
    (connection.BrokerConnection, "progress"),
    (wire.Wire, "send"),
    (wire.Wire, "written"),
    (wire.Wire, "match"),
    (frames.Frames, "filled"),
]
CASES = [
    *(("classic", *point) for point in [*CLASSIC, *POINTS]),
    *(("consumer", *point) for point in CONSUMER),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "classic": {"session_timeout_ms": SHORT_MS},
    "consumer": {"group_protocol": "consumer"},
}


@pytest.fixture(scope="module")
def broker() -> Iterator[SemelBroker]:
    sessions = f"group.consumer.session.timeout.ms={SHORT_MS}"
    with SemelBroker(None, "--set", sessions, "--set", "group.consumer.heartbeat.interval.ms=500") as broker:
        create_topic(broker.bootstrap, TOPIC, partitions=3)
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            for number in range(COUNT):
                producer.send(TOPIC, b"%d" % number, partition=number % 3)
        yield broker


class Interrupt:
    """Ctrl-C comes in one of the main thread's calls of a function: before it does anything, or when its work is
    done."""

    def __init__(self, call: Callable[..., Any], at: int, after_it: bool) -> None:
        self.fired = False
        self._call, self._at, self._after_it = call, at, after_it

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or self.fired:
            return self._call(*arguments, **keywords)
        self._at -= 1
        if self._at:
            return self._call(*arguments, **keywords)
        if self._after_it:
            result = self._call(*arguments, **keywords)
            if inspect.iscoroutine(result):
                run(result)
        self.fired = True
        raise KeyboardInterrupt

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self(owner, *arguments, **keywords)


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(("protocol", "owner", "name"), CASES)
def test_a_group_consumer_works_on_wherever_ctrl_c_comes(
    broker: SemelBroker, monkeypatch: pytest.MonkeyPatch, protocol: str, owner: Any, name: str, at: int, after_it: bool
) -> None:
    group_id = f"interrupted-{next(numbers)}"
    options = {"auto_offset_reset": "earliest", "max_poll_records": 20, **OPTIONS[protocol]}
    found: list[int] = []
    with Consumer(
        bootstrap_servers=broker.bootstrap, group_id=group_id, enable_auto_commit=False, **options
    ) as consumer:
        consumer.subscribe([TOPIC])
        interrupt = Interrupt(getattr(owner, name), at, after_it)
        monkeypatch.setattr(owner, name, interrupt)
        while len(found) < COUNT:
            try:
                records = consumer.poll(PATIENCE_MS)
                assert records, f"nothing came any more after {len(found)} records"
                found += [int(record.value) for record in records]
                consumer.commit(timeout_ms=PATIENCE_MS / 4)
            except KeyboardInterrupt:
                assert interrupt.fired
        monkeypatch.undo()
        consumer.commit(timeout_ms=PATIENCE_MS / 4)
        assert sum(at.offset for at in consumer.committed().values()) == COUNT
        beating = consumer._engine.member
        assert beating is not None
        assert isinstance(beating._heartbeat, network.BackgroundThread)
        assert beating._heartbeat._thread.is_alive()
    assert sorted(found) == list(range(COUNT))
