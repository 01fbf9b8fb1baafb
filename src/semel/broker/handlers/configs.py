"""Settings of topics, the broker, groups and client metrics: DescribeConfigs (32), AlterConfigs (33),
IncrementalAlterConfigs (44), ListConfigResources (74)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from semel.broker import resource_settings
from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.quotas import CLIENT_ID, CONSUMER_BYTE_RATE, IP, PRODUCER_BYTE_RATE, USER, Entity
from semel.broker.resource_settings import CLIENT_METRICS, GROUP, DescribedConfig
from semel.broker.settings import MIN_INSYNC_REPLICAS, TABLE, Setting, SettingError, as_text, parse_dynamic, row_of
from semel.broker.topics import Topic, TopicError, check_configs, check_name
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import configs as messages

# --- How requests name what has settings; how settings are replaced ---
TOPIC, BROKER, BROKER_LOGGER = 2, 4, 8
_NAMELESS = {
    GROUP: "Default group resources are not allowed.",
    CLIENT_METRICS: "Subscription name can't be empty",
}


def find_topic(broker: BrokerNode, name: str) -> Topic:
    check_name(name)
    topic = broker.topics.get(name)
    if topic is None:
        raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    return topic


def is_whole_cluster(broker: BrokerNode, name: str) -> bool:
    """Whether a broker resource stands for all brokers (the empty name) or for this one."""
    if not name:
        return True
    if not name.removeprefix("-").isdecimal():
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Node id must be an integer, but it is: {name}")
    if int(name) != broker.node_id:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {broker.node_id} or empty string, but received {name}",
        )
    return False


def current_settings(broker: BrokerNode, resource_type: int, name: str) -> dict[str, str]:
    """What was set for a resource itself, without any defaults."""
    if resource_type == TOPIC:
        if not name:
            raise TopicError(ErrorCode.INVALID_REQUEST, "Default topic resources are not allowed.")
        return dict(find_topic(broker, name).configs)
    if resource_type == BROKER:
        return broker.altered_settings(for_cluster=is_whole_cluster(broker, name))
    check_named(resource_type, name)
    return resource_settings.own_settings(broker.store, resource_type, name)


def check_named(resource_type: int, name: str) -> None:
    """TopicError unless it is the name of a group or of a client metrics subscription."""
    if resource_type not in _NAMELESS:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Resource type {resource_type} has no settings here.")
    if not name:
        raise TopicError(ErrorCode.INVALID_REQUEST, _NAMELESS[resource_type])


def replace_settings(
    broker: BrokerNode, resource_type: int, name: str, texts: dict[str, str], *, validate_only: bool
) -> None:
    """Sets exactly these. TopicError: nothing changed."""
    if resource_type == TOPIC:
        topic = find_topic(broker, name)
        check_configs(texts)
        accept_topic_settings(broker, texts)
        if not validate_only:
            broker.topics.set_configs(topic, texts)
    elif resource_type == BROKER:
        _replace_brokers(broker, name, texts, validate_only=validate_only)
    else:
        _replace_named(broker, resource_type, name, texts, validate_only=validate_only)


def accept_topic_settings(broker: BrokerNode, texts: Mapping[str, str]) -> None:
    """Of settings that were checked: those without effect are logged, or refused where the broker is strict."""
    try:
        broker.settings.accept(map(resource_settings.topic_row, texts))
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None


def _replace_named(
    broker: BrokerNode, resource_type: int, name: str, texts: dict[str, str], *, validate_only: bool
) -> None:
    try:
        resource_settings.check_named_settings(broker.settings, resource_type, texts)
        if not validate_only:
            resource_settings.replace_named_settings(broker.store, resource_type, name, texts)
    except SettingError as error:
        raise TopicError(resource_settings.KINDS[resource_type].refusal, str(error)) from None
    except OSError as error:
        raise TopicError(ErrorCode.KAFKA_STORAGE_ERROR, f"the data folder cannot be written: {error}") from error


def _replace_brokers(broker: BrokerNode, name: str, texts: dict[str, str], *, validate_only: bool) -> None:
    for_cluster = is_whole_cluster(broker, name)
    fixed = sorted(setting for setting in texts if setting in TABLE and not TABLE[setting].dynamic)
    if fixed:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Cannot update these configs dynamically: [{', '.join(fixed)}]")
    if for_cluster != (MIN_INSYNC_REPLICAS in texts):
        refusal = "Cluster-level {} cannot be removed" if for_cluster else "Broker-level {} cannot be altered"
        message = f"{refusal.format(MIN_INSYNC_REPLICAS)} while ELR is enabled."  # as in every new Kafka cluster
        raise TopicError(ErrorCode.INVALID_CONFIG, message)
    try:
        rows = list(map(row_of, texts))
        try:
            parse_dynamic(texts)
        except SettingError as error:
            raise TopicError(ErrorCode.INVALID_REQUEST, str(error)) from None
        broker.settings.accept(rows)
        if not validate_only:
            broker.alter_settings(texts, for_cluster=for_cluster)
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None


# --- DescribeConfigs (32): read the settings of topics, brokers, groups and client metrics subscriptions ---
async def describe_configs(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeConfigsRequest
) -> messages.DescribeConfigsResponse:
    results = await Turns().map(lambda resource: _describe(broker, resource, request), request.resources)
    return messages.DescribeConfigsResponse(results=results)


def _describe(
    broker: BrokerNode, resource: messages.DescribeConfigsResource, request: messages.DescribeConfigsRequest
) -> messages.DescribeConfigsResult:
    result = messages.DescribeConfigsResult(resource_type=resource.resource_type, resource_name=resource.resource_name)
    try:
        result.configs = [_result(entry, request) for entry in _entries(broker, resource)]
    except TopicError as error:
        result.error_code, result.error_message = error.code, error.message
    return result


def _entries(broker: BrokerNode, resource: messages.DescribeConfigsResource) -> list[DescribedConfig]:
    names = resource.configuration_keys
    if resource.resource_type == TOPIC:
        return resource_settings.describe_topic(broker, find_topic(broker, resource.resource_name), names)
    if resource.resource_type == BROKER:
        is_whole = is_whole_cluster(broker, resource.resource_name)
        describe = resource_settings.describe_cluster_settings if is_whole else resource_settings.describe_broker
        return describe(broker, names)
    if resource.resource_type == BROKER_LOGGER:
        if is_whole_cluster(broker, resource.resource_name):
            raise TopicError(ErrorCode.INVALID_REQUEST, "Broker id must not be empty")
        return [entry for entry in _loggers() if not names or entry.name in names]
    check_named(resource.resource_type, resource.resource_name)
    return resource_settings.describe_named(broker, resource.resource_type, resource.resource_name, names)


_SOURCE_LOGGER, _STRING = 6, 2
_KAFKAS_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def _loggers() -> list[DescribedConfig]:
    """The levels of the broker's loggers. Clients cannot change them."""
    root = logging.getLogger()
    known = {"root": root} | {
        name: logger
        for name, logger in root.manager.loggerDict.items()
        if name.partition(".")[0] == "semel" and isinstance(logger, logging.Logger)
    }
    levels = {name: logging.getLevelName(logger.getEffectiveLevel()) for name, logger in known.items()}
    return [
        DescribedConfig(name, _KAFKAS_LEVELS.get(level, level), _SOURCE_LOGGER, True, [], _STRING, "", False)
        for name, level in sorted(levels.items())
    ]


def _result(entry: DescribedConfig, request: messages.DescribeConfigsRequest) -> messages.DescribeConfigsResourceResult:
    synonyms = []
    if request.include_synonyms:
        synonyms = [messages.DescribeConfigsSynonym(o.name, o.shown, o.source) for o in entry.origins]
    return messages.DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.is_read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        synonyms=synonyms,
        config_type=entry.type,
        documentation=entry.doc if request.include_documentation else None,
    )


# --- AlterConfigs (33): replace all settings of a resource. IncrementalAlterConfigs (44): change some ---
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
_OPERATION_NAMES = {APPEND: "APPEND", SUBTRACT: "SUBTRACT"}

Resource = TypeVar("Resource", messages.AlterConfigsResource, messages.IncrementalConfigsResource)


async def alter_configs(
    broker: BrokerNode, context: RequestContext, request: messages.AlterConfigsRequest
) -> messages.AlterConfigsResponse:
    def texts_of(resource: messages.AlterConfigsResource) -> dict[str, str]:
        _check_names(resource.configs)
        current_settings(broker, resource.resource_type, resource.resource_name)
        return {config.name: config.value or "" for config in resource.configs}

    return messages.AlterConfigsResponse(
        responses=await _alter(broker, request.resources, texts_of, request.validate_only)
    )


async def incremental_alter_configs(
    broker: BrokerNode, context: RequestContext, request: messages.IncrementalAlterConfigsRequest
) -> messages.IncrementalAlterConfigsResponse:
    def texts_of(resource: messages.IncrementalConfigsResource) -> dict[str, str]:
        _check_names(resource.configs)
        texts = current_settings(broker, resource.resource_type, resource.resource_name)
        for config in resource.configs:
            _apply(broker, resource.resource_type, texts, config)
        return texts

    return messages.IncrementalAlterConfigsResponse(
        responses=await _alter(broker, request.resources, texts_of, request.validate_only)
    )


async def _alter(
    broker: BrokerNode,
    resources: Sequence[Resource],
    texts_of: Callable[[Resource], dict[str, str]],
    validate_only: bool,
) -> list[messages.AlterConfigsResourceResponse]:
    """Gives each resource the settings that `texts_of` returns; one that is refused does not keep the others."""
    responses = []
    turns = Turns()
    counts = Counter((resource.resource_type, resource.resource_name) for resource in resources)
    for resource in resources:
        kind, name = resource.resource_type, resource.resource_name
        result = messages.AlterConfigsResourceResponse(0, None, kind, name)
        try:
            if counts[kind, name] > 1:
                message = "Each resource must appear at most once."
                raise TopicError(ErrorCode.INVALID_REQUEST, message)
            replace_settings(broker, kind, name, texts_of(resource), validate_only=validate_only)
        except TopicError as error:
            result.error_code, result.error_message = error.code, error.message
        responses.append(result)
        await turns.next()
    return responses


def _check_names(configs: Sequence[messages.AlterableConfig | messages.IncrementalConfig]) -> None:
    names = Counter(config.name for config in configs)
    doubled = sorted(name for name, count in names.items() if count > 1)
    if doubled:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys")
    null = sorted(config.name for config in configs if config.value is None and not _deletes(config))
    if null:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {', '.join(null)}")


def _deletes(config: messages.AlterableConfig | messages.IncrementalConfig) -> bool:
    return isinstance(config, messages.IncrementalConfig) and config.config_operation == DELETE


def _apply(broker: BrokerNode, resource_type: int, texts: dict[str, str], change: messages.IncrementalConfig) -> None:
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
    broker: BrokerNode, resource_type: int, texts: dict[str, str], change: messages.IncrementalConfig
) -> str:
    row = _row(resource_type, change.name)
    if row.kind != "list":
        verb = _OPERATION_NAMES[change.config_operation]
        raise TopicError(ErrorCode.INVALID_CONFIG, f"Can't {verb} to key {change.name} because its type is not LIST.")
    old = texts.get(change.name)
    if old is None:
        is_topic = resource_type == TOPIC
        old = resource_settings.topic_default(broker.settings, change.name) if is_topic else as_text(row.default)
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
            return resource_settings.topic_row(name)
        return row_of(name) if resource_type == BROKER else resource_settings.named_row(resource_type, name)
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None


# --- ListConfigResources (74): what has settings. Version 0 lists client metrics subscriptions only ---
_KNOWN = {TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP}


def list_config_resources(
    broker: BrokerNode, context: RequestContext, request: messages.ListConfigResourcesRequest
) -> messages.ListConfigResourcesResponse:
    requested = {CLIENT_METRICS} if context.version == 0 else set(request.resource_types) or _KNOWN
    if requested - _KNOWN:
        return messages.ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    found = []
    if TOPIC in requested:
        found += [messages.ConfigResource(topic.name, TOPIC) for topic in broker.topics]
    if BROKER in requested:
        found.append(messages.ConfigResource(str(broker.node_id), BROKER))
    if BROKER_LOGGER in requested:
        found.append(messages.ConfigResource(str(broker.node_id), BROKER_LOGGER))
    for kind in resource_settings.KINDS.keys() & requested:
        names = sorted(name for name, _ in broker.store.items(resource_settings.KINDS[kind].key))
        found += [messages.ConfigResource(name, kind) for name in names]
    return messages.ListConfigResourcesResponse(config_resources=found)


# --- DescribeClientQuotas (48), AlterClientQuotas (49) ---


_TYPES = (USER, CLIENT_ID, IP)
_EXACT, _DEFAULT, _ANY = 0, 1, 2
_NO_EFFECT = "quotas are for bytes"


def _limit(name: str, *, is_whole: bool, no_effect: str = "") -> Setting:
    return Setting(name, "long" if is_whole else "double", None, "", no_effect=no_effect)


# Kafka's limits by the kind of their entity. Those without effect are kept and shown, as settings without effect are.
# They are shown in this order, which is that of Kafka's hash maps: there are clients whose own tests rely on it.
_BY_CLIENT = (
    _limit(CONSUMER_BYTE_RATE, is_whole=True),
    _limit("controller_mutation_rate", is_whole=False, no_effect=_NO_EFFECT),
    _limit("request_percentage", is_whole=False, no_effect=_NO_EFFECT),
    _limit(PRODUCER_BYTE_RATE, is_whole=True),
)
_BY_ADDRESS = (_limit("connection_creation_rate", is_whole=True, no_effect=_NO_EFFECT),)
_SHOWN = tuple(limit.name for limit in (*_BY_ADDRESS, *_BY_CLIENT))


class _Refused(Exception):
    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.code = code


def describe_client_quotas(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeClientQuotasRequest
) -> messages.DescribeClientQuotasResponse:
    try:
        _check_filter(request.components)
    except _Refused as error:
        return messages.DescribeClientQuotasResponse(error_code=error.code, error_message=str(error), entries=None)
    entries = [
        messages.EntryData(
            [messages.EntityData(*part) for part in entity],
            [messages.ValueData(key, values[key]) for key in _SHOWN if key in values],
        )
        for entity, values in broker.quotas
        if _matches(dict(entity), request)
    ]
    return messages.DescribeClientQuotasResponse(entries=entries)


def _check_filter(components: Sequence[messages.ComponentData]) -> None:
    seen: set[str] = set()
    for component in components:
        kind = component.entity_type
        if not kind:
            raise _Refused("Unexpected empty filter component entity type")
        if kind in seen:
            raise _Refused(f"Entity type {kind} cannot appear more than once in the filter")
        if kind not in _TYPES:
            raise _Refused(f"Custom entity type '{kind}' not supported", ErrorCode.UNSUPPORTED_VERSION)
        if component.match_type not in (_EXACT, _DEFAULT, _ANY):
            raise _Refused(f"Unknown match type {component.match_type}")
        if (component.match is None) == (component.match_type == _EXACT):
            raise _Refused("A filter component has a name if it is for exactly this one, and none otherwise")
        seen.add(kind)
    if IP in seen and len(seen) > 1:
        raise _Refused(
            "Invalid entity filter component combination, IP filter component should not be used with "
            "user or clientId filter component."
        )


def _matches(entity: dict[str, str | None], request: messages.DescribeClientQuotasRequest) -> bool:
    for component in request.components:
        if component.entity_type not in entity:
            return False
        name = entity[component.entity_type]
        if component.match_type == _EXACT and name != component.match:
            return False
        if component.match_type == _DEFAULT and name is not None:
            return False
    return not request.strict or len(entity) == len(request.components)


async def alter_client_quotas(
    broker: BrokerNode, context: RequestContext, request: messages.AlterClientQuotasRequest
) -> messages.AlterClientQuotasResponse:
    results = []
    turns = Turns()
    for entry in request.entries:
        # Of two names of one type the last counts, as in Kafka.
        names = {part.entity_type: part.entity_name for part in entry.entity}
        result = messages.EntryDataResult(0, None, [messages.EntityData(*part) for part in sorted(names.items())])
        try:
            _alter_quotas(broker, entry, validate_only=request.validate_only)
        except _Refused as error:
            result.error_code, result.error_message = error.code, str(error)
        results.append(result)
        await turns.next()
    return messages.AlterClientQuotasResponse(entries=results)


def _alter_quotas(broker: BrokerNode, entry: messages.AlterEntryData, *, validate_only: bool) -> None:
    entity = _entity(entry.entity)
    if len({op.key for op in entry.ops}) < len(entry.ops):
        raise _Refused("A quota may be changed once in a request")
    for op in entry.ops:
        if not op.remove:
            _check_limit(broker, dict(entity), op)
    if validate_only:
        return
    try:
        broker.quotas.alter(entity, {op.key: None if op.remove else op.value for op in entry.ops})
    except OSError as error:
        message = f"the data folder cannot be written: {error}"
        raise _Refused(message, ErrorCode.KAFKA_STORAGE_ERROR) from error


def _entity(parts: Sequence[messages.EntityData]) -> Entity:
    if not parts:
        raise _Refused("Invalid empty client quota entity")
    for part in parts:
        if part.entity_type not in _TYPES:
            raise _Refused(f"Unhandled client quota entity type: {part.entity_type}")
        if part.entity_name == "":
            raise _Refused(f"Empty {part.entity_type} not supported")
    names = {part.entity_type: part.entity_name for part in parts}
    if IP in names and len(names) > 1:
        raise _Refused("Invalid quota entity combination, IP entity should not be combined with User or ClientId")
    return tuple(sorted(names.items()))


def _check_limit(broker: BrokerNode, entity: dict[str, str | None], op: messages.OpData) -> None:
    limits = {limit.name: limit for limit in (_BY_ADDRESS if IP in entity else _BY_CLIENT)}
    limit = limits.get(op.key)
    if limit is None:
        raise _Refused(f"Invalid configuration key {op.key}")
    if not op.value > 0:
        raise _Refused(f"Quota {op.key} must be greater than 0")
    if limit.kind == "long" and not op.value.is_integer():
        raise _Refused(f"{op.key} cannot be a fractional value.")
    try:
        broker.settings.accept([limit])
    except SettingError as error:
        raise _Refused(str(error)) from None
