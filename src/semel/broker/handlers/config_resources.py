"""What has settings: topics, the broker, groups, client metrics. How requests name them, how settings are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from semel.broker import named_settings, topic_configs
from semel.broker.named_settings import CLIENT_METRICS, GROUP
from semel.broker.settings import TABLE, SettingError, parse_dynamic, row_of
from semel.broker.topics import TopicError, check_configs, check_name
from semel.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.topics import Topic

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
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Broker id must be an integer, but it is: {name}")
    if int(name) != broker.node_id:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {broker.node_id} or empty string, but received {name}",
        )
    return False


def current_settings(broker: BrokerNode, resource_type: int, name: str) -> dict[str, str]:
    """What was set for a resource itself, without any defaults."""
    if resource_type == TOPIC:
        return dict(find_topic(broker, name).configs)
    if resource_type == BROKER:
        return broker.altered_settings(for_cluster=is_whole_cluster(broker, name))
    check_named(resource_type, name)
    return named_settings.own(broker.store, resource_type, name)


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
        broker.settings.accept(map(topic_configs.row_of, texts))
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None


def _replace_named(
    broker: BrokerNode, resource_type: int, name: str, texts: dict[str, str], *, validate_only: bool
) -> None:
    try:
        named_settings.check(broker.settings, resource_type, texts)
        if not validate_only:
            named_settings.replace(broker.store, resource_type, name, texts)
    except SettingError as error:
        raise TopicError(named_settings.KINDS[resource_type].refusal, str(error)) from None
    except OSError as error:
        raise TopicError(ErrorCode.KAFKA_STORAGE_ERROR, f"the data folder cannot be written: {error}") from error


def _replace_brokers(broker: BrokerNode, name: str, texts: dict[str, str], *, validate_only: bool) -> None:
    for_cluster = is_whole_cluster(broker, name)
    fixed = sorted(setting for setting in texts if setting in TABLE and not TABLE[setting].dynamic)
    if fixed:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"Cannot update these configs dynamically: [{', '.join(fixed)}]")
    try:
        parse_dynamic(texts)
        broker.settings.accept(map(row_of, texts))
        if not validate_only:
            broker.alter_settings(texts, for_cluster=for_cluster)
    except SettingError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from None
