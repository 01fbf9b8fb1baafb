"""DescribeClientQuotas (48), AlterClientQuotas (49)."""

from __future__ import annotations

from collections.abc import Sequence

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.quotas import CLIENT_ID, CONSUMER_BYTE_RATE, IP, PRODUCER_BYTE_RATE, USER, Entity
from semel.broker.settings import Setting, SettingError
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import configs as messages

_TYPES = (USER, CLIENT_ID, IP)
_EXACT, _DEFAULT, _ANY = 0, 1, 2
_NO_EFFECT = "quotas are for bytes"


def _limit(name: str, *, is_whole: bool, no_effect: str = "") -> Setting:
    return Setting(name, "long" if is_whole else "double", None, "", no_effect=no_effect)


# Kafka's limits by the kind of their entity. Those without effect are kept and shown, as settings without effect are.
_BY_CLIENT = (
    _limit(PRODUCER_BYTE_RATE, is_whole=True),
    _limit(CONSUMER_BYTE_RATE, is_whole=True),
    _limit("request_percentage", is_whole=False, no_effect=_NO_EFFECT),
    _limit("controller_mutation_rate", is_whole=False, no_effect=_NO_EFFECT),
)
_BY_ADDRESS = (_limit("connection_creation_rate", is_whole=True, no_effect=_NO_EFFECT),)


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
            [messages.ValueData(key, value) for key, value in values.items()],
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
        result = messages.EntryDataResult(
            0, None, [messages.EntityData(part.entity_type, part.entity_name) for part in entry.entity]
        )
        try:
            _alter(broker, entry, validate_only=request.validate_only)
        except _Refused as error:
            result.error_code, result.error_message = error.code, str(error)
        results.append(result)
        await turns.next()
    return messages.AlterClientQuotasResponse(entries=results)


def _alter(broker: BrokerNode, entry: messages.AlterEntryData, *, validate_only: bool) -> None:
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
    if len(names) < len(parts):
        raise _Refused(f"Invalid client quota entity, duplicate entity entry: {parts[0].entity_type}")
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
