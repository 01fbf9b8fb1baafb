"""DeleteRecords (21): raise the first offset of partitions."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class DeleteRecordsPartition(Struct):
    partition_index: int32 = 0
    offset: int64 = 0


class DeleteRecordsTopic(Struct):
    name: str = ""
    partitions: list[DeleteRecordsPartition] = []


class DeleteRecordsRequest(Struct):
    topics: list[DeleteRecordsTopic] = []
    timeout_ms: int32 = 0


class DeleteRecordsPartitionResult(Struct):
    partition_index: int32 = 0
    low_watermark: int64 = 0
    error_code: int16 = 0


class DeleteRecordsTopicResult(Struct):
    name: str = ""
    partitions: list[DeleteRecordsPartitionResult] = []


class DeleteRecordsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[DeleteRecordsTopicResult] = []


DELETE_RECORDS = Api(21, DeleteRecordsRequest, DeleteRecordsResponse, "0-2", flexible="2+")
