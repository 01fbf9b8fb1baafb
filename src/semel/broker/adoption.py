"""Folders in the data folder that the store does not know: which hold records, and which are leftovers.

- A topic's folders without records, of a creation that was never acknowledged: leftovers.
- Folders of a topic whose deletion was acknowledged, but not finished before a crash: leftovers. The store remembers
  the ids of deleted topics until their folders are gone.
- Anything else holds records that somebody put there: copied in, restored, or all that is left after the store was
  lost. It becomes a topic again, with default settings, or more partitions of the topic that has its id.
- A folder whose partition.metadata cannot be read belongs to the topic and partition that its name says.

Producer ids that are in a folder's state, snapshots or batches are never given out again: the first batch of a new
producer would be taken for a retry of one that is there.

Only leftovers are deleted. Records that fit no topic, as those of a second topic id under one name, are moved aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from uuid import UUID

from semel.broker.store import NEXT_PRODUCER_ID, Store
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.storage import DataDir, LogConfig, PartitionLog

log = logging.getLogger(__name__)

TOPIC_KEY = "topic/"
DELETED_KEY = "deleted/"
KAFKAS_OWN = "__cluster_metadata"  # a folder that Apache Kafka used before has it; it is neither ours nor to be removed

PRODUCER_ID_LIMIT = 1 << 62  # no counter gets there; a client may write any id into a batch


def adopt_folders(store: Store, data_dir: DataDir) -> None:
    """Gives topics and partitions that the store does not know, but that have records, an entry in it."""
    found: dict[str, dict[UUID, list[PartitionLog]]] = {}
    for (name, _), partition_log in data_dir.logs.items():
        if name != KAFKAS_OWN:
            found.setdefault(name, {}).setdefault(partition_log.topic_id, []).append(partition_log)
    for name, by_id in found.items():
        if store.get(TOPIC_KEY + name) is None:
            adopted = _adopt_topic(store, data_dir, name, by_id)
        else:
            adopted = _adopt_partitions(store, name, by_id)
        for partition_log in adopted:
            _keep_producer_ids(store, partition_log, partition_log.all_producer_ids)
    for partition_log in data_dir.logs.values():
        if partition_log.is_open:  # all of them after a crash, when the store may have lost its last changes
            _keep_producer_ids(store, partition_log, partition_log.states.producers.keys)
    store.commit()


def _keep_producer_ids(store: Store, partition_log: PartitionLog, find: Callable[[], Iterable[int]]) -> None:
    """Makes the next producer id one above those that are found in a log."""
    try:
        highest = max((found for found in find() if found < PRODUCER_ID_LIMIT), default=-1)
    except (StorageError, OSError) as error:
        log.error("the producer ids of %s cannot be read, new ones may collide: %s", partition_log, error)
        return
    if highest >= (store.get(NEXT_PRODUCER_ID) or 0):
        store.put(NEXT_PRODUCER_ID, highest + 1)


def _adopt_topic(
    store: Store, data_dir: DataDir, name: str, by_id: dict[UUID, list[PartitionLog]]
) -> list[PartitionLog]:
    """One topic, of the id that has most of the folders with records. Without a store, also one without records."""
    records = {
        topic_id: sum(map(_has_records, logs)) for topic_id, logs in by_id.items() if not _is_deleted(store, topic_id)
    }
    topic_id = max(records, key=records.__getitem__, default=None)
    if topic_id is None or not (records[topic_id] or store.is_new):
        return []
    unidentified = [index for topic, index in data_dir.unidentified if topic == name]
    count = 1 + max([*(partition_log.partition for partition_log in by_id[topic_id]), *unidentified])
    entry = {"id": topic_id.hex, "partitions": count, "configs": {}}
    store.put(TOPIC_KEY + name, entry | {"epoch_base": max(map(_last_epoch, by_id[topic_id])) + 1})
    log.warning("topic taken over from its folders", extra={"topic": name, "partitions": count})
    return by_id[topic_id]


def _adopt_partitions(store: Store, name: str, by_id: dict[UUID, list[PartitionLog]]) -> list[PartitionLog]:
    """More partitions than the store knows, of the same topic, as after a store was restored from a copy."""
    entry = store.get(TOPIC_KEY + name)
    beyond = [each for each in by_id.get(UUID(entry["id"]), []) if each.partition >= entry["partitions"]]
    count = 1 + max((each.partition for each in beyond if _has_records(each)), default=-1)
    if count <= entry["partitions"]:
        return []
    store.put(TOPIC_KEY + name, entry | {"partitions": count})
    log.warning("partitions taken over from their folders", extra={"topic": name, "partitions": count})
    return beyond


def identify_folders(store: Store, data_dir: DataDir, config: LogConfig) -> None:
    """Opens the folders of known partitions whose topic id cannot be read."""
    for name, index in sorted(data_dir.unidentified):
        entry = store.get(TOPIC_KEY + name)
        if entry is not None and index < entry["partitions"]:
            partition_log = data_dir.identify(name, index, UUID(entry["id"]), config)
            _keep_producer_ids(store, partition_log, partition_log.all_producer_ids)
        else:
            log.error(
                "a folder cannot be used: its partition.metadata cannot be read, and no topic has it; left alone",
                extra={"topic": name, "partition": index},
            )
    store.commit()


def remove_leftovers(store: Store, data_dir: DataDir) -> None:
    """Takes away the folders that belong to no topic, and then the memory of deleted topics."""
    for name, index in list(data_dir.logs):
        entry = store.get(TOPIC_KEY + name)
        if name != KAFKAS_OWN and (entry is None or index >= entry["partitions"]):
            take_away(store, data_dir, data_dir.logs[name, index])
    data_dir.sync_namespace()
    for topic_id in [topic_id for topic_id, _ in store.items(DELETED_KEY)]:
        store.put(DELETED_KEY + topic_id, None)
    store.commit()


def take_away(store: Store, data_dir: DataDir, partition_log: PartitionLog) -> None:
    """Deletes a folder that its topic has no use for; one that holds records is moved aside instead."""
    place = (partition_log.topic, partition_log.partition)
    if _is_deleted(store, partition_log.topic_id) or not _has_records(partition_log):
        data_dir.delete(*place)
    else:
        data_dir.set_aside(*place, f"it holds records of the topic id {partition_log.topic_id}, which no topic has")


def _is_deleted(store: Store, topic_id: UUID) -> bool:
    return store.get(DELETED_KEY + topic_id.hex) is not None


def _last_epoch(partition_log: PartitionLog) -> int:
    try:
        return partition_log.last_epoch
    except StorageError:
        return 0  # the log itself sees to it, once it can be read


def _has_records(partition_log: PartitionLog) -> bool:
    try:
        return partition_log.end_offset > 0
    except StorageError:
        return True  # unreadable for now, which is no reason to throw it away
