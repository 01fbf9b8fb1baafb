"""What the sender does about the answer of a broker, without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from semel.client.cluster_calls import Leader, Outages
from semel.client.errors import ConnectionFailedError, FatalError
from semel.client.immediate import run
from semel.client.metadata import PartitionMetadata
from semel.client.producer.batches import encode_rows
from semel.client.producer.core import MOVED
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.sender import Sender
from semel.client.producer.tables import TablePart
from semel.client.settings import ProducerSettings
from semel.client.wire import Pending
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    PRODUCE,
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)

VERSION = 9


class MovedPartition:
    """A cluster where broker 1 was the leader; broker 2 is, for those that look it up again."""

    def __init__(self) -> None:
        self.known_leader = 1
        self.calls = self
        self.outages = Outages()

    async def partition(self, topic: str, index: int, *_: Any) -> PartitionMetadata:
        return PartitionMetadata(index, self.known_leader, 0, (1, 2), (1, 2), ErrorCode.NONE)

    def forget(self, target: Leader) -> None:
        assert target == Leader("orders", 0)
        self.known_leader = 2


@pytest.fixture
def sender() -> Iterator[Sender]:
    settings = ProducerSettings.of(
        bootstrap_servers="nowhere:1", enable_idempotence=False, retry_backoff_ms=1, retry_backoff_max_ms=1
    )
    sender = Sender(settings, MovedPartition(), WriteIdentity())  # type: ignore[arg-type]
    sender.add(sender.new_batch("orders", 0, encode_rows([(None, b"value", 0, ())], 0, False), 1))
    yield sender
    sender.close()


def sent(sender: Sender) -> Pending:
    """A request with the next batch, on its way to whom the sender takes for the leader."""
    produce = sender.core.take(list(sender.core.accumulator.queues.values()), time.monotonic())
    assert produce is not None
    return Pending(PRODUCE, VERSION, 1, time.monotonic() + 60, produce.sendings)


def answered(pending: Pending, code: ErrorCode) -> Pending:
    partition = PartitionProduceResponse(index=0, error_code=code, base_offset=0 if code is ErrorCode.NONE else -1)
    response = ProduceResponse(responses=[TopicProduceResponse(name="orders", partition_responses=[partition])])
    pending.frame = b"".join(PRODUCE.frame_response(response, VERSION, 1))[4:]
    return pending


def leader_to_send_to(sender: Sender) -> int:
    (node_id,) = run(sender._by_leader(list(sender.core.accumulator.queues.values())))
    return node_id


@pytest.mark.parametrize("code", sorted(MOVED), ids=lambda code: code.name)
def test_a_refused_batch_goes_to_the_new_leader(sender: Sender, code: ErrorCode) -> None:
    assert leader_to_send_to(sender) == 1
    sender._settle(answered(sent(sender), code))
    (queue,) = sender.core.accumulator.queues.values()
    assert len(queue.unacked) == 1, "it is retried"
    assert leader_to_send_to(sender) == 2


def test_a_batch_whose_connection_failed_goes_to_the_new_leader(sender: Sender) -> None:
    pending = sent(sender)
    pending.error = ConnectionFailedError("cut", ErrorCode.NETWORK_EXCEPTION, maybe_sent=True)
    sender._settle(pending)
    assert leader_to_send_to(sender) == 2


@pytest.mark.parametrize("code", [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT], ids=lambda c: c.name)
def test_a_leader_that_says_something_else_stays_the_leader(sender: Sender, code: ErrorCode) -> None:
    sender._settle(answered(sent(sender), code))
    assert leader_to_send_to(sender) == 1


def test_a_stored_batch_is_done_and_gives_its_memory_back(sender: Sender) -> None:
    pending = sent(sender)
    ((_, batch),) = pending.context
    sender._settle(answered(pending, ErrorCode.NONE))
    assert (batch.done, batch.error, batch.base_offset, sender.used_bytes) == (True, None, 0, 0)


def test_a_batch_that_cannot_be_encoded_fails_alone(sender: Sender) -> None:
    """Whatever goes wrong there: the thread goes on with the others."""
    odd = TablePart(None, pa.array(["a"]), pa.array([2**64 - 1], pa.uint64()), 1, 100)  # no time
    bad, _ = sender.append_table("odd", 0, odd, 0)
    good = sender.append("t", 0, (None, b"v", 1, ()), 100, 0)
    sender.start_flush()
    sender._prepare()
    assert isinstance(bad.error, FatalError)
    assert "cannot be encoded" in str(bad.error)
    assert not good.done()
    assert good._batch.data is not None
