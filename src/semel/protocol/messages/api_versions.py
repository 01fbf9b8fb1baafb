"""ApiVersions (18): which APIs, versions and features a broker has. The first request of most clients."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, tag, versions


class ApiVersionsRequest(Struct):
    client_software_name: Annotated[str, versions("3+"), ignorable] = ""
    client_software_version: Annotated[str, versions("3+"), ignorable] = ""


class ApiVersion(Struct):
    api_key: int16 = 0
    min_version: int16 = 0
    max_version: int16 = 0


class SupportedFeatureKey(Struct):
    name: str = ""
    min_version: int16 = 0
    max_version: int16 = 0


class FinalizedFeatureKey(Struct):
    name: str = ""
    max_version_level: int16 = 0
    min_version_level: int16 = 0


class ApiVersionsResponse(Struct):
    error_code: int16 = 0
    api_keys: list[ApiVersion] = []
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    supported_features: Annotated[list[SupportedFeatureKey], versions("3+"), tag(0), ignorable] = []
    finalized_features_epoch: Annotated[int64, versions("3+"), tag(1), ignorable] = -1
    finalized_features: Annotated[list[FinalizedFeatureKey], versions("3+"), tag(2), ignorable] = []
    zk_migration_ready: Annotated[bool, versions("3+"), tag(3), ignorable] = False


API_VERSIONS = Api(18, ApiVersionsRequest, ApiVersionsResponse, "0-4", flexible="3+")
