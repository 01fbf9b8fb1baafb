"""UpdateFeatures (57): make other feature levels final. All of a request, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker import features
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

_UPGRADE, _SAFE_DOWNGRADE, _UNSAFE_DOWNGRADE = 1, 2, 3


def update_features(
    broker: BrokerNode, context: RequestContext, request: UpdateFeaturesRequest
) -> UpdateFeaturesResponse:
    for update in request.feature_updates:
        reason = _refusal(broker, update, _kind(update, context.version))
        if reason is not None:
            message = (
                "The update failed for all features since the following feature had an error: Invalid update version "
                f"{update.max_version_level} for feature {update.feature}. {reason}"
            )
            return UpdateFeaturesResponse(error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=message)
    levels = {update.feature: update.max_version_level for update in request.feature_updates}
    changed = {name: level for name, level in levels.items() if level != broker.settings[name]}
    if changed and not request.validate_only:
        try:
            features.finalize(broker, changed)
        except OSError as error:
            message = f"the data folder cannot be written: {error}"
            return UpdateFeaturesResponse(error_code=ErrorCode.KAFKA_STORAGE_ERROR, error_message=message)
    return UpdateFeaturesResponse(
        error_message=None, results=[UpdatableFeatureResult(name, 0, None) for name in levels]
    )


def _kind(update: FeatureUpdateKey, version: int) -> int:
    if version >= 1:
        return update.upgrade_type
    return _SAFE_DOWNGRADE if update.allow_downgrade else _UPGRADE


def _refusal(broker: BrokerNode, update: FeatureUpdateKey, kind: int) -> str | None:
    """Why a level can't become final, in Kafka's words; None if it can."""
    if kind not in (_UPGRADE, _SAFE_DOWNGRADE, _UNSAFE_DOWNGRADE):
        return "The controller does not support the given upgrade type."
    level = update.max_version_level
    if level < 0:
        return "A feature version cannot be less than 0."
    if update.feature not in features.FEATURES:
        return f"Local controller {broker.node_id} does not support this feature."
    lowest, highest = features.FEATURES[update.feature]
    if not lowest <= level <= highest:
        return f"Local controller {broker.node_id} only supports versions {lowest}-{highest}"
    current = broker.settings[update.feature]
    if level < current and kind == _UPGRADE:
        return (
            "Can't downgrade the version of this feature without setting the upgrade type to either safe or unsafe "
            "downgrade."
        )
    if level > current and kind != _UPGRADE:
        return "Can't downgrade to a newer version."
    return None
