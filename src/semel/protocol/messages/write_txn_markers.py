"""WriteTxnMarkers (27): write commit or abort markers into partitions: broker to broker, or an operator."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, int64, versions


class WritableTxnMarkerTopic(Struct):
    name: str = ""
    partition_indexes: list[int32] = []


class WritableTxnMarker(Struct):
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    transaction_result: bool = False
    topics: list[WritableTxnMarkerTopic] = []
    coordinator_epoch: int32 = 0
    transaction_version: Annotated[int8, versions("2+"), ignorable] = 0


class WriteTxnMarkersRequest(Struct):
    markers: list[WritableTxnMarker] = []


class WritableTxnMarkerPartitionResult(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class WritableTxnMarkerTopicResult(Struct):
    name: str = ""
    partitions: list[WritableTxnMarkerPartitionResult] = []


class WritableTxnMarkerResult(Struct):
    producer_id: int64 = 0
    topics: list[WritableTxnMarkerTopicResult] = []


class WriteTxnMarkersResponse(Struct):
    markers: list[WritableTxnMarkerResult] = []


WRITE_TXN_MARKERS = Api(27, WriteTxnMarkersRequest, WriteTxnMarkersResponse, "1-2", flexible="1+")
