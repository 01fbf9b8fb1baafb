"""ListConfigResources (74): what has settings. Version 0 lists client metrics subscriptions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker import named_settings
from semel.broker.handlers.config_resources import BROKER, BROKER_LOGGER, TOPIC
from semel.broker.named_settings import CLIENT_METRICS, GROUP
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.configs import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

_KNOWN = {TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP}


def list_config_resources(
    broker: BrokerNode, context: RequestContext, request: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    asked = {CLIENT_METRICS} if context.version == 0 else set(request.resource_types) or _KNOWN
    if asked - _KNOWN:
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    found = []
    if TOPIC in asked:
        found += [ConfigResource(topic.name, TOPIC) for topic in broker.topics]
    if BROKER in asked:
        found.append(ConfigResource(str(broker.node_id), BROKER))
    for kind in named_settings.KINDS.keys() & asked:
        found += [ConfigResource(name, kind) for name in named_settings.names(broker.store, kind)]
    return ListConfigResourcesResponse(config_resources=found)
