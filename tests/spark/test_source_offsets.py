"""The source's plan: which offsets a batch covers, for every way to choose topics, starts, ends and limits.

These tests call the reader as Spark does, without a session: `initialOffset`, `latestOffset`, `partitions`, `read`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel.spark.ledger import LedgerEntry, topic_of
from semel.spark.options import OptionError
from semel.spark.reading import DataLossError
from semel.spark.source import (
    HAS_ADMISSION_CONTROL,
    BatchReader,
    ReadAllAvailable,
    ReadMaxRows,
    SemelDataSource,
    StreamReader,
    StreamReader41,
)
from semel.spark.topics import UnknownTopicError
from tests.support.broker import Cluster
from tests.support.waiting import eventually

PARTITIONS, ROWS = 3, 30
T0 = 1_700_000_000_000  # the first record's timestamp; each further one is a second later


class Topics:
    """Makes topics with records of known offsets and timestamps."""

    def __init__(self, cluster: Cluster) -> None:
        self.bootstrap = cluster.bootstrap
        self.unique = cluster.unique
        self.admin = semel.Admin({"bootstrap.servers": cluster.bootstrap})

    def make(self, stem: str = "src", rows: int = ROWS, partitions: int = PARTITIONS) -> str:
        name = self.unique(stem)
        self.admin.create_topic(name, partitions)
        self.fill(name, rows, partitions)
        return name

    def fill(self, name: str, rows: int, partitions: int = PARTITIONS, first: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for n in range(first, first + rows):
            producer.produce(
                name,
                b"v%d" % n,
                key=b"k%d" % n,
                partition=n % partitions,
                timestamp=T0 + n * 1000,
                headers=[("n", b"%d" % n)],
            )
        assert producer.flush(30) == 0

    def options(self, **options: Any) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.bootstrap, **{k: str(v) for k, v in options.items()}}

    def batch(self, **options: Any) -> list[Any]:
        reader = BatchReader(self.options(**options))
        try:
            return rows_of(reader, reader.partitions())
        finally:
            reader.cluster.close()

    def stream(self, **options: Any) -> Stream:
        return Stream(self.options(**options))


class Stream:
    """A streaming query as far as the source sees it: plans batch after batch, and can crash."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.reader = StreamReader(options)
        self.start: dict[str, Any] = as_json(self.reader.initialOffset())

    def plan(self) -> dict[str, Any]:
        """The end of the next batch, as it would be written into the offset log."""
        return as_json(self.reader.latestOffset(self.start, self.reader.getDefaultReadLimit()))

    def run(self) -> list[Any]:
        """The rows of the next batch."""
        end = self.plan()
        rows = rows_of(self.reader, self.reader.partitions(self.start, end))
        self.start = end
        return rows

    def values(self) -> list[str]:
        return sorted((row["value"].decode() for row in self.run()), key=lambda v: int(v[1:]))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def rows_of(reader: Any, tasks: list[Any]) -> list[Any]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def topics_of(offset: dict[str, Any]) -> set[str]:
    return {name for name in offset if not name.startswith("$")}


def names(first: int, last: int) -> list[str]:
    return [f"v{n}" for n in range(first, last)]


@pytest.fixture
def topics(cluster: Cluster) -> Iterator[Topics]:
    made = Topics(cluster)
    yield made
    made.admin.close()


def values(rows: list[Any]) -> list[str]:
    return sorted((row["value"].decode() for row in rows), key=lambda v: int(v[1:]))


# --- which topics ---


def test_subscribe_names_topics_and_rows_have_the_columns_of_sparks_source(topics: Topics) -> None:
    one, two = topics.make(), topics.make(rows=6)
    rows = topics.batch(subscribe=f"{one}, {two}", includeHeaders="true")
    assert len(rows) == ROWS + 6
    found = next(row for row in rows if row["topic"] == one and row["value"] == b"v4")
    assert found["timestamp"].timestamp() * 1000 == T0 + 4000
    del found["timestamp"]
    assert found == {
        "key": b"k4",
        "value": b"v4",
        "topic": one,
        "partition": 1,
        "offset": 1,
        "timestampType": 0,
        "headers": [{"key": "n", "value": b"4"}],
    }


def test_a_pattern_matches_whole_names_and_no_internal_topic_and_finds_topics_made_later(topics: Topics) -> None:
    stem = topics.unique("pat")
    one, _other = topics.make(f"{stem}-a"), topics.make(f"x{stem}-a")
    stream = topics.stream(subscribePattern=f"({stem}-.*|__.*)", startingOffsets="earliest")
    assert stream.values() == names(0, ROWS)
    assert topics_of(stream.start) == {one}
    two = topics.make(f"{stem}-b", rows=5)
    assert stream.values() == names(0, 5)
    assert topics_of(stream.start) == {one, two}


def test_a_pattern_leaves_out_ledgers_and_the_dead_letters_of_its_application(topics: Topics) -> None:
    stem = topics.unique("own")
    one, dead = topics.make(f"{stem}-in"), f"{stem}-dead"
    topics.admin.create_topic(dead, 1)
    users = f"{stem}-users.ledger"
    topics.admin.create_topic(users, 1)
    mine, other = f"{stem}-mine", f"{stem}-other"
    write_ledger(topics, other, {one: {"0": 1}})
    options = {"subscribePattern": f"{stem}-.*", "startingOffsets": "earliest", "applicationId": mine}
    stream = topics.stream(**options)
    assert stream.values() == names(0, ROWS)
    assert topics_of(stream.start) == {one, dead}  # nobody knows yet whose dead letters those are, and there are none
    write_ledger(topics, mine, {one: {"0": 1}}, dead_letter_topic=dead)
    topics.fill(dead, 3, partitions=1)
    assert stream.run() == []
    topics.fill(users, 5, partitions=1)  # only its name is that of a ledger
    assert stream.values() == names(0, 5)
    assert topics_of(topics.stream(**options).start) == {one, users}
    elsewhere = topics.stream(**{**options, "applicationId": other})  # another application's dead letters are input
    assert topics_of(elsewhere.start) == {one, users, dead}


def test_assign_reads_the_named_partitions_only(topics: Topics) -> None:
    name = topics.make()
    rows = topics.batch(assign=json.dumps({name: [0, 2]}))
    assert {row["partition"] for row in rows} == {0, 2}
    with pytest.raises(UnknownTopicError, match=r"\[7\]"):
        topics.batch(assign=json.dumps({name: [0, 7]}))


def test_a_topic_that_is_not_there_is_an_error_that_names_it(topics: Topics) -> None:
    with pytest.raises(UnknownTopicError, match=r"no-such-topic.*Create it"):
        topics.stream(subscribe="no-such-topic")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one of subscribe"),
        ({"subscribe": "a", "assign": "{}"}, "exactly one of subscribe"),
        ({"subscribe": " "}, "at least one topic"),
        ({"subscribe": ","}, "at least one topic"),
        ({"assign": '{"t": "0"}'}, r'\{"topic": \[0, 1\]\}'),
        ({"subscribePattern": "(["}, "no regular expression"),
        ({"subscribe": "a", "startingOffsets": '{"a": 5}'}, r'\{"topic": \{"0": 23\}\}'),
        ({"subscribe": "a", "startingOffsets": "soonest"}, "earliest"),
        ({"subscribe": "a", "startingTimestamp": "noon"}, "whole number"),
        ({"subscribe": "a", "maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger"),
        ({"subscribe": "a", "kafka.auto.offset.reset": "earliest"}, "startingOffsets"),
        ({"subscribe": "a", "startingOffsets": "latest"}, "use earliest"),
        ({"subscribe": "a", "endingOffsets": '{"a": {"0": -2}}'}, "-1"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "true or false"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        BatchReader({"kafka.bootstrap.servers": "127.0.0.1:1", **options})


def test_options_of_sparks_source_without_meaning_here_are_let_through() -> None:
    harmless = {"groupIdPrefix": "x", "kafkaConsumer.pollTimeoutMs": "5", "fetchOffset.numRetries": "3"}
    BatchReader({"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a", "kafka.group.id": "g", **harmless})


# --- starts and ends ---


def test_batch_reads_between_given_offsets(topics: Topics) -> None:
    name = topics.make()
    start, end = {name: {"0": 2, "1": -2, "2": 5}}, {name: {"0": 4, "1": 3, "2": -1}}
    rows = topics.batch(subscribe=name, startingOffsets=json.dumps(start), endingOffsets=json.dumps(end))
    found = {p: sorted(row["offset"] for row in rows if row["partition"] == p) for p in range(PARTITIONS)}
    assert found == {0: [2, 3], 1: [0, 1, 2], 2: [5, 6, 7, 8, 9]}


@pytest.mark.parametrize("given", [{"0": 2}, {"0": 2, "1": 0, "2": 0, "3": 0}], ids=["too few", "too many"])
def test_offsets_must_name_exactly_the_partitions_that_are_read(topics: Topics, given: dict[str, int]) -> None:
    name = topics.make()
    with pytest.raises(OptionError, match="partition"):
        topics.batch(subscribe=name, startingOffsets=json.dumps({name: given}))
    with pytest.raises(OptionError, match="partition"):
        topics.batch(subscribe=name, startingOffsetsByTimestamp=json.dumps({name: given}))


def test_times_stand_for_the_first_record_at_or_after_them(topics: Topics) -> None:
    name = topics.make()
    by_time = topics.batch(subscribe=name, startingTimestamp=T0 + 9_500, endingTimestamp=T0 + 20_000)
    assert values(by_time) == names(10, 20)
    times = {name: {str(p): T0 + 9_500 for p in range(PARTITIONS)}}
    by_partition = topics.batch(subscribe=name, startingOffsetsByTimestamp=json.dumps(times))
    assert values(by_partition) == names(10, ROWS)
    assert topics.stream(subscribe=name, startingTimestamp=T0 + 9_500).values() == names(10, ROWS)


def test_a_start_behind_the_last_record_is_refused_or_means_the_end_and_an_end_behind_it_means_the_end(
    topics: Topics,
) -> None:
    name = topics.make()
    late = T0 + 1_000_000
    with pytest.raises(OptionError, match="startingOffsetsByTimestampStrategy"):
        topics.batch(subscribe=name, startingTimestamp=late)
    assert topics.batch(subscribe=name, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest") == []
    assert values(topics.batch(subscribe=name, endingTimestamp=late)) == names(0, ROWS)


def test_latest_is_resolved_once_and_a_crash_in_the_first_batch_does_not_move_it(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(subscribe=name)  # latest
    topics.fill(name, 6, first=ROWS)
    end = stream.plan()  # in the offset log; then the driver dies
    topics.fill(name, 6, first=ROWS + 6)
    again = topics.stream(subscribe=name)  # Spark asks for the start again: it is another one by now
    rows = rows_of(again.reader, again.reader.partitions(again.start, end))
    assert values(rows) == names(ROWS, ROWS + 6)


def test_committed_without_an_application_id_or_a_ledger(topics: Topics) -> None:
    name = topics.make()
    with pytest.raises(ValueError, match="applicationId"):
        topics.stream(subscribe=name, startingOffsets="committed")
    nobody = topics.unique("nobody")
    assert topics.stream(subscribe=name, startingOffsets="committed", applicationId=nobody).values() == names(0, ROWS)


def test_committed_offsets_of_a_topic_created_anew_are_refused_or_its_start_is_taken(topics: Topics) -> None:
    name, application = topics.make(), topics.unique("app")
    ends = {name: {str(p): 5 for p in range(PARTITIONS)}, "$ids": {name: "00000000-0000-0000-0000-000000000001"}}
    write_ledger(topics, application, ends)
    options = {"subscribe": name, "startingOffsets": "committed", "applicationId": application}
    with pytest.raises(DataLossError, match="created anew"):
        topics.stream(**options)
    assert topics.stream(**options, failOnDataLoss="false").values() == names(0, ROWS)
    write_ledger(topics, application, {name: ends[name]}, sequence=1)  # of a version that did not store ids
    assert topics.stream(**options).values() == names(15, ROWS)


def write_ledger(topics: Topics, application: str, ends: dict[str, Any], sequence: int = 0, **more: Any) -> None:
    entry = LedgerEntry(
        sequence=sequence, query_id="q", run_id="r", batch_id=0, starts=[None], ends=[json.dumps(ends)], **more
    )
    if topic_of(application) not in topics.admin.list_topics():
        topics.admin.create_topic(topic_of(application), 1)
    producer = Producer({"bootstrap.servers": topics.bootstrap, "log_level": 0})
    producer.produce(topic_of(application), entry.encode(), key=entry.key)
    assert producer.flush(30) == 0


# --- how much at a time ---


def test_batches_are_limited_in_proportion_and_cover_everything_once(topics: Topics) -> None:
    name = topics.make(rows=100)
    stream = topics.stream(subscribe=name, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(30)
    sizes, seen = [], []
    while rows := stream.run():
        sizes.append(len(rows))
        seen += values(rows)
    assert len(sizes) == 4
    assert max(sizes) <= 30
    assert sorted(seen) == sorted(names(0, 100))
    assert stream.plan() == stream.start  # nothing new: the same offset, so Spark runs no batch


def test_few_records_wait_for_more_or_for_the_longest_delay_but_not_at_the_start(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(
        subscribe=name, startingOffsets="earliest", minOffsetsPerTrigger=ROWS + 3, maxTriggerDelay="1h"
    )
    assert stream.values() == names(0, ROWS)  # as Spark's own source
    topics.fill(name, ROWS, first=ROWS)
    assert stream.run() == []
    topics.fill(name, 3, first=2 * ROWS)
    assert stream.values() == names(ROWS, 2 * ROWS + 3)
    topics.fill(name, 3, first=2 * ROWS + 3)
    assert stream.run() == []
    stream.reader._waiting_since_s -= 3601  # the hour is over
    assert stream.values() == names(2 * ROWS + 3, 2 * ROWS + 6)
    topics.fill(name, 3, first=2 * ROWS + 6)
    assert stream.run() == []
    assert stream.reader.latestOffset(stream.start, ReadAllAvailable()) != stream.start  # Trigger.Once


def test_available_now_stops_at_what_was_there_and_ignores_partitions_added_since(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(subscribe=name, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    stream.reader.prepareForTriggerAvailableNow()
    topics.fill(name, 9, first=ROWS)
    topics.admin.create_partitions(name, PARTITIONS + 1)
    seen = []
    while rows := stream.run():
        seen += values(rows)
    assert sorted(seen) == sorted(names(0, ROWS))


def test_more_tasks_than_partitions_read_every_record_once(topics: Topics) -> None:
    name = topics.make()
    for options in ({"minPartitions": 7}, {"maxRecordsPerPartition": 4}):
        reader = BatchReader(topics.options(subscribe=name, **options))
        tasks = reader.partitions()
        assert len(tasks) >= 7
        assert values(rows_of(reader, tasks)) == names(0, ROWS)
        reader.cluster.close()


def test_partitions_added_in_mid_query_are_read_from_their_beginning(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(subscribe=name, startingOffsets="latest")
    assert stream.run() == []
    topics.admin.create_partitions(name, PARTITIONS + 2)
    eventually(lambda: topics.admin.describe_topics([name]), lambda found: len(found[0].partitions) == 5)
    topics.fill(name, 10, partitions=5)
    assert stream.values() == names(0, 10)
    assert len(stream.start[name]) == 5


def test_the_latest_offset_is_reported_for_lag(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(subscribe=name, startingOffsets="earliest", maxOffsetsPerTrigger=3)
    stream.run()
    assert stream.reader.reportLatestOffset() == {name: {str(p): 10 for p in range(PARTITIONS)}}


# --- records that are gone ---


def test_truncated_records_fail_the_query_or_are_left_out(topics: Topics) -> None:
    name = topics.make()
    strict = topics.stream(subscribe=name, startingOffsets="earliest")
    lenient = topics.stream(subscribe=name, startingOffsets="earliest", failOnDataLoss="false")
    topics.admin.delete_records({(name, 0): 4, (name, 1): 10})
    with pytest.raises(DataLossError, match="failOnDataLoss=false"):
        strict.run()
    found = lenient.run()
    assert {p: sum(row["partition"] == p for row in found) for p in range(PARTITIONS)} == {0: 6, 1: 0, 2: 10}


def recreate(topics: Topics, name: str, rows: int) -> None:
    topics.admin.delete_topics([name])
    eventually(topics.admin.list_topics, lambda found: name not in found)
    topics.admin.create_topic(name, PARTITIONS)
    topics.fill(name, rows, first=1000)


@pytest.mark.parametrize("rows", [9, ROWS, 2 * ROWS], ids=["shorter", "as long", "longer"])
def test_a_topic_created_anew_fails_the_query_or_is_read_from_its_start(topics: Topics, rows: int) -> None:
    name = topics.make()
    both = [
        topics.stream(subscribe=name, startingOffsets="earliest", failOnDataLoss=flag) for flag in ("true", "false")
    ]
    strict, lenient = both
    assert [len(stream.run()) for stream in both] == [ROWS, ROWS]
    recreate(topics, name, rows)
    with pytest.raises(DataLossError, match=rf"{name}.*created anew.*failOnDataLoss=false.*new checkpoint"):
        strict.run()
    before = lenient.start
    assert lenient.values() == names(1000, 1000 + rows)
    replayed = StreamReader(lenient.options)  # a crash: Spark plans nothing anew, and reads what the offset log has
    assert values(rows_of(replayed, replayed.partitions(before, lenient.start))) == names(1000, 1000 + rows)
    assert lenient.plan() == lenient.start
    topics.fill(name, 3, first=2000)
    assert lenient.values() == names(2000, 2003)


def test_a_topic_that_is_gone_for_a_while_is_still_known_when_it_is_created_anew(topics: Topics) -> None:
    name, other = topics.make(), topics.make(rows=3)
    stream = topics.stream(subscribe=f"{name},{other}", startingOffsets="earliest", failOnDataLoss="false")
    assert len(stream.run()) == ROWS + 3
    topics.admin.delete_topics([name])
    eventually(topics.admin.list_topics, lambda found: name not in found)
    topics.fill(other, 3, first=100)
    assert stream.values() == names(100, 103)  # a batch without the topic
    topics.admin.create_topic(name, PARTITIONS)
    topics.fill(name, 2 * ROWS, first=1000)
    assert stream.values() == names(1000, 1000 + 2 * ROWS)


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_topics_that_the_options_name_no_more_are_not_said_to_be_deleted(topics: Topics) -> None:
    name, other = topics.make(), topics.make(rows=3)
    before = topics.stream(subscribe=f"{name},{other}", startingOffsets="earliest")
    before.run()
    topics.fill(name, 3, first=100)
    for options in ({"subscribe": name}, {"subscribePattern": name}, {"assign": json.dumps({name: [0, 1, 2]})}):
        changed = topics.stream(**options, startingOffsets="latest")
        changed.start = before.start
        with pytest.raises(DataLossError, match=rf"{other}-0 up to .* do not name it any more.*failOnDataLoss=false"):
            changed.plan()
        lenient = topics.stream(**options, startingOffsets="latest", failOnDataLoss="false")
        lenient.start = before.start
        assert lenient.values() == names(100, 103)
        assert lenient.start[other] == before.start[other]


def test_a_batch_that_was_planned_before_the_topic_was_created_anew_does_not_read_the_new_one(topics: Topics) -> None:
    name = topics.make()
    both = [
        topics.stream(subscribe=name, startingOffsets="earliest", failOnDataLoss=flag) for flag in ("true", "false")
    ]
    planned = [stream.plan() for stream in both]  # in the offset log; then the driver dies
    recreate(topics, name, 2 * ROWS)
    strict, lenient = (StreamReader(stream.options) for stream in both)
    with pytest.raises(DataLossError, match="created anew"):
        rows_of(strict, strict.partitions(both[0].start, planned[0]))
    assert rows_of(lenient, lenient.partitions(both[1].start, planned[1])) == []
    both[1].start = planned[1]
    assert both[1].values() == names(1000, 1000 + 2 * ROWS)


def test_a_checkpoint_without_topic_ids_goes_on_and_gets_them(topics: Topics) -> None:
    name = topics.make()
    stream = topics.stream(subscribe=name, startingOffsets="earliest")
    stream.run()
    stream.start = {topic: parts for topic, parts in stream.start.items() if not topic.startswith("$")}
    assert stream.plan() == stream.start  # nothing new: no batch
    topics.fill(name, 3, first=ROWS)
    assert stream.values() == names(ROWS, ROWS + 3)
    recreate(topics, name, 2 * ROWS)
    with pytest.raises(DataLossError, match="created anew"):
        stream.run()


def test_a_range_that_ends_behind_the_log_is_given_up_where_loss_is_allowed(topics: Topics) -> None:
    name = topics.make()
    reader = StreamReader(topics.options(subscribe=name, failOnDataLoss="false"))
    start, end = ({name: {str(p): at for p in range(PARTITIONS)}} for at in (50, 60))
    assert rows_of(reader, reader.partitions(start, end)) == []
    strict = StreamReader(topics.options(subscribe=name))
    with pytest.raises(DataLossError):
        rows_of(strict, strict.partitions(start, end))


# --- isolation ---


def awaited(stream: Stream) -> list[str]:
    """Kafka answers the end of a transaction before its markers are written."""
    return list(eventually(stream.values, bool))


def test_open_and_aborted_transactions_are_not_read_unless_asked_for(topics: Topics) -> None:
    name = topics.make(rows=0)
    producers = [semel.Producer({"bootstrap.servers": topics.bootstrap, "transactional.id": name + x}) for x in "abc"]
    for partition, producer in enumerate(producers):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(name, value=f"v{partition}".encode(), partition=partition)
        producer.flush()
    producers[0].commit_transaction()
    producers[1].abort_transaction()
    committed = topics.stream(subscribe=name, startingOffsets="earliest")
    everything = topics.stream(
        subscribe=name, startingOffsets="earliest", **{"kafka.isolation.level": "read_uncommitted"}
    )
    assert awaited(committed) == ["v0"]
    assert everything.values() == ["v0", "v1", "v2"]
    producers[2].commit_transaction()
    assert awaited(committed) == ["v2"]
    for producer in producers:
        producer.close()


# --- PySpark 4.1 ---


def test_a_reader_that_is_not_told_where_batches_start_finds_out(topics: Topics) -> None:
    name = topics.make()
    reader = StreamReader41(topics.options(subscribe=name, startingOffsets="latest", maxOffsetsPerTrigger=5))
    topics.fill(name, 6, first=ROWS)  # after the query has started, before Spark asks
    first = as_json(reader.latestOffset())
    topics.fill(name, 3, first=ROWS + 6)
    start = as_json(reader.initialOffset())
    assert rows_of(reader, reader.partitions(start, first)) == []  # latest was resolved at the first question
    second = as_json(reader.latestOffset())
    assert values(rows_of(reader, reader.partitions(first, second))) == names(ROWS + 6, ROWS + 9)
    again = StreamReader41(
        topics.options(subscribe=name, startingOffsets="earliest")
    )  # a restart: availableNow asks first
    third = as_json(again.latestOffset())
    assert rows_of(again, again.partitions(second, third)) == []  # the checkpoint's offset counts, not the option


def test_the_reader_fits_the_version_of_pyspark(topics: Topics) -> None:
    name = topics.make()
    source = SemelDataSource(topics.options(subscribe=name))
    made = source.streamReader(None)  # type: ignore[arg-type]
    assert type(made) is (StreamReader if HAS_ADMISSION_CONTROL else StreamReader41)
    assert topics.stream(subscribe=name).reader.getDefaultReadLimit() == ReadAllAvailable()
