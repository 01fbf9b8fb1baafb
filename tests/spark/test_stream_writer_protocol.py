"""The stream writer's protocol, played as Spark plays it: plan (pickle), tasks, commit or abort in another process.

No Spark session: the checkpoint is a folder with Spark's files, a task is a thread of the test with a made-up context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.cloudpickle import dumps, loads
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

import semel
from semel.spark.checkpoint import CheckpointError
from semel.spark.options import OptionError
from semel.spark.sink_options import ColumnError
from semel.spark.stream_writer import StreamWriter, WrongBatchError
from semel.spark.transaction import RefusedError, UnevenError
from semel.spark.writing import WrongTaskError
from tests.support.broker import Cluster
from tests.support.reading import read_values
from tests.support.waiting import eventually

QUERY = "11111111-2222-3333-4444-555555555555"
PARTITIONS = 2
TYPES = {"key": BinaryType(), "value": BinaryType(), "partition": IntegerType()}


def schema(*names: str) -> StructType:
    return StructType([StructField(name, TYPES[name]) for name in names or TYPES])


class Context:
    """What a task knows about itself."""

    attempts = 0

    def __init__(self, query: str, batch: int, task: int) -> None:
        Context.attempts += 1
        self._attempt, self._task = Context.attempts, task
        self._properties = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}

    def partitionId(self) -> int:
        return self._task

    def taskAttemptId(self) -> int:
        return self._attempt

    def attemptNumber(self) -> int:
        return 0

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class Query:
    """A query that writes with `format("semel")`, one call per thing that Spark does."""

    def __init__(self, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self.cluster, self.checkpoint, self._patch = cluster, folder / "checkpoint", monkeypatch
        self.topic = options.pop("topic", "") or cluster.unique("stream-out")
        self.source = options.pop("source", "") or cluster.unique("stream-in")
        self.id = options.pop("id", QUERY)
        self.drivers = folder
        self.options = {
            "kafka.bootstrap.servers": cluster.bootstrap,
            "topic": self.topic,
            "applicationId": cluster.unique("stream-app"),
            "checkpointlocation": f"file://{self.checkpoint}",
            **options,
        }
        for name in ("offsets", "commits"):
            (self.checkpoint / name).mkdir(parents=True, exist_ok=True)
        (self.checkpoint / "metadata").write_text(json.dumps({"id": self.id}))
        self.use_driver("first")

    def use_driver(self, name: str) -> None:
        """Another Spark application: another folder of its own."""
        folder = self.drivers / f"driver-{name}"
        folder.mkdir(exist_ok=True)
        self._patch.setenv("SPARK_LOCAL_DIRS", f"{folder},/elsewhere")

    def log(self, batch: int, end: int) -> None:
        """Spark writes the offset log before it plans a batch."""
        offsets = json.dumps({self.source: {"0": end}})
        (self.checkpoint / f"offsets/{batch}").write_text("v1\n{}\n" + offsets)

    def finish(self, batch: int) -> None:
        (self.checkpoint / f"commits/{batch}").write_text("v1\n{}")

    def writer(self) -> StreamWriter:
        return StreamWriter(self.options, schema())

    def plan(self) -> bytes:
        return dumps(self.writer())

    def write(self, planned: bytes, batch: int, rows: dict[int, list[tuple[int, str]]]) -> list[Any]:
        """Tasks; rows are (partition, value)."""
        messages = []
        for task, values in rows.items():
            self._patch.setattr(TaskContext, "get", lambda task=task: Context(self.id, batch, task))
            columns = {
                "key": pa.array([None] * len(values), pa.binary()),
                "value": pa.array([value.encode() for _, value in values], pa.binary()),
                "partition": pa.array([partition for partition, _ in values], pa.int32()),
            }
            messages.append(loads(planned).write(iter([pa.RecordBatch.from_pydict(columns)])))
        return messages

    def run(self, batch: int, end: int, rows: dict[int, list[tuple[int, str]]]) -> None:
        self.log(batch, end)
        self.writer().commit(self.write(self.plan(), batch, rows), batch)
        self.finish(batch)

    def output(self) -> list[str]:
        found = read_values(self.cluster.bootstrap, self.topic)
        return sorted((value or b"").decode() for _, _, value in found)


@pytest.fixture
def query(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Query:
    made = Query(cluster, tmp_path, monkeypatch)
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(made.topic, PARTITIONS)
        admin.create_topic(made.source, 1)
    return made


def rows(*values: str) -> dict[int, list[tuple[int, str]]]:
    """One task per partition."""
    return {p: [(p, v) for n, v in enumerate(values) if n % PARTITIONS == p] for p in range(PARTITIONS)}


def test_batches_follow_each_other_and_the_group_has_the_offsets(query: Query) -> None:
    query.run(0, 2, rows("a", "b"))
    query.run(1, 5, rows("c", "d", "e"))
    assert query.output() == ["a", "b", "c", "d", "e"]
    with semel.Admin({"bootstrap.servers": query.cluster.bootstrap}) as admin:
        offset = eventually(  # Kafka answers the end of a transaction before its markers are written
            lambda: admin.group_offsets(query.options["applicationId"])[query.source, 0].offset, lambda at: at == 5
        )
    assert offset == 5


def test_offsets_of_a_source_that_this_cluster_does_not_have_are_left_out(query: Query) -> None:
    query.source = "a-topic-of-another-cluster"
    query.run(0, 2, rows("a", "b"))
    with semel.Admin({"bootstrap.servers": query.cluster.bootstrap}) as admin:
        assert admin.group_offsets(query.options["applicationId"]) == {}
    query.run(1, 3, rows("c"))  # the ledger has them, and that is what counts
    assert query.output() == ["a", "b", "c"]


def test_a_batch_that_was_committed_before_the_crash_is_not_written_again(query: Query) -> None:
    query.run(0, 2, rows("a", "b"))
    query.log(1, 4)
    query.writer().commit(query.write(query.plan(), 1, rows("c", "d")), 1)
    query.use_driver("second")  # the driver dies before Spark's commit log
    query.run(1, 4, rows("c", "d"))
    query.run(2, 5, rows("e"))
    assert query.output() == ["a", "b", "c", "d", "e"]


def test_a_batch_that_was_not_committed_is_aborted_by_the_next_driver(query: Query) -> None:
    query.run(0, 2, rows("a", "b"))
    query.log(1, 4)
    dead = query.write(query.plan(), 1, rows("c", "d"))
    query.use_driver("second")
    planned = query.plan()
    with pytest.raises(Exception, match="tasks reported other counts than the log holds"):
        query.writer().commit(dead, 1)  # the first driver wakes up
    query.writer().commit(query.write(planned, 1, rows("c", "d")), 1)
    assert query.output() == ["a", "b", "c", "d"]


def test_stateful_batch_that_gives_other_rows_when_it_runs_again_is_refused(query: Query) -> None:
    (query.checkpoint / "state" / "0").mkdir(parents=True)
    query.log(0, 2)
    query.writer().commit(query.write(query.plan(), 0, rows("a", "b")), 0)
    query.writer().commit(query.write(query.plan(), 0, rows("a", "b")), 0)
    with pytest.raises(RefusedError, match="gave other rows than it had written"):
        query.writer().commit(query.write(query.plan(), 0, rows("a", "c")), 0)
    query.options["acceptLostState"] = "true"
    query.writer().commit(query.write(query.plan(), 0, rows("a", "c")), 0)
    assert query.output() == ["a", "b"]


def test_a_frozen_driver_does_not_take_the_id_back(query: Query) -> None:
    query.run(0, 2, rows("a", "b"))
    query.use_driver("second")
    query.run(1, 4, rows("c", "d"))
    query.use_driver("first")
    query.log(2, 6)
    with pytest.raises(Exception, match="taken over by another driver"):
        query.plan()
    query.use_driver("second")
    query.run(2, 6, rows("e", "f"))
    assert query.output() == ["a", "b", "c", "d", "e", "f"]


def test_a_failed_batch_is_aborted_with_and_without_messages_and_runs_again(query: Query) -> None:
    query.log(0, 2)
    some = query.write(query.plan(), 0, {0: [(0, "x")]})
    query.writer().abort([*some, None], 0)
    query.write(query.plan(), 0, {0: [(0, "y")]})
    query.writer().abort([None, None], 0)  # no task came through: the driver's own file knows the transaction
    query.run(0, 2, rows("a", "b"))
    assert query.output() == ["a", "b"]


def test_rows_of_a_dead_attempt_are_found_by_the_audit(query: Query) -> None:
    query.log(0, 2)
    planned = query.plan()
    query.write(planned, 0, {0: [(0, "of a dead attempt")]})
    messages = query.write(planned, 0, {1: [(1, "b")]})
    with pytest.raises(UnevenError):
        query.writer().commit(messages, 0)
    query.writer().abort(messages, 0)
    assert query.output() == []


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_dead_letters_of_two_tasks_need_two_partitions_and_the_error_says_so(query: Query) -> None:
    bad = {0: [(0, "a"), (98, "x")], 1: [(1, "b"), (99, "y")]}
    for partitions in (1, PARTITIONS):
        dead = query.options["deadLetterTopic"] = query.cluster.unique("stream-dead")
        with semel.Admin({"bootstrap.servers": query.cluster.bootstrap}) as admin:
            admin.create_topic(dead, partitions)
        if partitions == 1:
            query.log(0, 4)
            with pytest.raises(WrongTaskError, match=f"{dead}-0 .* dead letters.*at least as many partitions"):
                query.write(query.plan(), 0, bad)
        else:
            query.run(0, 4, bad)
            assert sorted(value for _, _, value in read_values(query.cluster.bootstrap, dead)) == [b"x", b"y"]
    assert query.output() == ["a", "b"]


def test_rows_of_one_partition_in_two_tasks_are_refused_with_the_way_out(query: Query) -> None:
    query.log(0, 2)
    with pytest.raises(WrongTaskError, match=r"semel\.route"):
        query.write(query.plan(), 0, {0: [(0, "a")], 1: [(0, "b")]})


@pytest.mark.parametrize(
    ("batch", "end"), [(0, 3), (1, 1)], ids=["the same number with another range", "a start that does not follow"]
)
def test_a_checkpoint_that_the_ledger_did_not_grow_with_is_refused(query: Query, batch: int, end: int) -> None:
    query.run(0, 2, rows("a", "b"))
    (query.checkpoint / "commits/0").unlink()
    for n in range(batch + 1):
        query.log(n, end)
    with pytest.raises(Exception, match="startingOffsets=committed"):
        query.plan()
    assert query.output() == ["a", "b"]


def test_another_query_under_the_same_application_id_is_refused_and_fences_nobody(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(0, 2, rows("a", "b"))
    query.log(1, 3)
    planned = query.plan()
    shared = {
        "topic": query.topic,
        "source": query.source,
        "applicationId": query.options["applicationId"],
        "id": QUERY[::-1],
    }
    other = Query(query.cluster, tmp_path / "other", monkeypatch, **shared)
    other.log(0, 1)
    with pytest.raises(Exception, match="own application id"):
        other.plan()
    query.use_driver("first")
    query.writer().commit(query.write(planned, 1, {0: [(0, "c")]}), 1)
    assert query.output() == ["a", "b", "c"]


def test_a_task_of_another_batch_writes_nothing(query: Query) -> None:
    query.log(0, 2)
    with pytest.raises(WrongBatchError, match="batch 7"):
        query.write(query.plan(), 7, {0: [(0, "a")]})
    with pytest.raises(WrongBatchError):
        query.writer().commit(query.write(query.plan(), 0, {0: [(0, "a")]}), 1)
    assert query.output() == []


def test_a_batch_without_rows_moves_the_offsets_and_one_without_progress_leaves_no_entry(query: Query) -> None:
    query.run(0, 2, {0: []})
    query.run(1, 2, {0: []})  # nothing read, nothing written
    query.run(2, 3, rows("a"))
    assert query.output() == ["a"]


def test_an_existing_checkpoint_is_adopted_by_name_only(query: Query) -> None:
    for batch in range(3):
        query.log(batch, batch)
        query.finish(batch)
    query.log(3, 4)
    with pytest.raises(Exception, match="adopt"):
        query.plan()
    query.options["adoptCheckpoint"] = "true"
    query.run(3, 4, rows("a"))
    assert query.output() == ["a"]


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_wrong_options_and_columns_are_refused_before_anything_runs(query: Query) -> None:
    def refused(said: str, *columns: str, **changes: str | None) -> None:
        options = {k: v for k, v in {**query.options, **changes}.items() if v is not None}
        with pytest.raises((OptionError, ColumnError, CheckpointError), match=said):
            StreamWriter(options, schema(*columns)).__getstate__()

    refused("kafka.bootstrap.servers", **{"kafka.bootstrap.servers": None})
    refused("applicationId", applicationId=None)
    refused("checkpointLocation", checkpointlocation=None)
    refused("did you mean deadLetterTopic", deadLeterTopic="x")
    refused("true or false", adoptCheckpoint="perhaps")
    refused("exactly_once", guarantee="at_least_once")
    refused("after a batch has run", asyncProgressTrackingEnabled="true")
    refused("no column 'value'", "key")
    refused("semel.route", "key", "value", partitioner="hash")
    refused("no offsets yet")
    query.log(0, 1)
    query.finish(0)
    refused("finished")


def test_errors_keep_their_class_name_through_sparks_pickling(query: Query) -> None:
    """Spark's serializer wraps what pickling raises; users must still find the reason in the text."""
    from pyspark.serializers import CloudPickleSerializer

    query.run(0, 2, rows("a", "b"))
    query.log(2, 9)
    query.log(1, 7)
    with pytest.raises(Exception, match=f"{RefusedError.__name__}.*covers"):
        CloudPickleSerializer().dumps(query.writer())
