"""Replicas and their folders. There is one broker with one folder, so there is one right answer."""

from __future__ import annotations

import os
from functools import partial

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.topics import TopicError
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import topics as messages


# --- Replica assignments that clients name by hand. There is one broker, so there is one right answer ---
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
    """Every leader is the only replica already; asked for all partitions, there is nothing to report."""
    topics = ((topic.topic, topic.partitions) for topic in request.topic_partitions or [])
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
    broker: BrokerNode, topic: str, ask: messages.ReassignablePartition
) -> messages.ReassignablePartitionResponse:
    try:
        if broker.topics.partition(topic, ask.partition_index) is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find a topic named {topic}.")
        if ask.replicas is None:
            raise TopicError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None)
        check_assignment(broker, ask.replicas)
    except TopicError as error:
        return messages.ReassignablePartitionResponse(ask.partition_index, error.code, error.message)
    return messages.ReassignablePartitionResponse(ask.partition_index, ErrorCode.NONE, None)


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
        asked = {topic.name: [part.index for part in topic.partitions] for topic in broker.topics}
    else:
        asked = {topic.topic: topic.partitions for topic in request.topics}
    topics = []
    turns = Turns()
    for name, indexes in asked.items():
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
