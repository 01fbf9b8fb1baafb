"""FindCoordinator (10): which broker keeps a group (key type 0) or a transactional id (key type 1): this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.coordinators import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.broker.topics import TopicError
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

_JOURNAL_OF_TYPE = {0: CONSUMER_OFFSETS, 1: TRANSACTION_STATE}
_FIRST_WITH_LIST = 4


async def find_coordinator(
    broker: BrokerNode, context: RequestContext, request: FindCoordinatorRequest
) -> FindCoordinatorResponse:
    if context.version >= _FIRST_WITH_LIST:
        keys = await Turns().map(lambda key: _find(broker, context, key, request.key_type), request.coordinator_keys)
        return FindCoordinatorResponse(coordinators=keys)
    found = _find(broker, context, request.key, request.key_type)
    return FindCoordinatorResponse(
        error_code=found.error_code,
        error_message=found.error_message or ErrorCode.NONE.name,  # Kafka's word for "no error"
        node_id=found.node_id,
        host=found.host,
        port=found.port,
    )


def _find(broker: BrokerNode, context: RequestContext, key: str, key_type: int) -> Coordinator:
    journal = _JOURNAL_OF_TYPE.get(key_type)
    if journal is None:
        return Coordinator(key, -1, "", -1, ErrorCode.INVALID_REQUEST, f"Key type {key_type} is not served.")
    try:
        broker.topics.internal(journal)
    except TopicError as error:
        return Coordinator(key, -1, "", -1, ErrorCode.COORDINATOR_NOT_AVAILABLE, error.message)
    host, port = broker.address_for(context)
    return Coordinator(key, broker.node_id, host, port, ErrorCode.NONE, "")
