"""What clients look up before they do anything: Metadata (3), DescribeTopicPartitions (75), DescribeCluster (60),
FindCoordinator (10)."""

from __future__ import annotations

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.partition_plan import KAFKAS_OWN
from semel.broker.topics import CONSUMER_OFFSETS, INTERNAL_TOPICS, TRANSACTION_STATE, Topic, TopicError, name_problem
from semel.broker.transactions.events import TraceStep
from semel.broker.transactions.states import NO_EPOCH, NO_PRODUCER_ID
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import cluster as messages
from semel.protocol.schema import NO_UUID

# --- The bits that say what a client may do: without an authorizer, everything that a resource knows ---
_OPERATION = {
    "read": 3, "write": 4, "create": 5, "delete": 6, "alter": 7, "describe": 8, "cluster_action": 9,
    "describe_configs": 10, "alter_configs": 11, "idempotent_write": 12,
}  # fmt: skip


def _bits(*operations: str) -> int:
    return sum(1 << _OPERATION[name] for name in operations)


TOPIC_OPERATIONS = _bits("read", "write", "create", "delete", "alter", "describe", "describe_configs", "alter_configs")
CLUSTER_OPERATIONS = _bits(
    "create", "alter", "describe", "cluster_action", "describe_configs", "alter_configs", "idempotent_write"
)
GROUP_OPERATIONS = _bits("read", "delete", "describe", "describe_configs", "alter_configs")
NOT_ASKED = -(2**31)


# --- Metadata (3): which brokers there are, and which topics with which partitions and leaders ---
_FIRST_BY_ID = 12


async def metadata(
    broker: BrokerNode, context: RequestContext, request: messages.MetadataRequest
) -> messages.MetadataResponse:
    if context.version < _FIRST_BY_ID and any(
        requested.name is None or requested.topic_id != NO_UUID for requested in request.topics or ()
    ):
        refused = [
            messages.MetadataResponseTopic(ErrorCode.INVALID_REQUEST, requested.name or "", requested.topic_id)
            for requested in request.topics or ()
        ]
        return messages.MetadataResponse(topics=refused)
    host, port = broker.address_for(context)
    operations = TOPIC_OPERATIONS if request.include_topic_authorized_operations else NOT_ASKED
    response = messages.MetadataResponse(
        brokers=[messages.MetadataResponseBroker(broker.node_id, host, port, broker.settings["broker.rack"])],
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
    )
    if context.version <= 10 and request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    if request.topics is None or (context.version == 0 and not request.topics):
        response.topics = await Turns().map(lambda topic: _describe(broker, topic, operations), list(broker.topics))
    else:
        may_create = request.allow_auto_topic_creation and broker.settings["auto.create.topics.enable"]
        once = {
            (requested.name, requested.topic_id): requested for requested in request.topics
        }.values()  # as Kafka: a set of topics
        response.topics = await Turns().map(lambda requested: _find(broker, requested, may_create, operations), once)
    return response


def _find(
    broker: BrokerNode, requested: messages.MetadataRequestTopic, may_create: bool, operations: int
) -> messages.MetadataResponseTopic:
    if requested.name is None or requested.topic_id != NO_UUID:
        by_id = broker.topics.by_id(requested.topic_id)
        if by_id is None:
            return messages.MetadataResponseTopic(ErrorCode.UNKNOWN_TOPIC_ID, None, requested.topic_id)
        return _describe(broker, by_id, operations)
    topic = broker.topics.get(requested.name)
    if topic is not None:
        return _describe(broker, topic, operations)
    code = _create(broker, requested.name, may_create)
    return messages.MetadataResponseTopic(code, requested.name, is_internal=requested.name in INTERNAL_TOPICS)


def _create(broker: BrokerNode, name: str, may_create: bool) -> ErrorCode:
    """Creates a topic if that may be. The response says UNKNOWN_TOPIC_OR_PARTITION nevertheless, as Kafka's does, which
    creates it meanwhile: the client's next request finds it. One that looks whether its topic was deleted sees that."""
    if name_problem(name):
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    try:
        if may_create and name != KAFKAS_OWN and not broker.topics.is_changing(name):
            if name in INTERNAL_TOPICS:
                broker.topics.internal(name)
            else:
                broker.topics.create(name, broker.settings["num.partitions"])
    except TopicError as error:
        return error.code
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _describe(broker: BrokerNode, topic: Topic, operations: int) -> messages.MetadataResponseTopic:
    node = [broker.node_id]
    return messages.MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.is_internal,
        partitions=[
            messages.MetadataResponsePartition(0, part.index, broker.node_id, part.log.leader_epoch, node, node)
            for part in topic.partitions
        ],
        topic_authorized_operations=operations,
    )


# --- DescribeTopicPartitions (75): topics in pages, by name ---
async def describe_topic_partitions(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeTopicPartitionsRequest
) -> messages.DescribeTopicPartitionsResponse:
    requested_names = {requested.name for requested in request.topics}
    names = sorted(requested_names or {topic.name for topic in broker.topics})
    cursor = request.cursor
    if cursor is not None and (
        cursor.partition_index < 0 or (requested_names and cursor.topic_name not in requested_names)
    ):
        refused = [messages.DescribeTopicPartitionsResponseTopic(ErrorCode.INVALID_REQUEST, name) for name in names]
        return messages.DescribeTopicPartitionsResponse(topics=refused)
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
    remaining = max(1, min(request.response_partition_limit, broker.settings["max.request.partition.size.limit"]))
    response = messages.DescribeTopicPartitionsResponse()
    turns = Turns()
    for name in names:
        await turns.next()
        if remaining == 0:
            response.next_cursor = messages.Cursor(name, 0)
            break
        topic = broker.topics.get(name)
        if topic is None:
            response.topics.append(_unknown_topic(name))
            continue
        first = cursor.partition_index if cursor is not None and cursor.topic_name == name else 0
        shown = _describe_page(broker, topic, first, remaining)
        response.topics.append(shown)
        if first + len(shown.partitions) < len(topic.partitions):
            response.next_cursor = messages.Cursor(name, first + len(shown.partitions))
            break
        remaining -= len(shown.partitions)
    return response


def _unknown_topic(name: str) -> messages.DescribeTopicPartitionsResponseTopic:
    code = ErrorCode.INVALID_TOPIC_EXCEPTION if name_problem(name) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return messages.DescribeTopicPartitionsResponseTopic(
        code, name, is_internal=name in INTERNAL_TOPICS, topic_authorized_operations=TOPIC_OPERATIONS
    )


def _describe_page(
    broker: BrokerNode, topic: Topic, first: int, remaining: int
) -> messages.DescribeTopicPartitionsResponseTopic:
    node = [broker.node_id]
    return messages.DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.is_internal,
        partitions=[
            messages.DescribeTopicPartitionsResponsePartition(
                0, part.index, broker.node_id, part.log.leader_epoch, node, node, [], []
            )
            for part in topic.partitions[first : first + remaining]
        ],
        topic_authorized_operations=TOPIC_OPERATIONS,
    )


# --- DescribeCluster (60): the brokers of the cluster: this one ---
_BROKERS, _CONTROLLERS = 1, 2


def describe_cluster(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeClusterRequest
) -> messages.DescribeClusterResponse:
    if request.endpoint_type != _BROKERS:
        if request.endpoint_type == _CONTROLLERS:
            code = ErrorCode.MISMATCHED_ENDPOINT_TYPE
            message = "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER"
        else:
            code = ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
            message = f"Unsupported endpoint type {request.endpoint_type}"
        return messages.DescribeClusterResponse(error_code=code, error_message=message)
    host, port = broker.address_for(context)
    return messages.DescribeClusterResponse(
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[messages.DescribeClusterBroker(broker.node_id, host, port, broker.settings["broker.rack"])],
        cluster_authorized_operations=CLUSTER_OPERATIONS
        if request.include_cluster_authorized_operations
        else NOT_ASKED,
    )


# --- FindCoordinator (10): which broker keeps a group (key type 0) or a transactional id (key type 1): this one ---
_TOPIC_OF_TYPE = {0: CONSUMER_OFFSETS, 1: TRANSACTION_STATE}
_FIRST_WITH_LIST = 4


async def find_coordinator(
    broker: BrokerNode, context: RequestContext, request: messages.FindCoordinatorRequest
) -> messages.FindCoordinatorResponse:
    if context.version >= _FIRST_WITH_LIST:
        keys = await Turns().map(
            lambda key: _coordinator(broker, context, key, request.key_type), request.coordinator_keys
        )
        return messages.FindCoordinatorResponse(coordinators=keys)
    found = _coordinator(broker, context, request.key, request.key_type)
    return messages.FindCoordinatorResponse(
        error_code=found.error_code,
        error_message=found.error_message or ErrorCode.NONE.name,  # Kafka's word for "no error"
        node_id=found.node_id,
        host=found.host,
        port=found.port,
    )


def _coordinator(broker: BrokerNode, context: RequestContext, key: str, key_type: int) -> messages.Coordinator:
    journal = _TOPIC_OF_TYPE.get(key_type)
    if journal is None:
        return messages.Coordinator(key, -1, "", -1, ErrorCode.INVALID_REQUEST, f"Key type {key_type} is not served.")
    try:
        broker.topics.internal(journal)
    except TopicError as error:
        return messages.Coordinator(key, -1, "", -1, ErrorCode.COORDINATOR_NOT_AVAILABLE, error.message)
    host, port = broker.address_for(context)
    if journal == TRANSACTION_STATE and key:
        broker.transactions.events.add(TraceStep.FIND, key, NO_PRODUCER_ID, NO_EPOCH, client=context.client)
    return messages.Coordinator(key, broker.node_id, host, port, ErrorCode.NONE, "")
