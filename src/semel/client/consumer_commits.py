"""Commits that are not waited for: sent on a connection of their own, answered whenever the consumer polls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from semel.client.cluster import Cluster, group_coordinator
from semel.client.connection import Connection
from semel.client.consumer_types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.client.errors import KafkaError, error_of
from semel.client.group_offsets import LAST_VERSION_WITH_NAMES, offset_commit_request
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.offset_commit import OFFSET_COMMIT, OffsetCommitResponse

log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Offsets, KafkaError | None], None]
COMMIT_LANE = "commit"


class AsyncCommits:
    """Commits in flight. They are answered in the order in which they were sent."""

    def __init__(self, cluster: Cluster, on_error: Callable[[ErrorCode, GroupMetadata], None]) -> None:
        self._cluster = cluster
        self._on_error = on_error
        self._in_flight: list[tuple[Pending, GroupMetadata, Offsets, Callback | None]] = []

    def __len__(self) -> int:
        return len(self._in_flight)

    def connections(self) -> list[Connection]:
        return self._cluster.connections(COMMIT_LANE)

    def send(self, member: GroupMetadata, offsets: Offsets, callback: Callback | None, deadline: Deadline) -> None:
        try:
            connection = self._cluster.connect(group_coordinator(member.group_id), deadline, COMMIT_LANE)
            version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        except KafkaError as error:
            _tell(callback, offsets, error)
            return
        pending = connection.send(OFFSET_COMMIT, offset_commit_request(member, offsets), version=version)
        self._in_flight.append((pending, member, offsets, callback))

    def receive(self) -> None:
        """Takes the answers that have come and calls back."""
        for connection in self.connections():
            connection.progress()
            connection.check_deadlines()
        done = [entry for entry in self._in_flight if entry[0].done]
        self._in_flight = [entry for entry in self._in_flight if not entry[0].done]
        for pending, member, offsets, callback in done:
            _tell(callback, offsets, self._error_of(pending, member))

    def _error_of(self, pending: Pending, member: GroupMetadata) -> KafkaError | None:
        try:
            answer: OffsetCommitResponse = pending.result()
        except DecodeError as error:
            return error_of(ErrorCode.NETWORK_EXCEPTION, "committing positions", str(error))
        except KafkaError as error:
            self._cluster.forget(group_coordinator(member.group_id))
            return error
        for topic in answer.topics:
            for part in topic.partitions:
                if part.error_code:
                    self._on_error(ErrorCode.of(part.error_code), member)
                    what = f"committing a position of {topic.name}-{part.partition_index}"
                    return error_of(part.error_code, what)
        return None


def _tell(callback: Callback | None, offsets: Offsets, error: KafkaError | None) -> None:
    if callback is not None:
        callback(offsets, error)
    elif error is not None:
        log.warning("positions were not committed; the next commit covers them: %s", error)
