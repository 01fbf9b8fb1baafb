"""Metadata (3): which brokers there are, and which topics with which partitions and leaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.handlers.rights import CLUSTER_OPERATIONS, NOT_ASKED, TOPIC_OPERATIONS
from semel.broker.topics import INTERNAL_TOPICS, TopicError, name_problem
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from semel.protocol.schema import NO_UUID

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic


_FIRST_BY_ID = 12


async def metadata(broker: BrokerNode, context: RequestContext, request: MetadataRequest) -> MetadataResponse:
    if context.version < _FIRST_BY_ID and any(asked.name is None for asked in request.topics or ()):
        refused = [
            MetadataResponseTopic(ErrorCode.INVALID_REQUEST, asked.name or "", asked.topic_id)
            for asked in request.topics or ()
        ]
        return MetadataResponse(topics=refused)
    host, port = broker.address_for(context)
    operations = TOPIC_OPERATIONS if request.include_topic_authorized_operations else NOT_ASKED
    response = MetadataResponse(
        brokers=[MetadataResponseBroker(broker.node_id, host, port, broker.settings["broker.rack"])],
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
    )
    if context.version <= 10 and request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    if request.topics is None or (context.version == 0 and not request.topics):
        response.topics = await Turns().map(lambda topic: _describe(broker, topic, operations), list(broker.topics))
    else:
        may_create = request.allow_auto_topic_creation and broker.settings["auto.create.topics.enable"]
        once = {(asked.name, asked.topic_id): asked for asked in request.topics}.values()  # as Kafka: a set of topics
        response.topics = await Turns().map(lambda asked: _find(broker, asked, may_create, operations), once)
    return response


def _find(broker: BrokerNode, asked: MetadataRequestTopic, may_create: bool, operations: int) -> MetadataResponseTopic:
    if asked.name is None or asked.topic_id != NO_UUID:
        by_id = broker.topics.by_id(asked.topic_id)
        if by_id is None:
            return MetadataResponseTopic(ErrorCode.UNKNOWN_TOPIC_ID, None, asked.topic_id)
        return _describe(broker, by_id, operations)
    topic = broker.topics.get(asked.name)
    if topic is None:
        try:
            topic = _create(broker, asked.name, may_create)
        except TopicError as error:
            is_internal = asked.name in INTERNAL_TOPICS
            return MetadataResponseTopic(error.code, asked.name, is_internal=is_internal)
    return _describe(broker, topic, operations)


def _create(broker: BrokerNode, name: str, may_create: bool) -> Topic:
    if name_problem(name):
        raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, name)
    if not may_create or broker.topics.is_changing(name):  # in the latter case the client asks again
        raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name)
    if name in INTERNAL_TOPICS:
        return broker.topics.internal(name)
    return broker.topics.create(name, broker.settings["num.partitions"])


def _describe(broker: BrokerNode, topic: Topic, operations: int) -> MetadataResponseTopic:
    node = [broker.node_id]
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.is_internal,
        partitions=[
            MetadataResponsePartition(0, part.index, broker.node_id, part.log.leader_epoch, node, node)
            for part in topic.partitions
        ],
        topic_authorized_operations=operations,
    )
