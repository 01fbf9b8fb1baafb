"""Reading a topic up to where it ended a moment ago."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from semel.client.consumer import Consumer
from semel.client.errors import TimedOutError
from semel.client.timing import Deadline
from semel.client.types import ConsumerRecord, TopicPartition

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
