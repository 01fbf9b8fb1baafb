"""DescribeConfigs (32): read the settings of topics and brokers."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, versions


class DescribeConfigsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    configuration_keys: list[str] | None = []


class DescribeConfigsRequest(Struct):
    resources: list[DescribeConfigsResource] = []
    include_synonyms: bool = False
    include_documentation: Annotated[bool, versions("3+")] = False


class DescribeConfigsSynonym(Struct):
    name: str = ""
    value: str | None = ""
    source: int8 = 0


class DescribeConfigsResourceResult(Struct):
    name: str = ""
    value: str | None = ""
    read_only: bool = False
    config_source: int8 = -1
    is_sensitive: bool = False
    synonyms: list[DescribeConfigsSynonym] = []
    config_type: Annotated[int8, versions("3+"), ignorable] = 0
    documentation: Annotated[str | None, versions("3+"), ignorable] = ""


class DescribeConfigsResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    resource_type: int8 = 0
    resource_name: str = ""
    configs: list[DescribeConfigsResourceResult] = []


class DescribeConfigsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[DescribeConfigsResult] = []


DESCRIBE_CONFIGS = Api(32, DescribeConfigsRequest, DescribeConfigsResponse, "1-4", flexible="4+")
