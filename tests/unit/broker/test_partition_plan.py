"""What a start decides about topics and folders, as a table: nothing with records is ever deleted by inference."""

from __future__ import annotations

import itertools
from uuid import UUID

import pytest

from semel.broker.partition_plan import KAFKAS_OWN, PartitionFolder, PartitionPlan, StoredTopic, plan_partitions

A, B = UUID(int=0xA), UUID(int=0xB)
T0, T1, T2 = ("t", 0), ("t", 1), ("t", 2)


def topic(topic_id: UUID = A, partitions: int = 1, epoch_base: int = 5) -> StoredTopic:
    return {"id": topic_id.hex, "partitions": partitions, "configs": {"retention.ms": "1"}, "epoch_base": epoch_base}


def new_topic(topic_id: UUID = A, partitions: int = 1, epoch_base: int = 0) -> StoredTopic:
    return {"id": topic_id.hex, "partitions": partitions, "configs": {}, "epoch_base": epoch_base}


def folder(index: int = 0, topic_id: UUID | None = A, records: bool = False, epoch: int = -1) -> PartitionFolder:
    return PartitionFolder("t", index, topic_id, records, epoch)


def made(
    stored: StoredTopic | None, folders: list[PartitionFolder], deleted: set[UUID], store_is_new: bool
) -> PartitionPlan:
    return plan_partitions({} if stored is None else {"t": stored}, deleted, folders, store_is_new=store_is_new)


CASES: dict[str, tuple] = {
    # stored topic, folders, ids of deleted topics, store is new -> topic, and what the plan lists
    "nothing": (None, [], (), False, None, {}),
    "a known partition is opened": (topic(), [folder()], (), False, topic(), {}),
    "a partition without a folder gets one": (
        topic(partitions=2),
        [folder(1)],
        (),
        False,
        topic(partitions=2),
        {"create": [T0]},
    ),
    "a folder without id is the partition of its name": (
        topic(),
        [folder(0, None)],
        (),
        False,
        topic(),
        {"identify": [T0]},
    ),
    "a folder without id that no topic has is left": (None, [folder(0, None)], (), True, None, {"leave": [T0]}),
    "a folder without id beyond the partitions is left": (
        topic(),
        [folder(), folder(1, None)],
        (),
        False,
        topic(),
        {"leave": [T1]},
    ),
    "an unknown folder with records becomes a topic": (
        None,
        [folder(0, A, True, 3)],
        (),
        False,
        new_topic(epoch_base=4),
        {"changed": ["t"], "taken_over": [T0]},
    ),
    "its other partitions come with it": (
        None,
        [folder(2, A, True), folder(0)],
        (),
        False,
        new_topic(partitions=3),
        {"changed": ["t"], "taken_over": [T2, T0], "create": [T1]},
    ),
    "a folder without id comes with its topic": (
        None,
        [folder(0, A, True), folder(1, None)],
        (),
        False,
        new_topic(partitions=2),
        {"changed": ["t"], "taken_over": [T0], "identify": [T1]},
    ),
    "an unknown folder without records is deleted": (None, [folder()], (), False, None, {"delete": [T0]}),
    "with a new store it becomes a topic": (
        None,
        [folder()],
        (),
        True,
        new_topic(),
        {"changed": ["t"], "taken_over": [T0]},
    ),
    "a folder of a deleted topic is deleted": (None, [folder(0, A, True)], (A,), False, None, {"delete": [T0]}),
    "also with a new topic of its name": (
        topic(B),
        [folder(0, A, True)],
        (A,),
        False,
        topic(B),
        {"delete": [T0], "create": [T0]},
    ),
    "records of another id are moved aside": (
        topic(B),
        [folder(0, A, True)],
        (),
        False,
        topic(B),
        {"move_aside": [T0], "create": [T0]},
    ),
    "another id without records is deleted": (
        topic(B),
        [folder(0, A)],
        (),
        False,
        topic(B),
        {"delete": [T0], "create": [T0]},
    ),
    "the id with most records becomes the topic": (
        None,
        [folder(0, A, True), folder(1, B, True), folder(2, B, True)],
        (),
        True,
        new_topic(B, 3),
        {"changed": ["t"], "taken_over": [T1, T2], "move_aside": [T0], "create": [T0]},
    ),
    "records beyond the partitions add partitions": (
        topic(),
        [folder(), folder(2, A, True)],
        (),
        False,
        topic(partitions=3),
        {"changed": ["t"], "taken_over": [T2], "create": [T1]},
    ),
    "beyond the partitions without records is deleted": (
        topic(),
        [folder(), folder(1)],
        (),
        False,
        topic(),
        {"delete": [T1]},
    ),
    "records of another id beyond the partitions are moved aside": (
        topic(),
        [folder(), folder(1, B, True)],
        (),
        False,
        topic(),
        {"move_aside": [T1]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_a_start(case: str) -> None:
    stored, folders, deleted, store_is_new, expected, lists = CASES[case]
    plan = made(stored, folders, set(deleted), store_is_new)
    assert plan == PartitionPlan({} if expected is None else {"t": expected}, **lists)


def test_kafkas_own_metadata_is_neither_a_topic_nor_deleted() -> None:
    own = PartitionFolder(KAFKAS_OWN, 0, A, False)
    assert plan_partitions({}, set(), [own], store_is_new=True) == PartitionPlan({})


def test_whatever_is_found_no_record_is_deleted_and_every_partition_has_one_place() -> None:
    """All pairs of folders with every store: 2 x 7 x 7 x 3 x 2 cases."""
    kinds = [None, *itertools.product((A, B, None), (False, True))]
    stores = [None, topic(A), topic(A, 2)]
    for first, second, stored, deleted, is_new in itertools.product(kinds, kinds, stores, (set(), {B}), (False, True)):
        pairs = enumerate((first, second))
        folders = [folder(index, kind[0], kind[0] is not None and kind[1]) for index, kind in pairs if kind is not None]
        plan = made(stored, folders, deleted, is_new)
        by_key = {each.key: each for each in folders}
        assert all(by_key[key].topic_id in deleted or not by_key[key].has_records for key in plan.delete)
        gone = [*plan.delete, *plan.move_aside, *plan.leave]
        assert len(set(gone)) == len(gone)
        for name, entry in plan.topics.items():
            keys = {(name, index) for index in range(entry["partitions"])}
            assert not keys & set(plan.leave)
            opened = (set(by_key) - set(gone)) & keys
            assert opened | set(plan.create) == keys
            assert not opened & set(plan.create)
            ids = {by_key[key].topic_id for key in opened - set(plan.identify)}
            assert ids <= {UUID(entry["id"])}
        assert stored is None or plan.topics["t"]["partitions"] >= stored["partitions"]
