"""What consumers hand each other inside JoinGroup and SyncGroup: subscriptions and assignments."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Format
from semel.protocol.schema import Struct, ignorable, int32, versions


class TopicPartition(Struct):
    topic: str = ""
    partitions: list[int32] = []


class ConsumerProtocolSubscription(Struct):
    """What a member wants, and what it owns."""

    topics: list[str] = []
    user_data: bytes | None = None
    owned_partitions: Annotated[list[TopicPartition], versions("1+"), ignorable] = []
    generation_id: Annotated[int32, versions("2+"), ignorable] = -1
    rack_id: Annotated[str | None, versions("3+"), ignorable] = None


class ConsumerProtocolAssignment(Struct):
    """What a member is given."""

    assigned_partitions: list[TopicPartition] = []
    user_data: bytes | None = None


CONSUMER_SUBSCRIPTION = Format(ConsumerProtocolSubscription, "0-3")
CONSUMER_ASSIGNMENT = Format(ConsumerProtocolAssignment, "0-3")
