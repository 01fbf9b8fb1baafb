"""What the cluster is and can: ApiVersions (18), UpdateFeatures (57), DescribeQuorum (55), UnregisterBroker (64)."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from functools import cache

from semel.broker import features
from semel.broker.broker import BrokerNode
from semel.broker.dispatch import TABLE, RequestContext
from semel.broker.features import FEATURES
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import cluster as messages
from semel.protocol.schema import NO_UUID

# --- ApiVersions (18): which APIs, versions and features the broker has ---
_NEEDED_FOR = {"group.version": 68, "transaction.version": 22}  # a level is only final where its APIs are served
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?\Z")


def api_versions(
    broker: BrokerNode, context: RequestContext, request: messages.ApiVersionsRequest
) -> messages.ApiVersionsResponse:
    software = (request.client_software_name, request.client_software_version)
    if context.version >= 3 and not all(map(_SOFTWARE.match, software)):
        return messages.ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    return messages.ApiVersionsResponse(
        api_keys=_api_keys(broker.settings["transaction.two.phase.commit.enable"]),
        supported_features=[
            messages.SupportedFeatureKey(name, max(lowest, 0 if context.version >= 4 else 1), highest)
            for name, (lowest, highest) in FEATURES.items()
        ],
        finalized_features_epoch=features.epoch(broker),
        finalized_features=[
            messages.FinalizedFeatureKey(name, broker.settings[name], broker.settings[name])
            for name in FEATURES
            if broker.settings[name] > 0 and _NEEDED_FOR[name] in TABLE
        ],
    )


def refuse_version(version: int) -> messages.ApiVersionsResponse:
    """To a client whose request has a version from the future, in the format of version 0: which one it may use."""
    row = TABLE[messages.API_VERSIONS.key]
    return messages.ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[messages.ApiVersion(row.key, row.min_version, row.max_version)],
    )


@cache
def _api_keys(has_two_phase_commit: bool) -> list[messages.ApiVersion]:
    """The setting is the only one that changes what is served."""
    rows = (row.with_settings(lambda _: has_two_phase_commit) for row in TABLE.values())
    return [messages.ApiVersion(row.key, row.min_version, row.max_version) for row in rows]


# --- UpdateFeatures (57): make other feature levels final. All of a request, or none ---
_UPGRADE, _SAFE_DOWNGRADE, _UNSAFE_DOWNGRADE = 1, 2, 3


def update_features(
    broker: BrokerNode, context: RequestContext, request: messages.UpdateFeaturesRequest
) -> messages.UpdateFeaturesResponse:
    for update in request.feature_updates:
        kind = update.upgrade_type
        if context.version == 0:
            kind = _SAFE_DOWNGRADE if update.allow_downgrade else _UPGRADE
        reason = _refusal(broker, update, kind)
        if reason is not None:
            message = (
                "The update failed for all features since the following feature had an error: Invalid update version "
                f"{update.max_version_level} for feature {update.feature}. {reason}"
            )
            return messages.UpdateFeaturesResponse(error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=message)
    levels = {update.feature: update.max_version_level for update in request.feature_updates}
    changed = {name: level for name, level in levels.items() if level != broker.settings[name]}
    if changed and not request.validate_only:
        try:
            features.finalize(broker, changed)
        except OSError as error:
            message = f"the data folder cannot be written: {error}"
            return messages.UpdateFeaturesResponse(error_code=ErrorCode.KAFKA_STORAGE_ERROR, error_message=message)
    return messages.UpdateFeaturesResponse(
        error_message=None, results=[messages.UpdatableFeatureResult(name, 0, None) for name in levels]
    )


def _refusal(broker: BrokerNode, update: messages.FeatureUpdateKey, kind: int) -> str | None:
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


# --- DescribeQuorum (55), UnregisterBroker (64): the controllers are this node alone, and its store is their log ---
_METADATA_TOPIC = "__cluster_metadata"
_FIRST_WITH_FOLDERS = 2


async def describe_quorum(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeQuorumRequest
) -> messages.DescribeQuorumResponse:
    requested = [(topic.topic_name, part.partition_index) for topic in request.topics for part in topic.partitions]
    if requested != [(_METADATA_TOPIC, 0)]:
        turns = Turns()
        topics = [
            messages.TopicDataResult(topic.topic_name, await turns.map(_unknown, topic.partitions))
            for topic in request.topics
        ]
        return messages.DescribeQuorumResponse(topics=topics)
    end, now_ms = broker.store.size_bytes, broker.clock.now_ms()
    names_folders = context.version >= _FIRST_WITH_FOLDERS
    voter = messages.QuorumReplicaState(
        broker.node_id, _directory_id(broker) if names_folders else NO_UUID, end, now_ms, now_ms
    )
    partition = messages.PartitionDataResult(
        0, 0, None, leader_id=broker.node_id, leader_epoch=broker.store.starts, high_watermark=end
    )
    partition.current_voters = [voter]
    host, port = broker.address_for(context)
    return messages.DescribeQuorumResponse(
        topics=[messages.TopicDataResult(_METADATA_TOPIC, [partition])],
        nodes=[messages.Node(broker.node_id, [messages.Listener("PLAINTEXT", host, port)])] if names_folders else [],
    )


def _unknown(requested: messages.QuorumPartition) -> messages.PartitionDataResult:
    return messages.PartitionDataResult(requested.partition_index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)


def _directory_id(broker: BrokerNode) -> bytes:
    text = broker.data_dir.properties().get("directory.id")
    return urlsafe_b64decode(text + "==") if text else NO_UUID


def unregister_broker(
    broker: BrokerNode, context: RequestContext, request: messages.UnregisterBrokerRequest
) -> messages.UnregisterBrokerResponse:
    if request.broker_id == broker.node_id:
        message = f"Broker {broker.node_id} is the only one there is."
        return messages.UnregisterBrokerResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=message)
    message = f"Broker ID {request.broker_id} is not currently registered"
    return messages.UnregisterBrokerResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=message)
