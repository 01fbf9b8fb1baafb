"""Topics that belong together: created at once, and refused where they do not fit each other any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import KafkaError, TimedOutError
from semel.client.timing import Deadline
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.state import StateError
from semel.protocol.errors import ErrorCode

BROKER_TIME = {"message.timestamp.type": "LogAppendTime"}  # one clock for all who write
COMPACTED = {"cleanup.policy": "compact"}
KEPT = {"retention.ms": "-1"}
HOUR = {"retention.ms": str(3_600_000)}


def create_topics(
    options: Mapping[str, Any], topics: Mapping[str, Mapping[str, str]], partitions: int, replication_factor: int = -1
) -> None:
    """Creates those that are not there, each with its configuration."""
    with Admin(dict(options)) as admin:
        for name, configs in topics.items():
            admin.create_topic(name, partitions, replication_factor, configs, if_not_exists=True)


def partition_count(options: Mapping[str, Any], topics: Iterable[str], optional: Iterable[str] = ()) -> int:
    """How many partitions they have, which must be one number: a key is in the partition of the same number in all of
    them. `optional` ones need not be there yet."""
    with Admin(dict(options)) as admin:
        counts = {topic: _count(admin, topic) for topic in (*topics, *optional)}
    missing = [topic for topic in topics if not counts[topic]]
    if missing:
        raise StateError(f"there is no topic {missing[0]!r}; call create() first")
    found = {topic: count for topic, count in counts.items() if count}
    if len(set(found.values())) > 1:
        raise StateError(
            f"{found}: these topics must have the same number of partitions, and do not any more. Keys have moved to "
            "other partitions than what is known of them, so going on would begin them anew. Partitions cannot be "
            "taken away: create a set of topics under another name, with as many partitions as are needed, and copy "
            "what is there in the order of its partitions"
        )
    return next(iter(found.values()))


def _count(admin: Admin, topic: str) -> int:
    try:
        return len(admin.describe_topics([topic])[0].partitions)
    except KafkaError as error:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return 0
        raise


# --- Reading a topic up to where it ended a moment ago ---


POLL_MS = 100.0


def read_up_to(consumer: Consumer, ends: Mapping[TopicPartition, int]) -> Iterator[list[ConsumerRecord]]:
    """Polls until each partition is read up to its end. Raises when nothing has come for default.api.timeout.ms."""
    quiet = Deadline(consumer.settings.default_api_timeout_ms / 1000)
    left = _left(consumer, ends)
    while left:
        yield consumer.poll(POLL_MS)
        before, left = left, _left(consumer, ends)
        if left < before:
            quiet = Deadline(quiet.total_s)
        elif left and quiet.expired:
            names = ", ".join(sorted({place.topic for place in ends}))
            raise TimedOutError(
                f"nothing was read from {names} for {quiet.total_s:.3g} s, with {left} offsets still to be read"
            )


def _left(consumer: Consumer, ends: Mapping[TopicPartition, int]) -> int:
    return sum(max(0, end - consumer.position(place)) for place, end in ends.items())
