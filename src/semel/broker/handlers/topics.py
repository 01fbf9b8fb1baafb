"""CreateTopics (19), CreatePartitions (37), DeleteTopics (20)."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

from semel.broker import resource_settings
from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.handlers.configs import accept_topic_settings
from semel.broker.partition_plan import KAFKAS_OWN
from semel.broker.topics import MAX_PARTITIONS_PER_TOPIC, Topic, TopicError, check_collision, plain_name
from semel.broker.turns import MANY, Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import topics as messages
from semel.protocol.schema import NO_UUID

# --- Replicas and their folders. There is one broker with one folder, so there is one right list ---


# --- Replica assignments that clients name by hand. There is one broker, so there is one right list ---
def check_assignment(broker: BrokerNode, replicas: list[int]) -> None:
    """Raises TopicError unless a partition can live on these brokers."""
    problem = None
    strangers = [replica for replica in replicas if replica != broker.node_id]
    if not replicas:
        problem = "an empty replica list."
    elif strangers:
        problem = f"broker {strangers[0]}, but no such broker is registered."
    elif len(replicas) > 1:
        problem = f"the broker {broker.node_id} more than once."
    if problem is not None:
        message = f"The manual partition assignment includes {problem}"
        raise TopicError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, message)


# --- AlterReplicaLogDirs (34), ElectLeaders (43), AlterPartitionReassignments (45), ListPartitionReassignments (46) ---
async def elect_leaders(
    broker: BrokerNode, context: RequestContext, request: messages.ElectLeadersRequest
) -> messages.ElectLeadersResponse:
    """Every leader is the only replica already; with a request for all partitions, there is nothing to report."""
    if request.topic_partitions is None:
        all_topics = [messages.ReplicaElectionResult(topic.name, []) for topic in broker.topics]
        return messages.ElectLeadersResponse(replica_election_results=all_topics)
    topics = ((topic.topic, topic.partitions) for topic in request.topic_partitions)
    if request.election_type not in _ELECTION_TYPES:
        refuse = partial(_refuse_election, request.election_type)
        refused = await Turns().map_topics(messages.ReplicaElectionResult, refuse, topics)
        return messages.ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST, replica_election_results=refused)
    results = await Turns().map_topics(messages.ReplicaElectionResult, partial(_elect, broker), topics)
    return messages.ElectLeadersResponse(replica_election_results=results)


_ELECTION_TYPES = (0, 1)  # preferred, unclean


def _refuse_election(election_type: int, topic: str, index: int) -> messages.PartitionResult:
    return messages.PartitionResult(index, ErrorCode.INVALID_REQUEST, f"Unknown election type {election_type}")


def _elect(broker: BrokerNode, topic: str, index: int) -> messages.PartitionResult:
    code, message = ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."
    if broker.topics.get(topic) is None:
        code, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such topic as {topic}"
    elif broker.topics.partition(topic, index) is None:
        code, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such partition as {topic}-{index}"
    return messages.PartitionResult(index, code, message)


def list_partition_reassignments(
    broker: BrokerNode, context: RequestContext, request: messages.ListPartitionReassignmentsRequest
) -> messages.ListPartitionReassignmentsResponse:
    return messages.ListPartitionReassignmentsResponse(error_message=None)


async def alter_partition_reassignments(
    broker: BrokerNode, context: RequestContext, request: messages.AlterPartitionReassignmentsRequest
) -> messages.AlterPartitionReassignmentsResponse:
    topics = ((topic.name, topic.partitions) for topic in request.topics)
    return messages.AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=await Turns().map_topics(messages.ReassignableTopicResponse, partial(_reassign, broker), topics),
    )


def _reassign(
    broker: BrokerNode, topic: str, requested: messages.ReassignablePartition
) -> messages.ReassignablePartitionResponse:
    try:
        if broker.topics.get(topic) is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find a topic named {topic}.")
        if broker.topics.partition(topic, requested.partition_index) is None:
            message = f"Unable to find partition {topic}:{requested.partition_index}."
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message)
        if requested.replicas is None:
            raise TopicError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None)
        check_assignment(broker, requested.replicas)
    except TopicError as error:
        return messages.ReassignablePartitionResponse(requested.partition_index, error.code, error.message)
    return messages.ReassignablePartitionResponse(requested.partition_index, ErrorCode.NONE, None)


async def alter_replica_log_dirs(
    broker: BrokerNode, context: RequestContext, request: messages.AlterReplicaLogDirsRequest
) -> messages.AlterReplicaLogDirsResponse:
    """A replica may be moved to where it is."""
    results: dict[str, messages.AlterReplicaLogDirTopicResult] = {}
    turns = Turns()
    for folder in request.dirs:
        is_ours = folder.path == str(broker.data_dir.path)
        for topic in folder.topics:
            result = results.setdefault(topic.name, messages.AlterReplicaLogDirTopicResult(topic.name, []))
            for index in topic.partitions:
                exists = broker.topics.partition(topic.name, index) is not None
                code = ErrorCode.NONE if exists else ErrorCode.REPLICA_NOT_AVAILABLE
                result.partitions.append(
                    messages.AlterReplicaLogDirPartitionResult(index, code if is_ours else ErrorCode.LOG_DIR_NOT_FOUND)
                )
                await turns.next()
    return messages.AlterReplicaLogDirsResponse(results=list(results.values()))


# --- DescribeLogDirs (35): how large the partitions are, and how much space the data folder has ---
async def describe_log_dirs(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeLogDirsRequest
) -> messages.DescribeLogDirsResponse:
    if request.topics is None:
        requested = {topic.name: [part.index for part in topic.partitions] for topic in broker.topics}
    else:
        requested = {topic.topic: topic.partitions for topic in request.topics}
    topics = []
    turns = Turns()
    for name, indexes in requested.items():
        found = []
        for index in indexes:
            if (log := broker.topics.find_log(name, index)) is not None:
                found.append(messages.DescribeLogDirsPartition(index, log.size_bytes))
            await turns.next()
        if found:
            topics.append(messages.DescribeLogDirsTopic(name, found))
    disk = os.statvfs(broker.data_dir.path)
    folder = messages.DescribeLogDirsResult(
        log_dir=str(broker.data_dir.path.absolute()),
        topics=topics,
        total_bytes=disk.f_blocks * disk.f_frsize,
        usable_bytes=disk.f_bavail * disk.f_frsize,
    )
    return messages.DescribeLogDirsResponse(results=[folder])


# --- CreateTopics (19): create topics ---
_DEFAULT = -1

Wanted = tuple[str, int, dict[str, str]]


async def create_topics(
    broker: BrokerNode, context: RequestContext, request: messages.CreateTopicsRequest
) -> messages.CreateTopicsResponse:
    turns = Turns()
    counts = Counter(topic.name for topic in request.topics)
    results: dict[str, messages.CreatableTopicResult] = {}
    wanted: list[Wanted] = []
    plain_names: dict[str, str] = {}
    async with broker.topics.changes:
        for requested in request.topics:
            try:
                if counts[requested.name] > 1:
                    raise TopicError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
                wanted.append(_check_new(broker, requested, plain_names))
                results[requested.name] = messages.CreatableTopicResult(requested.name)
            except TopicError as error:
                results[requested.name] = _refused(requested.name, error)
            await turns.next()
        for at in range(0, len(wanted), MANY):
            await _create(broker, wanted[at : at + MANY], request.validate_only, results, turns)
    return messages.CreateTopicsResponse(topics=list(results.values()))


async def _create(
    broker: BrokerNode,
    wanted: list[Wanted],
    validate_only: bool,
    results: dict[str, messages.CreatableTopicResult],
    turns: Turns,
) -> None:
    """Creates some topics for the price of one fsync; if that fails, none of them exists."""
    if validate_only:
        for name, count, configs in wanted:
            results[name] = _created(broker, Topic(name, NO_UUID, configs), count)
            await turns.next()
        return
    try:
        created = await turns.run(broker.topics.creation(wanted))
    except TopicError as error:  # the disk is full, say
        for name, _, _ in wanted:
            results[name] = _refused(name, error)
        return
    for topic in created:
        results[topic.name] = _created(broker, topic, len(topic.partitions))
        await turns.next()


def _refused(name: str, error: TopicError) -> messages.CreatableTopicResult:
    return messages.CreatableTopicResult(name, error_code=error.code, error_message=error.message, configs=[])


def _check_new(broker: BrokerNode, requested: messages.CreatableTopic, earlier: dict[str, str]) -> Wanted:
    """(name, partitions, settings) of a topic that may be created next to the earlier ones of the request, whose names
    stand under their plain form."""
    if requested.name == KAFKAS_OWN:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Creation of internal topic {requested.name} is prohibited.")
    plain = plain_name(requested.name)
    if plain in earlier:
        check_collision(requested.name, earlier[plain])
    configs: dict[str, str] = {}
    for config in requested.configs:
        if config.value is None:
            raise TopicError(ErrorCode.INVALID_CONFIG, f"Null value not supported for topic configs: {config.name}")
        configs[config.name] = config.value
    broker.topics.check_new(requested.name, 1, configs)
    count = _manual_count(broker, requested) if requested.assignments else _automatic_count(broker, requested)
    broker.topics.check_new(requested.name, count, configs)
    accept_topic_settings(broker, configs)
    earlier[plain] = requested.name
    return requested.name, count, configs


def _manual_count(broker: BrokerNode, requested: messages.CreatableTopic) -> int:
    for field, value in (
        ("replication factor", requested.replication_factor),
        ("numPartitions", requested.num_partitions),
    ):
        if value != _DEFAULT:
            message = f"A manual partition assignment was specified, but {field} was not set to -1."
            raise TopicError(ErrorCode.INVALID_REQUEST, message)
    if sorted(given.partition_index for given in requested.assignments) != list(range(len(requested.assignments))):
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
        )
    for given in requested.assignments:
        check_assignment(broker, given.broker_ids)
    return len(requested.assignments)


def _automatic_count(broker: BrokerNode, requested: messages.CreatableTopic) -> int:
    factor = requested.replication_factor
    if factor < _DEFAULT or factor == 0:
        raise TopicError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    if requested.num_partitions < _DEFAULT or requested.num_partitions == 0:
        raise TopicError(ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value.")
    if factor > 1:
        raise TopicError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {factor} time(s): The target replication factor of {factor} cannot be "
            "reached because only 1 broker(s) are registered or some brokers have all their log directories cordoned.",
        )
    count: int = broker.settings["num.partitions"] if requested.num_partitions == _DEFAULT else requested.num_partitions
    return count


def _created(broker: BrokerNode, topic: Topic, count: int) -> messages.CreatableTopicResult:
    entries = resource_settings.describe_topic(broker, topic)
    return messages.CreatableTopicResult(
        name=topic.name,
        topic_id=topic.id,
        error_message=None,
        num_partitions=count,
        replication_factor=1,
        configs=[messages.CreatableTopicConfigs(e.name, e.value, e.is_read_only, e.source, False) for e in entries],
    )


# --- CreatePartitions (37): give topics more partitions ---
async def create_partitions(
    broker: BrokerNode, context: RequestContext, request: messages.CreatePartitionsRequest
) -> messages.CreatePartitionsResponse:
    counts = Counter(requested.name for requested in request.topics)
    results: dict[str, messages.CreatePartitionsTopicResult] = {}
    turns = Turns()
    async with broker.topics.changes:
        for requested in request.topics:
            try:
                if counts[requested.name] > 1:
                    raise TopicError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
                topic = _check_addition(broker, requested)
                if not request.validate_only:
                    await turns.run(broker.topics.addition(topic, requested.count))
                results[requested.name] = messages.CreatePartitionsTopicResult(requested.name)
            except TopicError as error:
                results[requested.name] = messages.CreatePartitionsTopicResult(
                    requested.name, error.code, error.message
                )
            await turns.next()
    return messages.CreatePartitionsResponse(results=list(results.values()))


def _check_addition(broker: BrokerNode, requested: messages.CreatePartitionsTopic) -> Topic:
    topic = broker.topics.get(requested.name)
    if topic is None:
        raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)
    if topic.is_internal:
        raise TopicError(
            ErrorCode.INVALID_REQUEST, f"{topic.name} keeps its partitions: ids are spread over them by their hash."
        )
    now = len(topic.partitions)
    if requested.count == now:
        raise TopicError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {now} partition(s).")
    if requested.count < now:
        raise TopicError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {topic.name} currently has {now} partition(s); {requested.count} would not be an increase.",
        )
    if requested.count > MAX_PARTITIONS_PER_TOPIC:
        raise TopicError(
            ErrorCode.INVALID_PARTITIONS, f"Number of partitions may be {MAX_PARTITIONS_PER_TOPIC} at most."
        )
    if requested.assignments is not None:
        _check_assignments(broker, requested, requested.count - now)
    return topic


def _check_assignments(broker: BrokerNode, requested: messages.CreatePartitionsTopic, added: int) -> None:
    assignments = requested.assignments or []
    if len(assignments) != added:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Attempted to add {added} additional partition(s), but only {len(assignments)} assignment(s) were "
            "specified.",
        )
    for assignment in assignments:
        check_assignment(broker, assignment.broker_ids)


# --- DeleteTopics (20): delete topics by name or id ---
_FIRST_WITH_DISABLED = 3


async def delete_topics(
    broker: BrokerNode, context: RequestContext, request: messages.DeleteTopicsRequest
) -> messages.DeleteTopicsResponse:
    requested = request.topics or [messages.DeleteTopicState(name) for name in request.topic_names]
    if not broker.settings["delete.topic.enable"]:
        has_code = context.version >= _FIRST_WITH_DISABLED
        code = ErrorCode.TOPIC_DELETION_DISABLED if has_code else ErrorCode.INVALID_REQUEST
        refused = [
            messages.DeletableTopicResult(s.name, s.topic_id, code, "Topic deletion is disabled.") for s in requested
        ]
        return messages.DeleteTopicsResponse(responses=refused)
    async with broker.topics.changes:
        return messages.DeleteTopicsResponse(responses=await _delete(broker, requested))


async def _delete(
    broker: BrokerNode, requested: list[messages.DeleteTopicState]
) -> list[messages.DeletableTopicResult]:
    turns = Turns()
    counts = Counter((state.name, state.topic_id) for state in requested)
    results: dict[tuple[str | None, bytes], messages.DeletableTopicResult] = {}
    doomed: dict[str, Topic] = {}
    for state in requested:
        key = (state.name, state.topic_id)
        try:
            if counts[key] > 1:
                what = "id" if state.name is None else "name"
                raise TopicError(ErrorCode.INVALID_REQUEST, f"Duplicate topic {what}.")
            topic = _find_doomed(broker, state)
            doomed[topic.name] = topic
            results[key] = messages.DeletableTopicResult(topic.name, topic.id)
        except TopicError as error:
            results[key] = messages.DeletableTopicResult(state.name, state.topic_id, error.code, error.message)
        await turns.next()
    topics = list(doomed.values())
    try:
        for at in range(0, len(topics), MANY):
            await turns.run(broker.topics.deletion(topics[at : at + MANY]))
    except TopicError as error:  # the disk is full, say
        for result in results.values():
            if not result.error_code and result.name is not None and broker.topics.get(result.name) is not None:
                result.error_code, result.error_message = error.code, error.message
    return list(results.values())


def _find_doomed(broker: BrokerNode, state: messages.DeleteTopicState) -> Topic:
    if state.name is not None and state.topic_id != NO_UUID:
        raise TopicError(ErrorCode.INVALID_REQUEST, "You may not specify both topic name and topic id.")
    if state.name is None and state.topic_id == NO_UUID:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Neither topic name nor id were specified.")
    if state.name is None:
        topic = broker.topics.by_id(state.topic_id)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    else:
        topic = broker.topics.get(state.name)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")
    if topic.is_internal:
        raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{topic.name} is an internal topic and cannot be deleted.")
    return topic
