"""The ledger as a topic: created at the start, read from its end, and left out by patterns.

A query that reads its own ledger or dead letters as input makes new ones with every batch, without end. So a pattern
leaves out every ledger, as it leaves out Kafka's internal topics, and the dead letters of the application that the
source is given (`applicationId`). A ledger is known by what is in it: a topic of the user's that happens to end in
".ledger" is read. The sink refuses a batch that reads its own topics all the same (`ledger.refuse_loop`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable

from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode, Controller
from semel.client.errors import KafkaError, error_of
from semel.client.group.offsets import fetch_committed, retried
from semel.client.metadata import TopicMetadata
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages import configs as config_messages
from semel.protocol.messages import topics as topic_messages
from semel.spark.ledger import SUFFIX, LedgerEntry, LedgerError, LostLedgerError, NoEntryError, decode, topic_of
from semel.spark.offsets import Offsets, Range, to_json
from semel.spark.reading import RangeReader
from semel.spark.topics import ABSENT_S, is_here, list_offsets

EARLIEST, LATEST = -2, -1
MARKERS_S = 5.0
LOOK_AGAIN_S = 0.01
POLICY = "cleanup.policy"
CONFIG = {POLICY: "compact", "retention.ms": "-1", "retention.bytes": "-1"}
TOPIC_RESOURCE = 2
CREATE_TIMEOUT_MS = 30_000
NOT_ALLOWED = (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
_WAYS_OUT = (
    "Restore the ledger topic; or choose another application id, if another program uses this one or everything may be "
    "written again; or, if you know up to which offsets the output holds everything, continue there: with the same "
    "checkpoint and adopt_checkpoint=True, or with a new one, adopt_checkpoint=True and startingOffsets set to these "
    "offsets. So does a query that had guarantee at_least_once or at_most_once, which keep no ledger"
)

log = logging.getLogger("semel.spark")


def create(cluster: Cluster, application_id: str, replication_factor: int = -1) -> None:
    """Makes sure that the ledger is there, with one partition, and that nothing deletes its entries."""
    name = topic_of(application_id)
    topic = topic_messages.CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=replication_factor,
        configs=[topic_messages.CreatableTopicConfig(name=key, value=value) for key, value in CONFIG.items()],
    )
    request = topic_messages.CreateTopicsRequest(topics=[topic], timeout_ms=CREATE_TIMEOUT_MS)
    what = f"creating the ledger topic {name!r}"
    deadline = cluster.deadline()

    def attempt() -> topic_messages.CreatableTopicResult:
        """NOT_CONTROLLER and REQUEST_TIMED_OUT come while the controller changes: the next try goes to the new one."""
        left_s = deadline.remaining_s()
        response = cluster.call(Controller(), topic_messages.CREATE_TOPICS, request, timeout_s=left_s, errors=None)
        result = response.topics[0]
        if ErrorCode.of(result.error_code).recovery is Recovery.RETRY:
            cluster.forget(Controller())
            raise error_of(result.error_code, what, result.error_message)
        return result

    result = cluster.retry(attempt, what, deadline)
    code = ErrorCode.of(result.error_code)
    if code in NOT_ALLOWED and not is_here(cluster, name, ABSENT_S):
        raise error_of(
            code,
            what,
            f"the user needs CREATE on topic {name!r} (or on the cluster). Or make it beforehand: `semel topic create "
            f"{name} --partitions 1 --config {POLICY}=compact`",
        )
    if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS, *NOT_ALLOWED):
        raise error_of(code, what, result.error_message)
    partitions = cluster.partitions(name)
    if len(partitions) != 1:
        raise ValueError(
            f"topic {name!r} has {len(partitions)} partitions, a ledger has 1: another program made it. Choose another "
            "application id"
        )
    if code is not ErrorCode.NONE:
        _check_policy(cluster, name)


def _check_policy(cluster: Cluster, name: str) -> None:
    """A topic that somebody else made may lose its entries by retention: then an application would write all again."""
    request = config_messages.DescribeConfigsRequest(
        [config_messages.DescribeConfigsResource(TOPIC_RESOURCE, name, [POLICY])]
    )
    try:
        response = cluster.call(
            AnyNode(),
            config_messages.DESCRIBE_CONFIGS,
            request,
            errors=lambda response: (r.error_code for r in response.results),
        )
    except KafkaError as error:
        if error.code not in NOT_ALLOWED:
            raise
        log.warning(
            "the configuration of the ledger topic %r cannot be read (%s); give the user DESCRIBE_CONFIGS on it, and "
            "see to it that its cleanup.policy is compact",
            name,
            error,
        )
        return
    policy = next((entry.value or "" for entry in response.results[0].configs if entry.name == POLICY), "")
    if policy != CONFIG[POLICY]:
        raise LostLedgerError(
            f"the ledger topic {name!r} has {POLICY}={policy}, so its entries are deleted after a time, and the "
            f"application would write everything again. Set it to compact: `semel topic alter {name} --config "
            f"{POLICY}=compact`"
        )


def last_entry(
    cluster: Cluster, application_id: str, *, must_exist: bool = False, accept_empty: bool = False
) -> LedgerEntry | None:
    """The newest committed entry, or None if nothing was ever written.

    must_exist    the topic was created before: without it, the ledger was deleted
    accept_empty  the user says that an empty ledger is meant, whatever else speaks against it
    """
    name = topic_of(application_id)
    if not is_here(cluster, name, ABSENT_S):
        if must_exist:
            raise LostLedgerError(f"the ledger {name!r} was deleted while it was in use. {_WAYS_OUT}")
        if not accept_empty:
            refuse_lost(cluster, application_id, 0)
        return None
    start, found = _read_last(cluster, name)
    if found is None and not accept_empty and why_lost(cluster, application_id, start):
        wait_for_markers(cluster, application_id)  # the group may have the first batch's offsets before the ledger
        start, found = _read_last(cluster, name)
        if found is None:
            refuse_lost(cluster, application_id, start)
    return found


def _read_last(cluster: Cluster, name: str) -> tuple[int, LedgerEntry | None]:
    """(where the log starts, the newest committed entry)"""
    start, end = _bounds(cluster, name)
    return start, _newest(cluster, name, start, end)


def _bounds(cluster: Cluster, name: str) -> tuple[int, int]:
    """(where the log starts, where what is committed ends)"""
    end, start = (list_offsets(cluster, {(name, 0): at}, True)[name][0] for at in (LATEST, EARLIEST))
    return start, end


def refuse_lost(cluster: Cluster, application_id: str, start: int) -> None:
    """Raises if a ledger without entries is not a new one."""
    why = why_lost(cluster, application_id, start)
    if why:
        raise LostLedgerError(
            f"the ledger {topic_of(application_id)!r} is empty, but {why}. What was written is not known any more, and "
            f"the application could write it again. {_WAYS_OUT}"
        )


def why_lost(cluster: Cluster, application_id: str, start: int) -> str:
    """What says that an empty ledger, whose log starts at an offset, had entries once; "" if nothing does."""
    if start > 0:
        return f"its log starts at offset {start}: its entries were deleted"
    offsets = _group_offsets(cluster, application_id)
    if offsets:
        return f"the group {application_id!r} has committed offsets: {json.dumps(to_json(offsets))}"
    if _has_committed(cluster, application_id):
        return f"the last transaction of the transactional id {application_id!r} was committed, and each has an entry"
    return ""


def _has_committed(cluster: Cluster, transactional_id: str) -> bool:
    """Whether the last transaction of an id was committed. Also known where no offsets are stored in a group."""
    # Not at the top: the process that Spark starts for each source would import the admin client.
    from semel.spark.owners import COMMITTED, transaction_of

    try:
        found = transaction_of(cluster, transactional_id)
    except KafkaError as error:
        if error.code is not ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            raise
        return False  # a source may have no rights on it; the sink has, and looks too
    return found is not None and found.state == COMMITTED


def _group_offsets(cluster: Cluster, group_id: str) -> Offsets:
    try:
        found = retried(
            cluster,
            lambda deadline: fetch_committed(cluster, group_id, None, False, deadline),
            f"reading the offsets of group {group_id!r}",
        )
    except KafkaError as error:
        if error.code is not ErrorCode.GROUP_AUTHORIZATION_FAILED:
            raise
        log.warning("whether the ledger was lost cannot be checked: %s", error)
        return {}
    offsets: Offsets = {}
    for (topic, partition), at in found.items():
        offsets.setdefault(topic, {})[partition] = at.offset
    return offsets


def wait_for_markers(cluster: Cluster, application_id: str, timeout_s: float = MARKERS_S) -> None:
    """The end of a transaction is answered before its marker is in the ledger; until then its entry is not visible.

    A transaction that a dead driver left open has no marker on its way: then the timeout ends the wait.
    """
    place, deadline_s = (topic_of(application_id), 0), time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        stable, end = (list_offsets(cluster, {place: LATEST}, committed)[place[0]][0] for committed in (True, False))
        if stable >= end:
            return
        time.sleep(LOOK_AGAIN_S)


def all_entries(cluster: Cluster, application_id: str) -> list[LedgerEntry]:
    """Everything that compaction has left."""
    name = topic_of(application_id)
    start, end = _bounds(cluster, name)
    found = entries(cluster, name, start, end)
    if not found:
        refuse_lost(cluster, application_id, start)
    return found


def _newest(cluster: Cluster, name: str, start: int, end: int) -> LedgerEntry | None:
    """Looks backwards in growing steps: behind the newest entry there are only markers and aborted batches."""
    step, upper = 64, end
    while upper > start:
        lower = max(start, upper - step)
        found = entries(cluster, name, lower, upper)
        if found:
            return max(found, key=lambda entry: entry.sequence)
        upper, step = lower, step * 8
    return None


def entries(cluster: Cluster, name: str, start: int, end: int) -> list[LedgerEntry]:
    """Committed entries in a range of offsets, in order. All or an error: a batch's fate depends on them."""
    reader = RangeReader(cluster, Range(name, 0, start, end), read_committed=True, fail_on_data_loss=True)
    return [
        decode(row["value"], f"topic {name!r}, offset {row['offset']},")
        for table in reader.tables(headers=False)
        for row in table.select(["offset", "value"]).to_pylist()
        if row["value"]
    ]


LOOK_BYTES = 64 << 10


class OwnTopics:
    """What a pattern leaves out; one object for each reader of the source."""

    def __init__(self, cluster: Cluster, application_id: str | None) -> None:
        self._cluster = cluster
        self._application_id = application_id
        self._looked_at: dict[tuple[str, bytes], bool] = {}  # name and id of a topic -> whether it is a ledger

    def __call__(self, matching: Iterable[TopicMetadata]) -> set[str]:
        """Those of the topics that are not read."""
        found = {topic.name for topic in matching if topic.name.endswith(SUFFIX) and self._is_ledger(topic)}
        if self._application_id is None:
            return found
        ledger = topic_of(self._application_id)
        if ledger not in self._cluster.metadata.topics:
            return found
        last = last_entry(self._cluster, self._application_id, accept_empty=True)
        dead_letters = last.dead_letter_topic if last else None
        return found | {ledger} | ({dead_letters} if dead_letters else set())

    def _is_ledger(self, topic: TopicMetadata) -> bool:
        """One without a record counts as one until it has some: there is nothing to be read in it."""
        if len(topic.partitions) != 1:
            return False
        key = (topic.name, bytes(topic.topic_id))
        if key not in self._looked_at:
            whole = Range(topic.name, 0, *_bounds(self._cluster, topic.name))
            reader = RangeReader(
                self._cluster, whole, read_committed=True, fail_on_data_loss=False, fetch_bytes=LOOK_BYTES
            )
            first = next(reader.tables(headers=False), None)
            if first is None:
                return True
            self._looked_at[key] = is_entry(first.column("value")[0].as_py())
        return self._looked_at[key]


def is_entry(value: bytes | None) -> bool:
    """Whether a record is one of a ledger, of this version of semel or another."""
    try:
        decode(value or b"")
    except NoEntryError:
        return False
    except LedgerError:
        pass
    return True
