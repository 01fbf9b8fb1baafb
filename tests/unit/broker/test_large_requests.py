"""Requests with very many entries: linear in their size, and others are served in between."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from semel.broker.context import RequestContext
from semel.broker.handlers.create_topics import create_topics
from semel.broker.handlers.list_offsets import list_offsets
from semel.broker.settings import Settings
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from semel.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
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
    broker: Any = SimpleNamespace(
        topics=SimpleNamespace(check_new=lambda *_: None, create_many=lambda _: []), settings=Settings()
    )
    started_s = time.monotonic()
    response = create_topics(broker, CONTEXT, CreateTopicsRequest(topics=topics))
    assert time.monotonic() - started_s < STALL_S
    assert {each.name for each in response.topics if each.error_code} == {"topic_9"}
