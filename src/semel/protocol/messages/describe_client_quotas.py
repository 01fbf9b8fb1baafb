"""DescribeClientQuotas (48): read quotas."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, float64, int8, int16, int32


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
