"""TxnOffsetCommit (28): store a group's positions inside a transaction."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, versions


class TxnOffsetCommitRequestPartition(Struct):
    partition_index: int32 = 0
    committed_offset: int64 = 0
    committed_leader_epoch: Annotated[int32, versions("2+"), ignorable] = -1
    committed_metadata: str | None = ""


class TxnOffsetCommitRequestTopic(Struct):
    name: str = ""
    partitions: list[TxnOffsetCommitRequestPartition] = []


class TxnOffsetCommitRequest(Struct):
    transactional_id: str = ""
    group_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    generation_id: Annotated[int32, versions("3+")] = -1
    member_id: Annotated[str, versions("3+")] = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None
    topics: list[TxnOffsetCommitRequestTopic] = []


class TxnOffsetCommitResponsePartition(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class TxnOffsetCommitResponseTopic(Struct):
    name: str = ""
    partitions: list[TxnOffsetCommitResponsePartition] = []


class TxnOffsetCommitResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[TxnOffsetCommitResponseTopic] = []


TXN_OFFSET_COMMIT = Api(28, TxnOffsetCommitRequest, TxnOffsetCommitResponse, "0-5", flexible="3+")
