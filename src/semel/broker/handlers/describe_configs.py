"""DescribeConfigs (32): read the settings of topics, brokers, groups and client metrics subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker import describe_settings
from semel.broker.describe_settings import DescribedConfig
from semel.broker.handlers.config_resources import BROKER, TOPIC, check_named, find_topic, is_whole_cluster
from semel.broker.topics import TopicError
from semel.broker.turns import Turns
from semel.protocol.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext


async def describe_configs(
    broker: BrokerNode, context: RequestContext, request: DescribeConfigsRequest
) -> DescribeConfigsResponse:
    results = await Turns().map(lambda resource: _describe(broker, resource, request), request.resources)
    return DescribeConfigsResponse(results=results)


def _describe(
    broker: BrokerNode, resource: DescribeConfigsResource, request: DescribeConfigsRequest
) -> DescribeConfigsResult:
    result = DescribeConfigsResult(resource_type=resource.resource_type, resource_name=resource.resource_name)
    try:
        result.configs = [_result(entry, request) for entry in _entries(broker, resource)]
    except TopicError as error:
        result.error_code, result.error_message = error.code, error.message
    return result


def _entries(broker: BrokerNode, resource: DescribeConfigsResource) -> list[DescribedConfig]:
    names = resource.configuration_keys
    if resource.resource_type == TOPIC:
        return describe_settings.of_topic(broker, find_topic(broker, resource.resource_name), names)
    if resource.resource_type == BROKER:
        describe = describe_settings.of_cluster if is_whole_cluster(broker, resource.resource_name) else None
        return (describe or describe_settings.of_broker)(broker, names)
    check_named(resource.resource_type, resource.resource_name)
    return describe_settings.of_named(broker, resource.resource_type, resource.resource_name, names)


def _result(entry: DescribedConfig, request: DescribeConfigsRequest) -> DescribeConfigsResourceResult:
    synonyms = []
    if request.include_synonyms:
        synonyms = [DescribeConfigsSynonym(o.name, o.shown, o.source) for o in entry.origins]
    return DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.is_read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        synonyms=synonyms,
        config_type=entry.type,
        documentation=entry.doc if request.include_documentation else None,
    )
