"""FindCoordinator (10): which broker keeps a group (key type 0) or a transactional id (key type 1)."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, versions


class FindCoordinatorRequest(Struct):
    key: Annotated[str, versions("0-3")] = ""
    key_type: Annotated[int8, versions("1+")] = 0
    coordinator_keys: Annotated[list[str], versions("4+")] = []


class Coordinator(Struct):
    key: str = ""
    node_id: int32 = 0
    host: str = ""
    port: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


class FindCoordinatorResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: Annotated[int16, versions("0-3")] = 0
    error_message: Annotated[str | None, versions("1-3"), ignorable] = ""
    node_id: Annotated[int32, versions("0-3")] = 0
    host: Annotated[str, versions("0-3")] = ""
    port: Annotated[int32, versions("0-3")] = 0
    coordinators: Annotated[list[Coordinator], versions("4+")] = []


FIND_COORDINATOR = Api(10, FindCoordinatorRequest, FindCoordinatorResponse, "0-6", flexible="3+")
