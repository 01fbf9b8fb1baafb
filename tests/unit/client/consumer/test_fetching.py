"""What a fetch response with an error does to what was read ahead. No network."""

from __future__ import annotations

from typing import Any

import pytest

from semel.client.aside import Aside
from semel.client.cluster import Cluster
from semel.client.consumer.assigned_partitions import AssignedPartitions, PartitionState, ResetTo
from semel.client.consumer.fetcher import FetchPlan
from semel.client.consumer.fetching import Fetching, RetryBudget
from semel.client.settings import ConsumerSettings
from semel.client.types import OffsetOutOfRangeError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import FetchableTopicResponse, FetchResponse, PartitionData
from semel.protocol.rows import Record, encode_batch

PLACE = TopicPartition("t", 0)


class Answered:
    """A request with its response."""

    def __init__(self, **fields: Any) -> None:
        data = PartitionData(partition_index=0, **fields)
        self._response = FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[data])])

    def result(self) -> FetchResponse:
        return self._response


class World:
    def __init__(self, reset: str) -> None:
        self.now_s = 0.0
        settings = ConsumerSettings.of(bootstrap_servers="127.0.0.1:1", auto_offset_reset=reset)
        assigned = AssignedPartitions()
        assigned.assign([PLACE])
        retry_budget = RetryBudget(60, lambda: True, self.clock)
        self.fetching = Fetching(Cluster(settings), settings, assigned, retry_budget, Aside(lambda: None), self.clock)
        self.state: PartitionState = assigned.of(PLACE)
        self.state.seek(0)

    def clock(self) -> float:
        return self.now_s

    def respond(self, **fields: Any) -> None:
        (plan,) = self.plans()
        self.fetching._on_response(plan, Answered(**fields))  # type: ignore[arg-type]

    def plans(self) -> list[FetchPlan]:
        return self.fetching.fetcher.plan(lambda _: (1, 1), {}, [], self.now_s)


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
def test_out_of_range_offset_does_not_drop_what_was_read_ahead(reset: str) -> None:
    """The records from before the missing offset are returned first; then the reset, or the error, comes."""
    world = World(reset)
    world.respond(records=memoryview(encode_batch([Record(number, 0, None, b"v") for number in range(5)])))
    world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    assert world.state.position == 0
    assert world.plans() == []  # asked again a little later
    chunk = world.fetching.fetcher.take()
    assert chunk is not None
    assert chunk.next_offset == 5
    world.state.position = chunk.next_offset
    world.now_s += 10
    if reset == "none":
        with pytest.raises(OffsetOutOfRangeError, match="no offset 5"):
            world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    else:
        world.respond(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        assert world.state.position is None
        assert world.state.reset_to == {"earliest": ResetTo.EARLIEST, "latest": ResetTo.LATEST}[reset]
