"""Which topics and partitions exist when a broker starts: store and folders in, a plan out.

- The store has the topic and the partition, and the folder has the topic's id: it is the partition.
- The folder's partition.metadata cannot be read: it is the partition that its name says, if the topic has that one.
- The folder has records, but the store does not know its topic: it was copied in, restored, or the store was lost. It
  becomes a topic with default settings. If its topic is known, but has fewer partitions, the topic gets more.
- The store has the id of a deleted topic until the topic's folders are gone: such a folder is deleted.
- A folder that never had a record is what a creation left that was never acknowledged: it is deleted.
- Any other folder, as one with records of a second topic id under one name, is moved aside.
- A partition of the store without a folder gets an empty one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from semel.storage import DataDir, PartitionLog, StorageError

KAFKAS_OWN = "__cluster_metadata"  # in a data folder that Apache Kafka used before; it is left alone

TopicPartition = tuple[str, int]
StoredTopic = Mapping[str, Any]  # an entry of the store: id, partitions, configs, epoch_base


class PartitionFolder(NamedTuple):
    topic: str
    partition: int
    topic_id: UUID | None  # None: its partition.metadata cannot be read
    has_records: bool = False  # or may have; looked at only where the store does not know the partition
    last_epoch: int = -1

    @property
    def key(self) -> TopicPartition:
        return self.topic, self.partition


@dataclass(slots=True)
class PartitionPlan:
    """What a start has to do, in this order. A partition that is in none of the lists is there and is opened."""

    topics: dict[str, StoredTopic]  # all that exist
    changed: list[str] = field(default_factory=list)  # topics that the store does not have so
    taken_over: list[TopicPartition] = field(default_factory=list)  # folders that the store did not know
    identify: list[TopicPartition] = field(default_factory=list)  # folders that get the id of their topic
    delete: list[TopicPartition] = field(default_factory=list)
    move_aside: list[TopicPartition] = field(default_factory=list)
    leave: list[TopicPartition] = field(default_factory=list)  # not identified, and no topic has them
    create: list[TopicPartition] = field(default_factory=list)


def plan_partitions(
    stored: Mapping[str, StoredTopic],
    deleted: Collection[UUID],
    folders: Iterable[PartitionFolder],
    *,
    store_is_new: bool,
) -> PartitionPlan:
    """Decides about every folder and every partition. `deleted`: ids of topics whose deletion was acknowledged."""
    plan = PartitionPlan(dict(stored))
    by_topic: dict[str, list[PartitionFolder]] = {}
    for folder in folders:
        if folder.topic != KAFKAS_OWN:
            by_topic.setdefault(folder.topic, []).append(folder)
    present: set[TopicPartition] = set()
    for name, found in by_topic.items():
        known = stored.get(name)
        topic = _new_topic(found, deleted, store_is_new) if known is None else _grown_topic(known, found)
        if topic is None:
            topic = known
        else:
            plan.topics[name] = topic
            plan.changed.append(name)
            before = known["partitions"] if known is not None else 0
            plan.taken_over += [each.key for each in found if _belongs(each, topic) and each.partition >= before]
        for folder in found:
            _place(plan, present, folder, topic, deleted)
    for name, topic in plan.topics.items():
        keys = ((name, index) for index in range(topic["partitions"]))
        plan.create += [key for key in keys if key not in present]
    return plan


def _place(
    plan: PartitionPlan,
    present: set[TopicPartition],
    folder: PartitionFolder,
    topic: StoredTopic | None,
    deleted: Collection[UUID],
) -> None:
    if folder.topic_id is None:
        if topic is None or folder.partition >= topic["partitions"]:
            plan.leave.append(folder.key)
            return
        plan.identify.append(folder.key)
        present.add(folder.key)
    elif topic is not None and _belongs(folder, topic):
        present.add(folder.key)
    elif folder.topic_id in deleted or not folder.has_records:
        plan.delete.append(folder.key)
    else:
        plan.move_aside.append(folder.key)


def _belongs(folder: PartitionFolder, topic: StoredTopic) -> bool:
    """Whether a folder is a partition of a topic by its id."""
    return folder.topic_id == UUID(topic["id"]) and folder.partition < topic["partitions"]


def _new_topic(found: list[PartitionFolder], deleted: Collection[UUID], store_is_new: bool) -> StoredTopic | None:
    """A topic of the id that has most of the folders with records. With a new store, also one without records."""
    records: dict[UUID, int] = {}
    for folder in found:
        if folder.topic_id is not None and folder.topic_id not in deleted:
            records[folder.topic_id] = records.get(folder.topic_id, 0) + folder.has_records
    topic_id = max(records, key=records.__getitem__, default=None)
    if topic_id is None or not (records[topic_id] or store_is_new):
        return None
    own = [folder for folder in found if folder.topic_id in (topic_id, None)]
    epoch_base = 1 + max(folder.last_epoch for folder in own if folder.topic_id is not None)
    partitions = 1 + max(folder.partition for folder in own)
    return {"id": topic_id.hex, "partitions": partitions, "configs": {}, "epoch_base": epoch_base}


def _grown_topic(topic: StoredTopic, found: list[PartitionFolder]) -> StoredTopic | None:
    """The topic with as many partitions as its folders with records need; None if it has them."""
    topic_id = UUID(topic["id"])
    count = 1 + max((each.partition for each in found if each.topic_id == topic_id and each.has_records), default=-1)
    return {**topic, "partitions": count} if count > topic["partitions"] else None


def find_folders(
    stored: Mapping[str, StoredTopic], deleted: Collection[UUID], data_dir: DataDir
) -> list[PartitionFolder]:
    """The partition folders. Logs are read only where the plan needs to know whether they have records."""
    folders = [PartitionFolder(*key, None) for key in sorted(data_dir.unidentified)]
    for key, log in data_dir.logs.items():
        topic = stored.get(key[0])
        folder = PartitionFolder(*key, log.topic_id)
        is_known = topic is not None and _belongs(folder, topic)
        if not is_known and log.topic_id not in deleted and key[0] != KAFKAS_OWN:
            folder = folder._replace(has_records=_has_records(log), last_epoch=_last_epoch(log))
        folders.append(folder)
    return folders


def _last_epoch(log: PartitionLog) -> int:
    try:
        return log.last_epoch
    except StorageError:
        return 0  # the log itself raises its leader epoch, once it can be read


def _has_records(log: PartitionLog) -> bool:
    try:
        return log.end_offset > 0
    except StorageError:
        return True  # unreadable for now, which is no reason to delete it
