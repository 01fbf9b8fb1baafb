"""SyncGroup (14): hand in (the leader) and receive (everyone) a generation's assignment."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


class SyncGroupRequestAssignment(Struct):
    member_id: str = ""
    assignment: bytes = b""


class SyncGroupRequest(Struct):
    group_id: str = ""
    generation_id: int32 = 0
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None
    protocol_type: Annotated[str | None, versions("5+"), ignorable] = None
    protocol_name: Annotated[str | None, versions("5+"), ignorable] = None
    assignments: list[SyncGroupRequestAssignment] = []


class SyncGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    protocol_type: Annotated[str | None, versions("5+"), ignorable] = None
    protocol_name: Annotated[str | None, versions("5+"), ignorable] = None
    assignment: bytes = b""


SYNC_GROUP = Api(14, SyncGroupRequest, SyncGroupResponse, "0-5", flexible="4+")
