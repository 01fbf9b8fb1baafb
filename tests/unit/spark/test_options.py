"""Options of the source and the sink: right ones are read, wrong ones are refused with the name and the remedy."""

from __future__ import annotations

import warnings

import pyarrow as pa
import pytest
from pyspark.util import PythonEvalType

from semel.spark.batch_writer import murmur2_udf
from semel.spark.offsets import Range
from semel.spark.options import Bound, OptionError, SourceOptions, spark_columns
from semel.spark.sink_options import SinkOptions, topic_names

BASE = {"kafka.bootstrap.servers": "h:1", "subscribe": "a, b"}


def parse(streaming=True, **changes):
    return SourceOptions.parse({**BASE, **changes}, streaming)


def test_names_are_those_of_sparks_own_source_in_any_case():
    options = parse(
        STARTINGOFFSETS="earliest", maxOffsetsPerTrigger="10", includeHeaders="TRUE", failOnDataLoss="false"
    )
    assert options.topics == ("a", "b")
    assert options.starting == Bound(word="earliest")
    assert (options.max_offsets, "headers" in options.columns, options.fail_on_data_loss) == (10, True, False)
    assert options.client == {"bootstrap.servers": "h:1"}


def test_defaults_differ_between_stream_and_batch_and_reading_is_committed():
    assert parse().starting.word == "latest"
    assert parse(streaming=False).starting.word == "earliest"
    assert parse().read_committed
    assert not parse(**{"kafka.isolation.level": "read_uncommitted"}).read_committed


def test_offsets_and_times():
    assert parse(startingOffsets='{"a": {"0": 5, "1": -2}}').starting.offsets == {"a": {0: 5, 1: -2}}
    assert parse(startingTimestamp="5").starting.timestamp_ms == 5
    assert parse(startingOffsetsByTimestamp='{"a": {"0": 7}}').starting.timestamps_ms == {"a": {0: 7}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maxOffsetPerTrigger": "1"}, "did you mean maxOffsetsPerTrigger"),
        ({"assign": "{}"}, "exactly one of subscribe"),
        ({"startingOffsets": "begin"}, "expected committed, earliest, latest"),
        ({"startingOffsets": "{broken"}, "not JSON"),
        ({"endingOffsets": "earliest"}, "endingOffsets is 'earliest'"),
        ({"endingOffsets": "latest"}, "endingOffsets is for batch queries, and this is a stream"),
        ({"endingTimestamp": "7"}, "endingTimestamp is for batch queries"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 5}}'}, "endingOffsetsByTimestamp is for batch queries"),
        ({"maxOffsetsPerTrigger": "0"}, "above 0"),
        ({"minPartitions": "many"}, "whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"kafka.isolation.level": "snapshot"}, "read_committed or read_uncommitted"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"jsonSchema": "id long", "emit": "ranges"}, "jsonSchema needs records"),
        ({"startingTimestamp": "-1"}, "startingTimestamp has -1; expected milliseconds since 1970"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 5, "1": -2}}'}, "endingOffsetsByTimestamp has -2"),
        ({"startingOffsets": '{"a": {"0": -3}}'}, r"startingOffsets has -3; expected an offset, -2 \(earliest\) or -1"),
        ({"subscribe": " ,"}, "subscribe is ','; it must name at least one topic"),
    ],
)
def test_wrong_options_are_refused_by_name(changes, message):
    with pytest.raises(OptionError, match=message):
        parse(**changes)


def test_settings_of_consumers_may_stay_when_the_format_changes():
    tuned = {"kafka.max.partition.fetch.bytes": "1000", "kafka.session.timeout.ms": "9000", "kafka.client.id": "me"}
    tuned |= {"kafka.client.dns.lookup": "use_all_dns_ips", "kafka.group.protocol": "consumer"}
    tuned |= {"kafka.metadata.recovery.strategy": "rebootstrap"}
    assert parse(**tuned).client == {"bootstrap.servers": "h:1", "client.id": "me"}


def test_topics_are_a_list_or_one_text():
    assert topic_names("a, b") == topic_names(["a", "b"]) == ("a", "b")


def test_the_function_that_routes_keys_is_made_without_a_warning():
    with warnings.catch_warnings(action="error"):
        assert murmur2_udf().evalType == PythonEvalType.SQL_SCALAR_ARROW_UDF


@pytest.mark.parametrize("text", ["2m", "2 min", "2M", "120s", "120000", " 120000ms "])
def test_durations_are_read_as_spark_reads_them(text):
    assert parse(maxTriggerDelay=text).max_delay_ms == 120_000


@pytest.mark.parametrize("given", ["{}", '{"a": []}'])
def test_an_assignment_of_nothing_is_refused(given):
    with pytest.raises(OptionError, match="at least one partition"):
        SourceOptions.parse({"kafka.bootstrap.servers": "h:1", "assign": given}, True)


def test_missing_brokers_and_topics_are_named():
    with pytest.raises(OptionError, match=r"kafka\.bootstrap\.servers is missing"):
        SourceOptions.parse({"subscribe": "a"}, True)
    with pytest.raises(OptionError, match="given: none"):
        SourceOptions.parse({"kafka.bootstrap.servers": "h:1"}, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"application_id": "a b"}, "letters, digits"),
        ({"partitioner": "murmur"}, "did you mean 'murmur2'"),
        ({"guarantee": "exactly-once"}, "did you mean 'exactly_once'"),
        ({"compression": "brotli"}, "compression is 'brotli'"),
        ({"topic": None}, "no topic"),
        ({"max_attempts": 0}, "at least 1"),
        ({"dead_letter_topic": "t"}, "where rows go too"),
        ({"extra_topics": ("app.ledger",)}, "is the ledger of application 'app'"),
        ({"dead_letter_topic": "app.ledger"}, "is the ledger of application 'app'"),
        ({"adopt_checkpoint": "false"}, "adopt_checkpoint is 'false'; expected True or False"),
        ({"accept_lost_state": "False"}, "accept_lost_state is 'False'; expected True or False"),
        ({"source_cluster_is_other": 0}, "source_cluster_is_other is 0; expected True or False"),
        ({"max_attempts": 2.5}, "max_attempts is 2.5; expected a whole number"),
        ({"transaction_timeout_ms": "60000"}, "transaction_timeout_ms is '60000'; expected a whole number"),
        ({"topic": ["t"]}, "topic is .'t'.; expected one name"),
        ({"application_id": 7}, "application_id is 7; expected one name"),
        ({"on_batch": "print"}, "on_batch is 'print'; expected a function"),
        ({"client": {"max.request.size": 9_000_000}}, "'max.request.size' cannot be set; use the option max_request"),
        ({"client": {"compression_type": "lz4"}}, "'compression_type' cannot be set; use the option compression"),
        ({"client": {"transactional.id": "mine"}}, "use the option application_id"),
    ],
)
def test_wrong_sink_options_are_refused_by_name(changes, message):
    with pytest.raises(OptionError, match=message):
        SinkOptions(**{"bootstrap_servers": "h:1", "application_id": "app", "topic": "t", **changes})


def test_client_options_reach_the_client_and_are_checked_there():
    options = SinkOptions("h:1", "app", "t", client={"client.id": "me"})
    assert options.producer_settings().client_id == "me"
    with pytest.raises(OptionError, match=r"no option 'client\.idd'"):
        SinkOptions("h:1", "app", "t", client={"client.idd": "me"}).producer_settings()


def test_timestamp_that_spark_cannot_hold_is_named_with_its_place_and_the_way_out():
    nanoseconds = pa.table({"timestamp": pa.array([1, 1_700_000_000_000_000_000], pa.int64())})
    with pytest.raises(ValueError, match=r"orders-3, .* offsets 5 and 7: .*columns=key,value"):
        spark_columns(nanoseconds, Range("orders", 3, 5, 7), ["timestamp"])
