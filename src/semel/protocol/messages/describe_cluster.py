"""DescribeCluster (60): cluster id, controller and brokers."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32, versions


class DescribeClusterRequest(Struct):
    include_cluster_authorized_operations: bool = False
    endpoint_type: Annotated[int8, versions("1+")] = 1
    include_fenced_brokers: Annotated[bool, versions("2+")] = False


class DescribeClusterBroker(Struct):
    broker_id: int32 = 0
    host: str = ""
    port: int32 = 0
    rack: str | None = None
    is_fenced: Annotated[bool, versions("2+")] = False


class DescribeClusterResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    endpoint_type: Annotated[int8, versions("1+")] = 1
    cluster_id: str = ""
    controller_id: int32 = -1
    brokers: list[DescribeClusterBroker] = []
    cluster_authorized_operations: int32 = -2147483648


DESCRIBE_CLUSTER = Api(60, DescribeClusterRequest, DescribeClusterResponse, "0-2", flexible="0+")
