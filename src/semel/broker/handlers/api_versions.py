"""ApiVersions (18): which APIs, versions and features the broker has."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from semel.broker import features
from semel.broker.features import FEATURES
from semel.broker.table import TABLE
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

import re

_NEEDED_FOR = {"group.version": 68, "transaction.version": 22}  # a level is only final where its APIs are served
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?\Z")


def api_versions(broker: BrokerNode, context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    if context.version >= 3 and not _is_valid(request):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    return ApiVersionsResponse(
        api_keys=_api_keys(),
        supported_features=[
            SupportedFeatureKey(name, max(lowest, 0 if context.version >= 4 else 1), highest)
            for name, (lowest, highest) in FEATURES.items()
        ],
        finalized_features_epoch=features.epoch(broker),
        finalized_features=[
            FinalizedFeatureKey(name, broker.settings[name], broker.settings[name])
            for name in FEATURES
            if broker.settings[name] > 0 and _NEEDED_FOR[name] in TABLE
        ],
    )


def refuse_version(version: int) -> ApiVersionsResponse:
    """To a client that asked in a version from the future, in the format of version 0: which one it may use."""
    row = TABLE[API_VERSIONS.key]
    return ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=[ApiVersion(row.key, row.min_version, row.max_version)]
    )


@cache
def _api_keys() -> list[ApiVersion]:
    return [ApiVersion(row.key, row.min_version, row.max_version) for row in TABLE.values()]


def _is_valid(request: ApiVersionsRequest) -> bool:
    return bool(_SOFTWARE.match(request.client_software_name) and _SOFTWARE.match(request.client_software_version))
