"""Requests with very many entries: linear in their size, and others are served in between."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.broker.connection import LARGE_REQUEST_BYTES
from semel.broker.dispatch import RequestContext
from semel.broker.groups.commits import CommitOutcome
from semel.broker.groups.handlers import offset_commit
from semel.broker.handlers.logs import list_offsets
from semel.broker.handlers.topics import create_topics
from semel.broker.settings import Settings
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.cluster import METADATA, MetadataRequest
from semel.protocol.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from semel.protocol.messages.records import (
    LIST_OFFSETS,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from semel.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from tests.support.direct import DirectClient
from tests.support.waiting import STALL_S

MANY = 60_000
CONTEXT = RequestContext(2, 7, "test", "/127.0.0.1", None)


def test_list_offsets_of_many_partitions_takes_linear_time_and_gives_way() -> None:
    """A request of about 1 MB; counting each partition among all others took a minute, and nobody else was served."""
    asks = [ListOffsetsPartition(number, -1, -1) for number in range(MANY)] + [ListOffsetsPartition(7, -1, -1)]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic("t", asks)])
    broker: Any = SimpleNamespace(topics=SimpleNamespace(find_log=lambda *_: None))
    served = 0

    async def run() -> Any:
        async def others() -> None:
            nonlocal served
            while True:
                await asyncio.sleep(0)
                served += 1

        task = asyncio.create_task(others())
        response = await list_offsets(broker, CONTEXT, request)
        task.cancel()
        return response

    started_s = time.monotonic()
    (topic,) = asyncio.run(run()).topics
    assert time.monotonic() - started_s < STALL_S
    codes = [each.error_code for each in topic.partitions]
    assert codes[7] == codes[-1] == E.INVALID_REQUEST
    assert codes.count(E.UNKNOWN_TOPIC_OR_PARTITION) == MANY - 1
    assert served


def test_names_of_one_request_that_collide_are_found_without_comparing_all() -> None:
    topics = [CreatableTopic(f"topic.{number}", 1, 1) for number in range(20_000)] + [CreatableTopic("topic_9", 1, 1)]

    def creation(_: Any) -> Generator[None, None, list[Any]]:
        yield
        return []

    async def run() -> Any:
        known = SimpleNamespace(check_new=lambda *_: None, creation=creation, changes=asyncio.Lock())
        broker: Any = SimpleNamespace(topics=known, settings=Settings())
        return await create_topics(broker, CONTEXT, CreateTopicsRequest(topics=topics))

    started_s = time.monotonic()
    response = asyncio.run(run())
    assert time.monotonic() - started_s < STALL_S
    assert {each.name for each in response.topics if each.error_code} == {"topic_9"}


def test_a_large_request_is_answered_in_its_place_and_a_broken_one_ends_its_connection(tmp_path: Path) -> None:
    """Threads decode it and encode the response; what the client sent after it waits."""
    asks = [ListOffsetsPartition(number, -1, -1) for number in range(10_000)]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic("t", asks)])
    assert sum(map(len, LIST_OFFSETS.frame_request(request, 7, 1, "test"))) > 2 * LARGE_REQUEST_BYTES
    with SemelBroker(tmp_path / "broker") as broker, DirectClient(broker.bootstrap) as client:
        client.create_topic("t", 3)
        client.send(LIST_OFFSETS, request, 7)
        client.send(METADATA, MetadataRequest([]), 12)
        client.send(LIST_OFFSETS, request, 7)
        (first,) = client.receive(LIST_OFFSETS, 7).topics
        assert client.receive(METADATA, 12).cluster_id
        (second,) = client.receive(LIST_OFFSETS, 7).topics
        assert first == second
        codes = [each.error_code for each in first.partitions]
        assert codes == [E.NONE] * 3 + [E.UNKNOWN_TOPIC_OR_PARTITION] * 9_997
        head = struct.pack(">hhih4s", 2, 7, 1, 4, b"test") + bytes([0, 0xFF, 0xFF, 0x7F])
        body = head + bytes(2 * LARGE_REQUEST_BYTES)
        client.socket.sendall(struct.pack(">i", len(body)) + body)
        with pytest.raises((EOFError, ConnectionError)):
            client.receive(LIST_OFFSETS, 7)
        with DirectClient(broker.bootstrap) as other:
            assert other.call(METADATA, MetadataRequest([]), 12).cluster_id


def test_many_offsets_for_one_partition_are_one_record_and_the_last_one_counts() -> None:
    """Twenty thousand offsets for two partitions were twenty thousand records of the internal topic."""
    written: list[Any] = []

    async def commit(_group: str, _committer: Any, commits: list[Any], **_: Any) -> CommitOutcome:
        written.extend(commits)
        return CommitOutcome(len(commits), E.NONE)

    topic = SimpleNamespace(name="t", id=bytes(16), partitions=[0, 1])
    groups = SimpleNamespace(commits=SimpleNamespace(commit=commit))
    settings = {"offset.metadata.max.bytes": 4096}
    broker: Any = SimpleNamespace(groups=groups, topics=SimpleNamespace(get=lambda _: topic), settings=settings)
    parts = [OffsetCommitRequestPartition(number % 2, number) for number in range(20_000)]
    request = OffsetCommitRequest("g", topics=[OffsetCommitRequestTopic("t", partitions=parts)])

    async def run() -> Any:
        return await offset_commit(broker, CONTEXT, request)

    response = asyncio.run(run())
    assert [(each.partition, each.offset) for each in written] == [(0, 19_998), (1, 19_999)]
    assert {each.error_code for each in response.topics[0].partitions} == {E.NONE}
    assert len(response.topics[0].partitions) == len(parts)
