"""Folders in the data folder that the store knows nothing about: which are somebody's records, and which are leftovers.

- A topic's folders without records, of a creation that was never acknowledged: leftovers.
- Folders of a topic whose deletion was acknowledged, but not finished before a crash: leftovers. The store remembers
  the ids of deleted topics until their folders are gone.
- Anything else holds records that somebody put there: copied in, restored, or all that is left after the store was
  lost. It becomes a topic again, with default settings.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from uuid import UUID

from semel.broker.store import Store
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.storage import DataDir, PartitionLog

log = logging.getLogger(__name__)

TOPIC_KEY = "topic/"
DELETED_KEY = "deleted/"
KAFKAS_OWN = "__cluster_metadata"  # a folder that Apache Kafka used before has it; it is neither ours nor to be removed


def adopt_folders(store: Store, data_dir: DataDir) -> None:
    """Gives topics that the store does not know, but that have records, an entry in it."""
    found: dict[str, list[PartitionLog]] = {}
    for (name, _), partition_log in data_dir.logs.items():
        if name != KAFKAS_OWN and store.get(TOPIC_KEY + name) is None:
            found.setdefault(name, []).append(partition_log)
    for name, logs in found.items():
        if store.is_new or (not _is_deleted(store, logs[0].topic_id) and any(map(_has_records, logs))):
            count = 1 + max(partition_log.partition for partition_log in logs)
            entry = {"id": logs[0].topic_id.hex, "partitions": count, "configs": {}}
            store.put(TOPIC_KEY + name, entry | {"epoch_base": max(map(_last_epoch, logs)) + 1})
            log.warning("topic taken over from its folders", extra={"topic": name, "partitions": count})
    store.commit()


def remove_leftovers(store: Store, data_dir: DataDir) -> None:
    """Takes away the folders that belong to no topic, and then the memory of deleted topics."""
    for name, index in list(data_dir.logs):
        entry = store.get(TOPIC_KEY + name)
        if name != KAFKAS_OWN and (entry is None or index >= entry["partitions"]):
            data_dir.delete(name, index)
    data_dir.sync_namespace()
    for topic_id in [topic_id for topic_id, _ in store.items(DELETED_KEY)]:
        store.put(DELETED_KEY + topic_id, None)
    store.commit()


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
