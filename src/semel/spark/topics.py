"""Where partitions begin and end, asked of the cluster: what the driver needs to plan a batch."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode
from semel.client.errors import KafkaError
from semel.client.group.offsets import list_offsets_retried
from semel.client.immediate import run
from semel.client.metadata import Metadata, TopicMetadata
from semel.client.timing import Deadline
from semel.client.types import TopicPartition as ClientTopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import configs as messages
from semel.protocol.schema import NO_UUID
from semel.spark.offsets import Offsets, TopicIds
from semel.spark.options import (
    COMMITTED,
    EARLIEST,
    EARLIEST_OFFSET,
    LATEST,
    LATEST_OFFSET,
    Bound,
    OptionError,
    SourceOptions,
)

TopicPartition = tuple[str, int]
NOT_FOUND = -1
CREATION_S = 5.0  # how long to wait for a topic that is perhaps being created
ABSENT_S = 5.0  # a topic that no broker knows for so long is not there


class UnknownTopicError(RuntimeError):
    """A topic or partition that a query names and the cluster does not have."""


class TopicOffsets:
    def __init__(
        self,
        cluster: Cluster,
        options: SourceOptions,
        not_read: Callable[[list[TopicMetadata]], set[str]] = lambda _: set(),
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._not_read = not_read
        self.left_out: set[str] = set()  # topics that match the pattern and are not read, as of the last look

    def partitions(self, *, must_exist: bool = True) -> list[TopicPartition]:
        """What the query reads, as the cluster has it now. Topics that do not exist: an error, or left out."""
        options = self._options
        if options.pattern is not None:
            known = (topic for topic in self._refresh(None).topics.values() if not topic.is_internal)
            matching = [topic for topic in known if re.fullmatch(options.pattern, topic.name)]
            self.left_out = self._not_read(matching)
            read = [topic for topic in matching if topic.name not in self.left_out]
            return sorted((topic.name, p) for topic in read for p in topic.partitions)
        self._refresh(options.topics or options.assigned)
        found = {name: sorted(self._known(name, must_exist)) for name in options.topics or options.assigned}
        if options.assigned:
            if must_exist:
                self._check_assigned(found)
            return [(t, p) for t in sorted(options.assigned) for p in sorted(options.assigned[t]) if p in found[t]]
        return [(topic, p) for topic in sorted(found) for p in found[topic]]

    def ids(self, topics: Iterable[str]) -> TopicIds:
        """The ids of topics that `partitions` has found; none where the broker is older than they are."""
        known = self._cluster.metadata.topics
        found = {name: known[name].topic_id for name in sorted(set(topics)) if name in known}
        return {name: str(UUID(bytes=bytes(topic_id))) for name, topic_id in found.items() if topic_id != NO_UUID}

    def _refresh(self, topics: Iterable[str] | None) -> Metadata:
        """Looks again: partitions are added and topics deleted while a query runs."""
        return self._cluster.retry(lambda: self._cluster.refresh(topics), "looking up topics", self._cluster.deadline())

    def resolve(self, bound: Bound, partitions: list[TopicPartition], committed: Offsets | None = None) -> Offsets:
        """A bound of the options as offsets of these partitions."""
        if bound.word == LATEST and bound is self._options.ending:
            self.await_markers(partitions)
        if bound.word in (EARLIEST, LATEST):
            return self.edge(bound.word, partitions)
        if bound.word == COMMITTED:
            return self._resolve_given(committed or {}, partitions, missing=EARLIEST)
        late_is_latest = self._options.late_is_latest or bound is self._options.ending
        if bound.timestamp_ms is not None:
            return self._resolve_times(dict.fromkeys(partitions, bound.timestamp_ms), late_is_latest)
        if bound.timestamps_ms:
            _refuse_unknown(bound.timestamps_ms, partitions)
            times = {(t, p): _named(bound.timestamps_ms, t, p) for t, p in partitions}
            return self._resolve_times(times, late_is_latest)
        _refuse_unknown(bound.offsets, partitions)
        return self._resolve_given(bound.offsets, partitions, missing=None)

    def await_markers(self, partitions: Iterable[TopicPartition]) -> None:
        """For a query that reads up to the end and then stops: until all that is committed is visible."""
        from semel.client.admin.calls import AdminCalls

        if self._options.read_committed:
            run(AdminCalls(self._cluster.settings, self._cluster.calls).await_markers(partitions))

    def edge(self, word: str, partitions: Iterable[TopicPartition]) -> Offsets:
        """Where the partitions begin, or end for this query's isolation level."""
        wanted = EARLIEST_OFFSET if word == EARLIEST else LATEST_OFFSET
        return self._list(dict.fromkeys(partitions, wanted))

    def _known(self, topic: str, must_exist: bool) -> Iterable[int]:
        missing = self._cluster.metadata.errors.get(topic) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if missing and not must_exist:
            return []
        try:
            return self._cluster.partitions(topic, CREATION_S if missing else None)
        except KafkaError as error:
            raise UnknownTopicError(
                f"topic {topic!r} cannot be read: {error}. Create it, or correct the option that names it"
            ) from error

    def _check_assigned(self, found: Mapping[str, list[int]]) -> None:
        for topic, wanted in self._options.assigned.items():
            missing = sorted(set(wanted) - set(found[topic]))
            if missing:
                raise UnknownTopicError(
                    f"option assign names partitions {missing} of {topic!r}, which has partitions {found[topic]}"
                )

    def _resolve_given(self, given: Offsets, partitions: list[TopicPartition], missing: str | None) -> Offsets:
        """Offsets by number; -2 and -1 stand for the edges. Partitions that are not named: `missing`, or an error."""
        words: dict[TopicPartition, int] = {}
        result: Offsets = defaultdict(dict)
        for topic, partition in partitions:
            offset = given.get(topic, {}).get(partition) if missing else _named(given, topic, partition)
            if offset is None or offset < 0:
                words[topic, partition] = EARLIEST_OFFSET if offset is None else offset
            else:
                result[topic][partition] = offset
        for topic, parts in self._list(words).items():
            result[topic].update(parts)
        return dict(result)

    def _resolve_times(self, times: Mapping[TopicPartition, int], late_is_latest: bool) -> Offsets:
        found = self._list(dict(times))
        late = [(t, p) for t, parts in found.items() for p, offset in parts.items() if offset == NOT_FOUND]
        if late and not late_is_latest:
            raise OptionError(
                f"no record is as late as the given time in {late[:5]}; set "
                "startingOffsetsByTimestampStrategy=latest to start at the end there"
            )
        for topic, parts in self.edge(LATEST, late).items():
            found[topic].update(parts)
        return found

    def _list(self, wanted: Mapping[TopicPartition, int]) -> Offsets:
        return list_offsets(self._cluster, wanted, self._options.read_committed)


def _named(given: Offsets, topic: str, partition: int) -> int:
    try:
        return given[topic][partition]
    except KeyError:
        raise OptionError(
            f"the given offsets have none for partition {partition} of {topic!r}; name every partition (as an "
            "offset, -2 is earliest and -1 latest)"
        ) from None


def _refuse_unknown(given: Offsets, partitions: list[TopicPartition]) -> None:
    unknown = sorted({(t, p) for t, parts in given.items() for p in parts} - set(partitions))
    if unknown:
        raise OptionError(
            f"the given offsets name partitions that the query does not read: {unknown[:5]}; it reads {partitions[:20]}"
        )


def earliest_offset(cluster: Cluster, topic: str, partition: int) -> int:
    return list_offsets(cluster, {(topic, partition): EARLIEST_OFFSET}, True)[topic][partition]


def list_offsets(cluster: Cluster, wanted: Mapping[TopicPartition, int], read_committed: bool) -> Offsets:
    """Offsets for times (or -1 latest, -2 earliest) from the leaders, also if these change."""
    places = {ClientTopicPartition(*place): at for place, at in wanted.items()}
    result: Offsets = defaultdict(dict)
    for place, found in list_offsets_retried(cluster, places, int(read_committed), cluster.deadline()).items():
        result[place.topic][place.partition] = found.offset
    return dict(result)


def is_here(cluster: Cluster, topic: str, wait_s: float = 0.0) -> bool:
    """Whether the cluster has a topic. A source may be on another one, or its topic deleted since. A broker that has
    just started, or has not got the metadata of a new topic, does not know it; to be sure, the lookup is repeated until
    no broker has known the topic for `wait_s`."""
    unknown_until: Deadline | None = None

    def attempt() -> bool:
        nonlocal unknown_until
        try:
            cluster.topic(topic)
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            unknown_until = unknown_until or Deadline(wait_s)
            if unknown_until.expired:
                return False
            raise
        return True

    return cluster.retry(attempt, f"looking up topic {topic!r}", cluster.deadline())


# --- Which records the settings of a topic do not let in ---
#
# A broker refuses the whole batch that such a record is in, at every attempt. So rows are compared with the settings
# before they are sent: one that the topic will not take is a bad row, as any other that cannot be written.


log = logging.getLogger("semel.spark")
TOPIC_RESOURCE = 2
TIMEOUT_S = 10.0
POLICY, MAX_BYTES, TIMESTAMP_TYPE = "cleanup.policy", "max.message.bytes", "message.timestamp.type"
BEFORE, AFTER = "message.timestamp.before.max.ms", "message.timestamp.after.max.ms"
DIFFERENCE = "message.timestamp.difference.max.ms"  # both of them before Kafka 3.6
COMPRESSION = "compression.type"
AS_STORED = {"producer": None, "uncompressed": "none"}  # values of it that producers know by another name
NO_LIMIT = 2**62


class TopicLimits(NamedTuple):
    needs_key: bool = False
    max_batch_bytes: int = NO_LIMIT
    before_ms: int = NO_LIMIT  # how far the time of a record may lie before that of the broker
    after_ms: int = NO_LIMIT
    compression: str | None = None  # that of its batches, whatever comes; None: as they come

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
            compression=AS_STORED.get(settings.get(COMPRESSION) or "producer", settings.get(COMPRESSION)),
        )


def limits_of(cluster: Cluster, topics: Iterable[str]) -> dict[str, TopicLimits]:
    """The limits of topics. Of those that cannot be asked (no right to DESCRIBE_CONFIGS, say) nothing is known."""
    names = [POLICY, MAX_BYTES, TIMESTAMP_TYPE, BEFORE, AFTER, DIFFERENCE, COMPRESSION]
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
