"""IncrementalAlterConfigs (44): change single settings of topics and brokers."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


class AlterableConfig(Struct):
    name: str = ""
    config_operation: int8 = 0
    value: str | None = ""


class AlterConfigsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    configs: list[AlterableConfig] = []


class IncrementalAlterConfigsRequest(Struct):
    resources: list[AlterConfigsResource] = []
    validate_only: bool = False


class AlterConfigsResourceResponse(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    resource_type: int8 = 0
    resource_name: str = ""


class IncrementalAlterConfigsResponse(Struct):
    throttle_time_ms: int32 = 0
    responses: list[AlterConfigsResourceResponse] = []


INCREMENTAL_ALTER_CONFIGS = Api(
    44, IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse, "0-1", flexible="1+"
)
