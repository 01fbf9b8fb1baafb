"""AlterReplicaLogDirs (34): move replicas to another data folder."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32


class AlterReplicaLogDirTopic(Struct):
    name: str = ""
    partitions: list[int32] = []


class AlterReplicaLogDir(Struct):
    path: str = ""
    topics: list[AlterReplicaLogDirTopic] = []


class AlterReplicaLogDirsRequest(Struct):
    dirs: list[AlterReplicaLogDir] = []


class AlterReplicaLogDirPartitionResult(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class AlterReplicaLogDirTopicResult(Struct):
    topic_name: str = ""
    partitions: list[AlterReplicaLogDirPartitionResult] = []


class AlterReplicaLogDirsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[AlterReplicaLogDirTopicResult] = []


ALTER_REPLICA_LOG_DIRS = Api(34, AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse, "1-2", flexible="2+")
