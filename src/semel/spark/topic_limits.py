"""Which records the settings of a topic do not let in.

A broker refuses the whole batch that such a record is in, at every attempt. So rows are compared with the settings
before they are sent: one that the topic will not take is a bad row, as any other that cannot be written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode
from semel.client.errors import KafkaError
from semel.protocol.messages import configs as messages

log = logging.getLogger("semel.spark")
TOPIC_RESOURCE = 2
TIMEOUT_S = 10.0
POLICY, MAX_BYTES, TIMESTAMP_TYPE = "cleanup.policy", "max.message.bytes", "message.timestamp.type"
BEFORE, AFTER = "message.timestamp.before.max.ms", "message.timestamp.after.max.ms"
DIFFERENCE = "message.timestamp.difference.max.ms"  # both of them before Kafka 3.6
NO_LIMIT = 2**62


class TopicLimits(NamedTuple):
    needs_key: bool = False
    max_batch_bytes: int = NO_LIMIT
    before_ms: int = NO_LIMIT  # how far the time of a record may lie before that of the broker
    after_ms: int = NO_LIMIT

    @classmethod
    def of(cls, settings: Mapping[str, str | None]) -> TopicLimits:
        def least(*names: str) -> int:
            return min((int(settings[name] or NO_LIMIT) for name in names if name in settings), default=NO_LIMIT)

        is_stamped_by_broker = settings.get(TIMESTAMP_TYPE) == "LogAppendTime"
        return cls(
            needs_key="compact" in (settings.get(POLICY) or ""),
            max_batch_bytes=least(MAX_BYTES),
            before_ms=NO_LIMIT if is_stamped_by_broker else min(NO_LIMIT, least(BEFORE, DIFFERENCE)),
            after_ms=NO_LIMIT if is_stamped_by_broker else min(NO_LIMIT, least(AFTER, DIFFERENCE)),
        )


def limits_of(cluster: Cluster, topics: Iterable[str]) -> dict[str, TopicLimits]:
    """The limits of topics. Of those that cannot be asked (no right to DESCRIBE_CONFIGS, say) nothing is known."""
    names = [POLICY, MAX_BYTES, TIMESTAMP_TYPE, BEFORE, AFTER, DIFFERENCE]
    request = messages.DescribeConfigsRequest(
        [messages.DescribeConfigsResource(TOPIC_RESOURCE, topic, names) for topic in dict.fromkeys(topics)]
    )
    try:
        found = cluster.call(AnyNode(), messages.DESCRIBE_CONFIGS, request, timeout_s=TIMEOUT_S, errors=None).results
    except KafkaError as error:
        log.debug("the settings of the output topics are not known: %s", error)
        return {}
    return {
        result.resource_name: TopicLimits.of({entry.name: entry.value for entry in result.configs})
        for result in found
        if not result.error_code
    }
