"""AlterClientQuotas (49): change quotas."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, float64, int16, int32


class EntityData(Struct):
    entity_type: str = ""
    entity_name: str | None = ""


class OpData(Struct):
    key: str = ""
    value: float64 = 0.0
    remove: bool = False


class EntryData(Struct):
    entity: list[EntityData] = []
    ops: list[OpData] = []


class AlterClientQuotasRequest(Struct):
    entries: list[EntryData] = []
    validate_only: bool = False


class EntityDataResult(Struct):
    entity_type: str = ""
    entity_name: str | None = ""


class EntryDataResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    entity: list[EntityDataResult] = []


class AlterClientQuotasResponse(Struct):
    throttle_time_ms: int32 = 0
    entries: list[EntryDataResult] = []


ALTER_CLIENT_QUOTAS = Api(49, AlterClientQuotasRequest, AlterClientQuotasResponse, "0-1", flexible="1+")
