"""ListConfigResources (74): which resources have settings."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, versions


class ListConfigResourcesRequest(Struct):
    resource_types: Annotated[list[int8], versions("1+")] = []


class ConfigResource(Struct):
    resource_name: str = ""
    resource_type: Annotated[int8, versions("1+"), ignorable] = 16


class ListConfigResourcesResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    config_resources: list[ConfigResource] = []


LIST_CONFIG_RESOURCES = Api(74, ListConfigResourcesRequest, ListConfigResourcesResponse, "0-1", flexible="0+")
