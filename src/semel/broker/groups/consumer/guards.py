"""What a heartbeat must be like to be listened to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from semel.broker.expressions import ExpressionError
from semel.broker.groups.consumer.model import LEFT_FOR_A_WHILE, Current, Partitions
from semel.broker.groups.consumer.patterns import compile_pattern
from semel.broker.groups.group import GroupError
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import ConsumerGroupHeartbeatRequest

JOINS = 0  # the member epoch of a heartbeat that joins


class Beat(NamedTuple):
    """A heartbeat and who sent it."""

    request: ConsumerGroupHeartbeatRequest
    client_id: str
    client_host: str

    @property
    def owned(self) -> Partitions | None:
        """What the member says that it has; None: it did not say."""
        topics = self.request.topic_partitions
        return None if topics is None else frozenset((t.topic_id, index) for t in topics for index in t.partitions)

    @property
    def is_full(self) -> bool:
        """Whether the member told everything about itself, as it does when it joins or is not sure what we know."""
        request = self.request
        named = request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None
        told = request.rebalance_timeout_ms != -1 and request.topic_partitions is not None
        return request.member_epoch == JOINS or (named and told)


def check_request(request: ConsumerGroupHeartbeatRequest, version: int, assignors: Iterable[str]) -> None:
    """Raises GroupError unless the request makes sense by itself."""
    problem = _problem(request, version)
    if problem is not None:
        raise GroupError(ErrorCode.INVALID_REQUEST, problem)
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise GroupError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )
    if request.subscribed_topic_regex:
        try:
            compile_pattern(request.subscribed_topic_regex)
        except ExpressionError as error:
            raise GroupError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"SubscribedTopicRegex `{request.subscribed_topic_regex}` is not a valid regular expression: {error}.",
            ) from error


def _problem(request: ConsumerGroupHeartbeatRequest, version: int) -> str | None:
    epoch = request.member_epoch
    for name, value in (
        ("GroupId", request.group_id),
        ("InstanceId", request.instance_id),
        ("RackId", request.rack_id),
    ):
        if value is not None and not value.strip():
            return f"{name} can't be empty."
    if not request.member_id and (epoch != JOINS or version >= 1):
        return "MemberId can't be empty."
    if epoch == LEFT_FOR_A_WHILE and request.instance_id is None:
        return "InstanceId can't be null."
    if epoch < LEFT_FOR_A_WHILE:
        return f"MemberEpoch is {epoch}, but must be greater than or equal to -2."
    return _problem_with_joining(request) if epoch == JOINS else None


def _problem_with_joining(request: ConsumerGroupHeartbeatRequest) -> str | None:
    if request.rebalance_timeout_ms == -1:
        return "RebalanceTimeoutMs must be provided in first request."
    if request.topic_partitions is None or request.topic_partitions:
        return "TopicPartitions must be empty when (re-)joining."
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        return "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
    return None


def check_instance(known: str | None, member_id: str, instance_id: str) -> None:
    if known is None:
        raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {instance_id} is unknown.")
    if known != member_id:
        raise GroupError(
            ErrorCode.FENCED_INSTANCE_ID,
            f"Static member {member_id} with instance id {instance_id} was fenced by {known}.",
        )


def check_epoch(current: Current, beat: Beat) -> None:
    """The epoch must be the member's; the one before it passes where the answer with the new one may have been lost."""
    epoch, owned = beat.request.member_epoch, beat.owned
    if epoch == current.epoch or epoch == JOINS:
        return
    lost_answer = epoch == current.previous_epoch and owned is not None and owned <= current.assigned
    if epoch > current.epoch or not lost_answer:
        raise GroupError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The member has epoch {epoch}, the coordinator knows it at {current.epoch}. "
            "The member must abandon all its partitions and rejoin.",
        )
