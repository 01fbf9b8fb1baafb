"""The records of `__consumer_offsets`: positions of groups, and the groups themselves."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Format
from semel.protocol.schema import NO_UUID, Struct, ignorable, int32, int64, tag, uuid, versions


class OffsetCommitKey(Struct):
    """Which group, topic and partition a position belongs to (key versions 0 and 1)."""

    group: str = ""
    topic: str = ""
    partition: int32 = 0


class OffsetCommitValue(Struct):
    """A committed position."""

    offset: int64 = 0
    leader_epoch: Annotated[int32, versions("3+"), ignorable] = -1
    metadata: str = ""
    commit_timestamp: int64 = 0
    expire_timestamp: Annotated[int64, versions("1"), ignorable] = -1
    topic_id: Annotated[uuid, versions("4+"), tag(0), ignorable] = NO_UUID


class GroupMetadataKey(Struct):
    """Which classic group a record is about (key version 2)."""

    group: str = ""


class MemberMetadata(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+"), ignorable] = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout: Annotated[int32, versions("1+"), ignorable] = -1
    session_timeout: int32 = 0
    subscription: bytes = b""
    assignment: bytes = b""


class GroupMetadataValue(Struct):
    """A generation of a classic group: protocol, leader and members."""

    protocol_type: str = ""
    generation: int32 = 0
    protocol: str | None = ""
    leader: str | None = ""
    current_state_timestamp: Annotated[int64, versions("2+"), ignorable] = -1
    members: list[MemberMetadata] = []


OFFSET_COMMIT_KEY = Format(OffsetCommitKey, "0")
OFFSET_COMMIT_VALUE = Format(OffsetCommitValue, "0-4", flexible="4+")
GROUP_METADATA_KEY = Format(GroupMetadataKey, "0")
GROUP_METADATA_VALUE = Format(GroupMetadataValue, "0-4", flexible="4+")
