"""Settings of topics, brokers and groups, and client quotas."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, float64, ignorable, int8, int16, int32, versions


# DescribeConfigs (32): read the settings of topics and brokers.
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


# AlterConfigs (33): replace all settings of topics and brokers.
class AlterableConfig(Struct):
    name: str = ""
    value: str | None = ""


class AlterConfigsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    configs: list[AlterableConfig] = []


class AlterConfigsRequest(Struct):
    resources: list[AlterConfigsResource] = []
    validate_only: bool = False


class AlterConfigsResourceResponse(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    resource_type: int8 = 0
    resource_name: str = ""


class AlterConfigsResponse(Struct):
    throttle_time_ms: int32 = 0
    responses: list[AlterConfigsResourceResponse] = []


ALTER_CONFIGS = Api(33, AlterConfigsRequest, AlterConfigsResponse, "0-2", flexible="2+")


# IncrementalAlterConfigs (44): change single settings of topics and brokers.
class IncrementalConfig(Struct):
    name: str = ""
    config_operation: int8 = 0
    value: str | None = ""


class IncrementalConfigsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    configs: list[IncrementalConfig] = []


class IncrementalAlterConfigsRequest(Struct):
    resources: list[IncrementalConfigsResource] = []
    validate_only: bool = False


class IncrementalAlterConfigsResponse(Struct):
    throttle_time_ms: int32 = 0
    responses: list[AlterConfigsResourceResponse] = []


INCREMENTAL_ALTER_CONFIGS = Api(
    44, IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse, "0-1", flexible="1+"
)


# ListConfigResources (74): which resources have settings.
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


# DescribeClientQuotas (48): read quotas.
class ComponentData(Struct):
    entity_type: str = ""
    match_type: int8 = 0
    match: str | None = ""


class DescribeClientQuotasRequest(Struct):
    components: list[ComponentData] = []
    strict: bool = False


class EntityData(Struct):
    entity_type: str = ""
    entity_name: str | None = ""


class ValueData(Struct):
    key: str = ""
    value: float64 = 0.0


class EntryData(Struct):
    entity: list[EntityData] = []
    values: list[ValueData] = []


class DescribeClientQuotasResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    entries: list[EntryData] | None = []


DESCRIBE_CLIENT_QUOTAS = Api(48, DescribeClientQuotasRequest, DescribeClientQuotasResponse, "0-1", flexible="1+")


# AlterClientQuotas (49): change quotas.
class OpData(Struct):
    key: str = ""
    value: float64 = 0.0
    remove: bool = False


class AlterEntryData(Struct):
    entity: list[EntityData] = []
    ops: list[OpData] = []


class AlterClientQuotasRequest(Struct):
    entries: list[AlterEntryData] = []
    validate_only: bool = False


class EntryDataResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    entity: list[EntityData] = []


class AlterClientQuotasResponse(Struct):
    throttle_time_ms: int32 = 0
    entries: list[EntryDataResult] = []


ALTER_CLIENT_QUOTAS = Api(49, AlterClientQuotasRequest, AlterClientQuotasResponse, "0-1", flexible="1+")
