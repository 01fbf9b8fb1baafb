"""The parts of the writers that need no broker: options, columns, and where a hash puts a key."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from semel.protocol.columns_encode import EncodeError
from semel.spark import sink as sink_module
from semel.spark.base_sink import BaseSink, SinkError
from semel.spark.encoding import Encoder, Routing, Targets
from semel.spark.fast_lane import writable
from semel.spark.ledger import LedgerEntry, MicroBatch, refuse_lost_state
from semel.spark.options import OptionError
from semel.spark.range_tasks import FunctionError, as_table
from semel.spark.sink_options import ColumnError, SinkOptions, check_columns, types_of, writer_options, written_columns
from semel.spark.transaction import BatchTransaction, RefusedError, source_offsets

GIVEN = {"kafka.bootstrap.servers": "b:9092", "applicationId": "app", "topic": "out"}


def options(**more: object) -> SinkOptions:
    return SinkOptions(bootstrap_servers="b:9092", application_id="app", topic="out", **more)  # type: ignore[arg-type]


def test_options_of_a_writer_are_those_of_the_sink():
    found = writer_options(
        {
            **GIVEN,
            "TOPICS": "a, b",
            "badColumn": "doubt",
            "transactionTimeoutMs": "5000",
            "adoptCheckpoint": "True",
            "kafka.security.protocol": "SSL",
            "kafka.client.dns.lookup": "use_all_dns_ips",
            "checkpointLocation": "/c",
            "queryName": "q",
            "jobId": "7",
        },
        also=("jobId",),
    )
    assert found.extra_topics == ("a", "b")
    assert (found.bad_column, found.transaction_timeout_ms, found.adopt_checkpoint) == ("doubt", 5000, True)
    assert found.client == {"security.protocol": "SSL"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"jobId": "7"}, "no option 'jobid'"),
        ({"partitoner": "none"}, "did you mean partitioner"),
        ({"transactionTimeoutMs": "soon"}, "a whole number"),
        ({"partitioner": "random"}, "murmur2"),
        ({"kafka.max.request.size": "9000000"}, "maxRequestSize of a writer"),
        ({"kafka.transaction.timeout.ms": "9000"}, "transactionTimeoutMs of a writer"),
    ],
)
def test_options_that_cannot_be_are_refused(more, said):
    with pytest.raises(OptionError, match=said):
        writer_options({**GIVEN, **more})


def test_only_known_columns_are_written_and_a_topic_counts_where_there_are_several():
    batch = pa.record_batch(
        {"key": ["k"], "value": ["v"], "topic": ["in"], "offset": [5], "partition": pa.array([1], pa.int64())}
    )
    assert written_columns(batch, options()).schema == pa.schema(
        [("key", pa.string()), ("value", pa.string()), ("partition", pa.int64())]
    )
    assert "topic" in written_columns(batch, options(extra_topics=("in",))).schema.names


def test_a_key_in_capital_letters_is_refused_because_it_would_be_left_out():
    for name in ("KEY", "Headers"):
        with pytest.raises(ColumnError, match=f"rename it, such as {name} AS {name.lower()}"):
            check_columns({"value": "binary", name: "binary"}, options())
    check_columns({"value": "binary", "key": "binary", "KEY": "int", "Timestamp": "bigint"}, options())


def test_a_partition_or_a_time_in_capital_letters_is_refused_because_it_would_be_left_out():
    """Rows would go elsewhere, or have the time of writing. A number is no time."""
    for name, kind in (("PARTITION", "int"), ("Timestamp", "timestamp"), ("TIMESTAMP", "timestamp_ntz")):
        with pytest.raises(ColumnError, match=f"rename it, such as {name} AS {name.lower()}"):
            check_columns({"value": "binary", name: kind}, options())
    check_columns({"value": "binary", "Timestamp": "bigint"}, options())


def test_a_topic_in_capital_letters_is_refused_where_rows_name_their_topics():
    """All rows would go to the default topic."""
    with pytest.raises(ColumnError, match="rename it, such as TOPIC AS topic"):
        check_columns({"value": "binary", "TOPIC": "string"}, options(extra_topics=("in",)))
    check_columns({"value": "binary", "TOPIC": "string"}, options())


def test_a_timestamp_that_is_a_number_is_refused_because_nobody_knows_its_unit():
    for kind in ("bigint", "string"):
        with pytest.raises(ColumnError, match=f"'timestamp' is {kind}, expected timestamp.*timestamp_millis"):
            check_columns({"value": "binary", "timestamp": kind}, options())
    for kind in ("timestamp", "timestamp_ntz"):
        check_columns({"value": "binary", "timestamp": kind}, options())


def test_a_hash_of_spark_decides_where_there_is_one_and_null_keys_are_shared_out():
    routing = Routing(
        targets=Targets({"out": 4}),
        topic="out",
        dead_letter=None,
        partitioner="hash",
        batch_id=2,
        timestamp_ms=0,
        max_record_bytes=1000,
        batch_bytes=1000,
        compression=0,
    )
    table = pa.table({"value": [b""] * 5, "hash": pa.array([0, -1, 7, -9_223_372_036_854_775_808, None], pa.int64())})
    for _ in range(2):  # a task that runs again does the same
        targets, dead = Encoder(routing, task=3)._targets(table)
        assert dead is None
        assert targets.tolist()[:4] == [0, 3, 3, 0]  # as Spark's pmod
        assert targets.tolist()[4] == (3 + 2 + 1) % 4
    assert targets.dtype == np.int64


def test_a_function_may_return_tables_batches_or_nothing_and_needs_a_value():
    table = pa.table({"value": ["a"], "offset": [1], "doubt": [True]})
    assert as_table(None) is None
    assert as_table(table.to_batches()[0]) == table
    assert writable(table, "doubt").column_names == ["value", "bad"]
    with pytest.raises(TypeError, match=r"str, expected a pyarrow\.Table"):
        as_table("a")
    with pytest.raises(FunctionError, match="'value' is needed"):
        writable(pa.table({"key": ["a"]}))


def test_columns_of_a_function_with_nothing_but_nulls_get_the_type_of_their_name():
    """Arrow has no type for a list that is all None, and whether one is depends on the records."""
    names = ("key", "value", "headers", "timestamp", "partition", "topic", "doubt")
    found = writable(pa.table({name: pa.nulls(3) for name in names}), "doubt")
    assert {name: str(found.column(name).type) for name in found.column_names} == {
        "key": "binary",
        "value": "binary",
        "headers": "list<item: struct<key: string, value: binary>>",
        "timestamp": "timestamp[ms]",
        "partition": "int64",
        "topic": "string",
        "bad": "string",
    }
    assert all(column.null_count == 3 for column in found.columns)
    views = pa.table({"key": pa.array(["a"], pa.string_view()), "value": pa.array([b"x"], pa.binary_view())})
    assert writable(views).schema.types == [pa.string(), pa.binary()]
    assert writable(views, views=True) == views


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"partition": pa.array(["0"])}, "'partition' of type string, expected an integer"),
        ({"partition": pa.array([0.5])}, "'partition' of type double, expected an integer"),
        ({"headers": pa.array([[("a", b"1")]], pa.map_(pa.string(), pa.binary()))}, "headers of type map"),
    ],
)
def test_columns_of_a_function_in_types_that_cannot_be_written_are_named(column, why):
    with pytest.raises((FunctionError, EncodeError), match=why):
        writable(pa.table({"value": ["a"], **column}))


def test_offsets_of_a_topic_in_two_sources_are_the_lower_ones_and_other_sources_have_none():
    lines: list[str | None] = ['{"t":{"0":5,"1":9}}', '{"t":{"0":7,"1":2}}', '{"logOffset":3}', None]
    found = source_offsets(lines, lambda topic: True)
    assert {place: at.offset for place, at in found.items()} == {("t", 0): 5, ("t", 1): 2}
    assert source_offsets(lines, lambda topic: False) == {}


def test_state_is_lost_with_another_checkpoint_only():
    last = LedgerEntry(sequence=4, query_id="old", run_id="", batch_id=4, starts=[], ends=[])
    assert refuse_lost_state(None, MicroBatch("new", 0, [], []), "app") is None
    assert refuse_lost_state(last, MicroBatch("old", 5, [], []), "app") is None
    assert "accept_lost_state" in (refuse_lost_state(last, MicroBatch("new", 0, [], []), "app") or "")


# --- what a lost checkpoint of a stateful query is refused with ---

WRITTEN = LedgerEntry(
    sequence=4, query_id="old", run_id="", batch_id=4, starts=['{"t":{"0":0}}'], ends=['{"t":{"0":9}}']
)
FROM_THE_START = MicroBatch(
    "new", 0, ['{"t":{"0":0}}'], ['{"t":{"0":9}}']
)  # startingOffsets=earliest with a new checkpoint


def test_accept_lost_state_is_named_wherever_the_new_checkpoint_starts():
    with BatchTransaction(options()) as transaction:
        transaction.last = WRITTEN
        with pytest.raises(RefusedError, match=r"accept_lost_state=True.*startingOffsets=committed"):
            transaction.is_written(FROM_THE_START, lambda: True)
        with pytest.raises(RefusedError, match=r"the cause\. .*Give each query its own application id"):
            transaction.is_written(FROM_THE_START, lambda: False, "the cause")
    with BatchTransaction(options(accept_lost_state=True)) as transaction:
        transaction.last = WRITTEN
        with pytest.raises(RefusedError, match="startingOffsets=committed"):
            transaction.is_written(FROM_THE_START, lambda: True)


# --- sinks that are used in another way than they are made for ---


def test_one_topic_may_be_given_as_a_text(monkeypatch):
    made = []
    monkeypatch.setattr(sink_module, "Sink", made.append)
    sink_module.sink("b:9092", application_id="app", topics="orders")
    sink_module.sink("b:9092", application_id="app", topics=["orders", "bills"])
    assert [found.extra_topics for found in made] == [("orders",), ("orders", "bills")]


def test_a_sink_in_foreach_is_told_to_use_foreach_batch(monkeypatch):
    class Local(BaseSink):
        def _batch(self, df, batch):
            pass

        def close(self):
            pass

    with pytest.raises(SinkError, match=r"foreachBatch\(sink\)") as refused:
        pickle.dumps(Local(options()))
    assert "Connect" not in str(refused.value)
    monkeypatch.setattr("pyspark.sql.utils.is_remote", lambda: True)
    with pytest.raises(SinkError, match="Connect"):
        pickle.dumps(Local(options()))


@pytest.mark.parametrize("name", ["key", "value", "partition"])
def test_several_columns_of_one_name_are_refused(name: str) -> None:
    given = [("value", "binary"), ("key", "binary"), ("partition", "int"), ("topic", "string"), ("other", "int")]
    assert types_of([*given, ("topic", "string"), ("other", "int")], options()) == dict(given)
    with pytest.raises(ColumnError, match=f"several columns '{name}'; rename or drop all of them but one"):
        types_of([*given, (name, "string")], options())
    with pytest.raises(ColumnError, match="several columns 'topic'"):
        types_of([*given, ("topic", "string")], options(extra_topics=("in",)))
