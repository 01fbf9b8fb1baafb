"""AlterConfigs (33): replace all settings of a resource. IncrementalAlterConfigs (44): change some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from semel.broker import named_settings, topic_configs
from semel.broker.handlers.config_resources import BROKER, TOPIC, current_settings, replace_settings
from semel.broker.settings import Setting, SettingError, as_text, row_of
from semel.broker.topics import TopicError
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import configs as incremental
from semel.protocol.messages import configs as whole

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
_OPERATION_NAMES = {APPEND: "APPEND", SUBTRACT: "SUBTRACT"}


async def alter_configs(
    broker: BrokerNode, context: RequestContext, request: whole.AlterConfigsRequest
) -> whole.AlterConfigsResponse:
    responses = []
    turns = Turns()
    counts = Counter((r.resource_type, r.resource_name) for r in request.resources)
    for resource in request.resources:
        result = whole.AlterConfigsResourceResponse(0, None, resource.resource_type, resource.resource_name)
        try:
            _check_once(counts, resource.resource_type, resource.resource_name)
            _check_names(resource.configs)
            current_settings(broker, resource.resource_type, resource.resource_name)
            texts = {config.name: config.value or "" for config in resource.configs}
            _replace(broker, resource, texts, request.validate_only)
        except TopicError as error:
            result.error_code, result.error_message = error.code, error.message
        responses.append(result)
        await turns.next()
    return whole.AlterConfigsResponse(responses=responses)


async def incremental_alter_configs(
    broker: BrokerNode, context: RequestContext, request: incremental.IncrementalAlterConfigsRequest
) -> incremental.IncrementalAlterConfigsResponse:
    responses = []
    turns = Turns()
    counts = Counter((r.resource_type, r.resource_name) for r in request.resources)
    for resource in request.resources:
        result = incremental.AlterConfigsResourceResponse(0, None, resource.resource_type, resource.resource_name)
        try:
            _check_once(counts, resource.resource_type, resource.resource_name)
            _check_names([config for config in resource.configs if config.config_operation != DELETE])
            texts = current_settings(broker, resource.resource_type, resource.resource_name)
            for config in resource.configs:
                _apply(broker, resource.resource_type, texts, config)
            _replace(broker, resource, texts, request.validate_only)
        except TopicError as error:
            result.error_code, result.error_message = error.code, error.message
        responses.append(result)
        await turns.next()
    return incremental.IncrementalAlterConfigsResponse(responses=responses)


def _check_once(counts: Counter[tuple[int, str]], resource_type: int, name: str) -> None:
    if counts[resource_type, name] > 1:
        raise TopicError(
            ErrorCode.INVALID_REQUEST, "Each resource must appear at most once, but this one appears more often."
        )


def _check_names(configs: Sequence[whole.AlterableConfig | incremental.IncrementalConfig]) -> None:
    names = Counter(config.name for config in configs)
    doubled = sorted(name for name, count in names.items() if count > 1)
    if doubled:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys")
    null = sorted(config.name for config in configs if config.value is None)
    if null:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {', '.join(null)}")


def _replace(
    broker: BrokerNode,
    resource: whole.AlterConfigsResource | incremental.IncrementalConfigsResource,
    texts: dict[str, str],
    validate_only: bool,
) -> None:
    replace_settings(broker, resource.resource_type, resource.resource_name, texts, validate_only=validate_only)


def _apply(
    broker: BrokerNode, resource_type: int, texts: dict[str, str], change: incremental.IncrementalConfig
) -> None:
    """Changes one setting in a resource's own settings."""
    if change.config_operation == SET:
        texts[change.name] = change.value or ""
    elif change.config_operation == DELETE:
        texts.pop(change.name, None)
    elif change.config_operation in _OPERATION_NAMES:
        texts[change.name] = _changed_list(broker, resource_type, texts, change)
    else:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Unknown config operation {change.config_operation}.")


def _changed_list(
    broker: BrokerNode, resource_type: int, texts: dict[str, str], change: incremental.IncrementalConfig
) -> str:
    row = _row(resource_type, change.name)
    if row.kind != "list":
        verb = _OPERATION_NAMES[change.config_operation]
        raise TopicError(ErrorCode.INVALID_CONFIG, f"Can't {verb} to key {change.name} because its type is not LIST.")
    old = texts.get(change.name)
    if old is None:
        is_topic = resource_type == TOPIC
        old = topic_configs.default_of(broker.settings, change.name) if is_topic else as_text(row.default)
    words = [word for word in (old or "").split(",") if word]
    named = [word.strip() for word in (change.value or "").split(",") if word.strip()]
    if change.config_operation == APPEND:
        words += [word for word in named if word not in words]
    else:
        words = [word for word in words if word not in named]
    return ",".join(words)


def _row(resource_type: int, name: str) -> Setting:
    try:
        if resource_type == TOPIC:
            return topic_configs.row_of(name)
        return row_of(name) if resource_type == BROKER else named_settings.row_of(resource_type, name)
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None
