"""DescribeCluster (60): the brokers of the cluster: this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.handlers.rights import CLUSTER_OPERATIONS, NOT_ASKED
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext

_BROKERS, _CONTROLLERS = 1, 2


def describe_cluster(
    broker: BrokerNode, context: RequestContext, request: DescribeClusterRequest
) -> DescribeClusterResponse:
    if request.endpoint_type != _BROKERS:
        is_known = request.endpoint_type == _CONTROLLERS
        code = ErrorCode.MISMATCHED_ENDPOINT_TYPE if is_known else ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
        return DescribeClusterResponse(error_code=code, error_message="This is a broker's endpoint (type 1).")
    host, port = broker.address_for(context)
    return DescribeClusterResponse(
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[DescribeClusterBroker(broker.node_id, host, port, broker.settings["broker.rack"])],
        cluster_authorized_operations=CLUSTER_OPERATIONS
        if request.include_cluster_authorized_operations
        else NOT_ASKED,
    )
