"""Replica assignments that clients name by hand. There is one broker, so there is one right answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.topics import TopicError
from semel.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode


def check_assignment(broker: BrokerNode, replicas: list[int]) -> None:
    """Raises TopicError unless a partition can live on these brokers."""
    if not replicas:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "The manual partition assignment includes an empty replica list."
        )
    for replica in replicas:
        if replica != broker.node_id:
            raise TopicError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes broker {replica}, but no such broker is registered.",
            )
    if len(replicas) > 1:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"The manual partition assignment includes the broker {broker.node_id} more than once.",
        )
