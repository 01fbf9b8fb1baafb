"""DescribeQuorum (55), UnregisterBroker (64): the controllers are this node alone, and its journal is their log."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from typing import TYPE_CHECKING

from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    PartitionDataResult,
    QuorumPartition,
    QuorumReplicaState,
    TopicDataResult,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from semel.protocol.schema import NO_UUID

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

_METADATA = "__cluster_metadata"
_FIRST_WITH_FOLDERS = 2


async def describe_quorum(
    broker: BrokerNode, context: RequestContext, request: DescribeQuorumRequest
) -> DescribeQuorumResponse:
    asked = [(topic.topic_name, part.partition_index) for topic in request.topics for part in topic.partitions]
    if asked != [(_METADATA, 0)]:
        turns = Turns()
        topics = [
            TopicDataResult(topic.topic_name, await turns.map(_unknown, topic.partitions)) for topic in request.topics
        ]
        return DescribeQuorumResponse(topics=topics)
    end, now_ms = broker.store.size_bytes, broker.clock.now_ms()
    names_folders = context.version >= _FIRST_WITH_FOLDERS
    voter = QuorumReplicaState(broker.node_id, _directory_id(broker) if names_folders else NO_UUID, end, now_ms, now_ms)
    partition = PartitionDataResult(
        0, 0, None, leader_id=broker.node_id, leader_epoch=broker.store.starts, high_watermark=end
    )
    partition.current_voters = [voter]
    host, port = broker.address_for(context)
    return DescribeQuorumResponse(
        topics=[TopicDataResult(_METADATA, [partition])],
        nodes=[Node(broker.node_id, [Listener("PLAINTEXT", host, port)])] if names_folders else [],
    )


def _unknown(asked: QuorumPartition) -> PartitionDataResult:
    return PartitionDataResult(asked.partition_index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)


def _directory_id(broker: BrokerNode) -> bytes:
    text = broker.data_dir.properties().get("directory.id")
    return urlsafe_b64decode(text + "==") if text else NO_UUID


def unregister_broker(
    broker: BrokerNode, context: RequestContext, request: UnregisterBrokerRequest
) -> UnregisterBrokerResponse:
    if request.broker_id == broker.node_id:
        message = f"Broker {broker.node_id} is the only one there is."
        return UnregisterBrokerResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=message)
    message = f"Broker ID {request.broker_id} is not currently registered"
    return UnregisterBrokerResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=message)
