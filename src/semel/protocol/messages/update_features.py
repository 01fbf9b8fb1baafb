"""UpdateFeatures (57): finalise feature levels."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, versions


class FeatureUpdateKey(Struct):
    feature: str = ""
    max_version_level: int16 = 0
    allow_downgrade: Annotated[bool, versions("0")] = False
    upgrade_type: Annotated[int8, versions("1+")] = 1


class UpdateFeaturesRequest(Struct):
    timeout_ms: int32 = 60000
    feature_updates: list[FeatureUpdateKey] = []
    validate_only: Annotated[bool, versions("1+")] = False


class UpdatableFeatureResult(Struct):
    feature: str = ""
    error_code: int16 = 0
    error_message: str | None = ""


class UpdateFeaturesResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    results: Annotated[list[UpdatableFeatureResult], versions("0-1"), ignorable] = []


UPDATE_FEATURES = Api(57, UpdateFeaturesRequest, UpdateFeaturesResponse, "0-2", flexible="0+")
