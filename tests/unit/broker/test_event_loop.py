"""No request holds the event loop for long, whatever it asks for: other clients are served in between.

What is measured is CPU time of the loop's thread between two looks at the sockets. It does not depend on what else runs
on the machine, but on how fast the machine is: the limit is five turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from semel.broker.dispatch import TABLE
from semel.broker.turns import TURN_S
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.cluster import METADATA, MetadataRequest
from semel.protocol.messages.records import (
    FETCH,
    LIST_OFFSETS,
    PRODUCE,
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from semel.protocol.messages.topics import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)
from semel.protocol.rows import Record, encode_batch
from tests.support.direct import DirectClient, batch_of
from tests.support.large_requests import Known, LargeRequest, all_large_requests
from tests.support.measured_broker import MeasuredBroker, no_garbage_collector
from tests.support.waiting import PATIENCE_S

LIMIT_S = 5 * TURN_S
LONG_S = 2 * PATIENCE_S  # a request of this size takes seconds where nothing else runs
ENTRIES = 10_000
PARTITIONS = 2_000  # of the topic that exists
CASES = list(all_large_requests())


class World:
    """The broker, a client, and a topic with many partitions."""

    def __init__(self, broker: MeasuredBroker, client: DirectClient) -> None:
        self.broker, self.client = broker, client
        client.create_topic("many", PARTITIONS)
        topic = broker.broker.topics.get("many")
        assert topic is not None
        self.known = Known("many", topic.id)
        client.produce("many", batch_of([b"x"]))  # loads what the first batch needs

    def call(self, api: Api[Any, Any], request: Any, version: int) -> tuple[Any, float]:
        """(response, the longest stretch of the event loop in seconds)"""
        self.broker.longest_stretch_s()
        with DirectClient(self.broker.bootstrap, timeout_s=LONG_S) as client:  # a late response is no other test's
            response = client.call(api, request, version)
        return response, self.broker.longest_stretch_s()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data: Path = tmp_path_factory.mktemp("event-loop")
    with (
        no_garbage_collector(),
        MeasuredBroker(data / "broker") as broker,
        DirectClient(broker.bootstrap, timeout_s=LONG_S) as client,
    ):
        yield World(broker, client)


def test_every_array_of_every_request_has_a_case() -> None:
    assert {case.api.key for case in CASES} > {0, 1, 2, 3, 8, 9, 19, 20, 24, 27, 28, 37}
    assert len(CASES) > len(TABLE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_entries_of_one_request_take_turns(world: World, case: LargeRequest) -> None:
    """Twenty thousand entries: of things that do not exist, then of the partitions of one topic."""
    names_topics = case.make(1, world.known) != case.make(1)
    for known in (None, world.known) if names_topics else (None,):
        world.client.call(case.api, case.make(1, known), case.version)  # loads the handler
        _, stretch_s = world.call(case.api, case.make(ENTRIES, known), case.version)
        assert stretch_s < LIMIT_S


def test_topics_with_very_many_partitions_are_created_and_deleted_in_turns(world: World) -> None:
    count = 2_000
    request = CreateTopicsRequest(topics=[CreatableTopic("wide", count, 1)])
    response, stretch_s = world.call(CREATE_TOPICS, request, 7)
    assert [(topic.error_code, topic.num_partitions) for topic in response.topics] == [(E.NONE, count)]
    assert stretch_s < LIMIT_S
    more = CreatePartitionsRequest(topics=[CreatePartitionsTopic("wide", 2 * count, None)])
    response, stretch_s = world.call(CREATE_PARTITIONS, more, 3)
    assert [result.error_code for result in response.results] == [E.NONE]
    assert stretch_s < LIMIT_S
    response, stretch_s = world.call(METADATA, MetadataRequest(None), 12)
    assert [len(topic.partitions) for topic in response.topics if topic.name == "wide"] == [2 * count]
    assert stretch_s < LIMIT_S
    delete = DeleteTopicsRequest(topics=[DeleteTopicState("wide")])
    response, stretch_s = world.call(DELETE_TOPICS, delete, 6)
    assert [result.error_code for result in response.responses] == [E.NONE]
    assert stretch_s < LIMIT_S
    world.client.create_topic("wide", 1)  # nothing of it is left


def test_many_topics_are_deleted_and_their_folders_removed_in_turns(world: World) -> None:
    names = [f"short-lived-{number}" for number in range(600)]
    config = [CreatableTopicConfig("file.delete.delay.ms", "0")]
    for _ in range(2):
        create = CreateTopicsRequest(topics=[CreatableTopic(name, 4, 1, configs=config) for name in names])
        response, stretch_s = world.call(CREATE_TOPICS, create, 7)
        assert {topic.error_code for topic in response.topics} == {E.NONE}
        assert stretch_s < LIMIT_S
        delete = DeleteTopicsRequest(topics=[DeleteTopicState(name) for name in names])
        response, stretch_s = world.call(DELETE_TOPICS, delete, 6)
        assert {result.error_code for result in response.responses} == {E.NONE}
        assert stretch_s < LIMIT_S
    folders = world.broker.broker.data_dir.path
    assert len(list(folders.glob("short-lived-*-delete"))) == 2 * 4 * len(names)
    world.broker.longest_stretch_s()
    world.broker.keep_up_storage()
    assert world.broker.longest_stretch_s() < LIMIT_S
    assert not list(folders.glob("short-lived-*"))


def test_a_slow_disk_does_not_keep_requests_waiting_for_checkpoints(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = world.broker.broker.data_dir.files
    writing, may_write, write_whole = threading.Event(), threading.Event(), files.write_whole

    def slow(*arguments: Any, **options: Any) -> None:
        writing.set()
        assert may_write.wait(PATIENCE_S)
        write_whole(*arguments, **options)

    monkeypatch.setattr(files, "write_whole", slow)
    world.client.produce("many", batch_of([b"x"]))
    with ThreadPoolExecutor() as pool:
        round_of_work = pool.submit(world.broker.keep_up_storage)
        assert writing.wait(PATIENCE_S)
        world.call(METADATA, MetadataRequest(), 12)
        may_write.set()
        round_of_work.result()


def test_batches_for_many_partitions_are_appended_and_fetched_in_turns(world: World) -> None:
    batch = batch_of([b"x"])
    parts = [PartitionProduceData(index, batch) for index in range(PARTITIONS)]
    request = ProduceRequest(acks=-1, topic_data=[TopicProduceData("many", partition_data=parts)])
    response, stretch_s = world.call(PRODUCE, request, 12)
    results = response.responses[0].partition_responses
    assert [result.index for result in results] == list(range(PARTITIONS))
    assert {result.error_code for result in results} == {E.NONE}
    assert stretch_s < LIMIT_S
    asks = [FetchPartition(index, partition_max_bytes=1 << 20) for index in range(PARTITIONS)]
    topics = [FetchTopic("many", partitions=asks)]
    full = FetchRequest(max_wait_ms=0, max_bytes=64 << 20, topics=topics, session_epoch=0)
    response, stretch_s = world.call(FETCH, full, 12)
    found = response.responses[0].partitions
    assert sorted(part.partition_index for part in found) == list(range(PARTITIONS))
    assert all(part.records for part in found)
    assert stretch_s < LIMIT_S
    for ask in asks:
        ask.fetch_offset = found[ask.partition].high_watermark
    rest = FetchRequest(max_wait_ms=0, topics=topics, session_id=response.session_id, session_epoch=1)
    response, stretch_s = world.call(FETCH, rest, 12)
    assert not any(part.records for topic in response.responses for part in topic.partitions)
    assert stretch_s < LIMIT_S
    waits = FetchRequest(max_wait_ms=60_000, min_bytes=1, session_id=response.session_id, session_epoch=2)
    world.client.send(FETCH, waits, 12)
    with DirectClient(world.broker.bootstrap) as other:
        assert other.produce("many", batch, partition=7)[0] is E.NONE
    (topic,) = world.client.receive(FETCH, 12).responses
    assert [part.partition_index for part in topic.partitions] == [7]
    assert world.broker.longest_stretch_s() < LIMIT_S


def test_a_time_inside_a_batch_of_very_many_records_is_found_by_a_thread(world: World) -> None:
    count = 60_000
    records = [Record(number, 1_000 + number, None, b"", ()) for number in range(count)]
    world.client.create_topic("times")
    assert world.client.produce("times", encode_batch(records))[0] is E.NONE
    world.broker.longest_stretch_s()
    ask = ListOffsetsPartition(0, -1, 1_000 + count - 5)
    request = ListOffsetsRequest(-1, topics=[ListOffsetsTopic("times", [ask])])
    response, stretch_s = world.call(LIST_OFFSETS, request, 7)
    (found,) = response.topics[0].partitions
    assert (found.error_code, found.offset) == (E.NONE, count - 5)
    assert stretch_s < LIMIT_S
