"""DescribeLogDirs (35): sizes of the logs in each data folder."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, versions


class DescribableLogDirTopic(Struct):
    topic: str = ""
    partitions: list[int32] = []


class DescribeLogDirsRequest(Struct):
    topics: list[DescribableLogDirTopic] | None = []


class DescribeLogDirsPartition(Struct):
    partition_index: int32 = 0
    partition_size: int64 = 0
    offset_lag: int64 = 0
    is_future_key: bool = False


class DescribeLogDirsTopic(Struct):
    name: str = ""
    partitions: list[DescribeLogDirsPartition] = []


class DescribeLogDirsResult(Struct):
    error_code: int16 = 0
    log_dir: str = ""
    topics: list[DescribeLogDirsTopic] = []
    total_bytes: Annotated[int64, versions("4+"), ignorable] = -1
    usable_bytes: Annotated[int64, versions("4+"), ignorable] = -1
    is_cordoned: Annotated[bool, versions("5+"), ignorable] = False


class DescribeLogDirsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: Annotated[int16, versions("3+"), ignorable] = 0
    results: list[DescribeLogDirsResult] = []


DESCRIBE_LOG_DIRS = Api(35, DescribeLogDirsRequest, DescribeLogDirsResponse, "1-5", flexible="2+")
