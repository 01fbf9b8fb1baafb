"""DescribeLogDirs (35): how large the partitions are, and how much room the data folder has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from semel.broker.turns import Turns
from semel.protocol.messages.topics import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext


async def describe_log_dirs(
    broker: BrokerNode, context: RequestContext, request: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    if request.topics is None:
        asked = {topic.name: [part.index for part in topic.partitions] for topic in broker.topics}
    else:
        asked = {topic.topic: topic.partitions for topic in request.topics}
    topics = []
    turns = Turns()
    for name, indexes in asked.items():
        found = []
        for index in indexes:
            if (log := broker.topics.find_log(name, index)) is not None:
                found.append(DescribeLogDirsPartition(index, log.size_bytes))
            await turns.next()
        if found:
            topics.append(DescribeLogDirsTopic(name, found))
    disk = os.statvfs(broker.data_dir.path)
    folder = DescribeLogDirsResult(
        log_dir=str(broker.data_dir.path.absolute()),
        topics=topics,
        total_bytes=disk.f_blocks * disk.f_frsize,
        usable_bytes=disk.f_bavail * disk.f_frsize,
    )
    return DescribeLogDirsResponse(results=[folder])
