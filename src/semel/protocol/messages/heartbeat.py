"""Heartbeat (12): stay a member of a group, and hear of rebalances."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


class HeartbeatRequest(Struct):
    group_id: str = ""
    generation_id: int32 = 0
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None


class HeartbeatResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0


HEARTBEAT = Api(12, HeartbeatRequest, HeartbeatResponse, "0-4", flexible="4+")
