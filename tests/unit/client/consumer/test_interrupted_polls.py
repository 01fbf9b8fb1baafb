"""Ctrl-C in a consumer: whatever the poll was doing, the next one returns every record once."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from semel.client import Consumer, Producer
from semel.client.consumer import base, decode, engine, fetcher, reader
from semel.client.immediate import run
from semel.client.types import TopicPartition
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic

PATIENCE_MS = 60_000
COUNT = 150
POINTS: list[tuple[Any, str]] = [
    (fetcher.Fetcher, "take"),
    (fetcher.Fetcher, "absorb"),
    (fetcher.Fetcher, "plan"),
    (fetcher.Fetcher, "drop_readable"),
    (decode.DecodedChunk, "take"),
    (decode, "rows"),
    (decode, "joined"),
    (decode, "decode_all"),
    (engine.ConsumerEngine, "wait"),
    (engine.ConsumerEngine, "turn"),
    (engine.FetchDriver, "receive"),
    (engine.FetchDriver, "send"),
    (base.ConsumerBase, "_fetch_ahead"),
    (reader.ChunkReader, "take"),
]


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after_it: bool) -> list[str]:
    """Ctrl-C comes in one of the calls of a function: before it has done anything, or when its work is done."""
    call, calls, fired = getattr(owner, name), [0], []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return call(*arguments, **keywords)
        if after_it:
            result = call(*arguments, **keywords)
            if inspect.iscoroutine(result):
                run(result)
        fired.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    return fired


@pytest.fixture(scope="module")
def topics() -> dict[str, str]:
    return {}


@pytest.fixture
def topic(shared_semel_broker: SemelBroker, topics: dict[str, str]) -> str:
    bootstrap = shared_semel_broker.bootstrap
    if bootstrap not in topics:
        name = topics[bootstrap] = create_topic(bootstrap, "interrupted-polls", partitions=3)
        with Producer(bootstrap_servers=bootstrap) as producer:
            for number in range(COUNT):
                producer.send(name, b"%d" % number, partition=number % 3)
    return topics[bootstrap]


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("way", ["poll", "poll_table", "iteration"])
@pytest.mark.parametrize(("owner", "name"), POINTS)
def test_every_record_is_returned_once_wherever_ctrl_c_comes(
    shared_semel_broker: SemelBroker,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    way: str,
    after_it: bool,
) -> None:
    found: list[int] = []
    fired: list[str] = []
    options = {"auto_offset_reset": "earliest", "max_poll_records": 20, "max_partition_fetch_bytes": 512}
    for at in (1, 3):
        found.clear()
        with (
            monkeypatch.context() as patch,
            Consumer(bootstrap_servers=shared_semel_broker.bootstrap, **options) as consumer,
        ):
            consumer.assign([(topic, number) for number in range(3)])
            fired += interrupt(patch, owner, name, at, after_it)
            while len(found) < COUNT:
                try:
                    if way == "poll_table":
                        found += map(int, consumer.poll_table(PATIENCE_MS, max_bytes=1000).column("value").to_pylist())
                    elif way == "poll":
                        found += [int(record.value) for record in consumer.poll(PATIENCE_MS)]
                    else:
                        for record in consumer:
                            found.append(int(record.value))
                            if len(found) == COUNT:
                                break
                except KeyboardInterrupt:
                    fired.append(name)
            assert sorted(found) == list(range(COUNT)), f"interrupted at call {at}"
    assert fired or (way, name) in UNUSED, "the interrupt never came"


UNUSED = {
    ("poll", "joined"), ("iteration", "joined"), ("poll_table", "rows"),
    ("poll", "drop_readable"), ("iteration", "drop_readable"), ("poll_table", "drop_readable"),
}  # fmt: skip


def test_a_commit_that_was_interrupted_keeps_no_later_one_waiting(
    shared_semel_broker: SemelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is tried again until its deadline, as the topic does not exist."""
    topic = create_topic(shared_semel_broker.bootstrap, "behind-an-interrupted-commit")
    options = {"group_id": topic, "enable_auto_commit": False, "default_api_timeout_ms": PATIENCE_MS}
    with Consumer(bootstrap_servers=shared_semel_broker.bootstrap, **options) as consumer:
        fired = interrupt(monkeypatch, engine.CommitDriver, "_ended", 2, after_it=True)
        with pytest.raises(KeyboardInterrupt):
            consumer.commit({("there-is-no-such-topic", 0): 1})
        assert fired
        assert not len(consumer._engine.commits)
        consumer.commit({(topic, 0): 5})
        assert consumer.committed([(topic, 0)])[TopicPartition(topic, 0)].offset == 5
