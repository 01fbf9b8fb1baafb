"""The reason of a failure is the first and the last line of what Spark shows."""

from __future__ import annotations

import io
import os
import re
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType, TimestampType
from pyspark.util import handle_worker_exception

from semel.client.cluster import Cluster
from semel.client.errors import ConnectionFailedError, TimedOutError
from semel.client.settings import ClientSettings
from semel.protocol.errors import ErrorCode
from semel.spark import failures, writing
from semel.spark.base_sink import MESSAGE_CHARS, BaseSink, SinkError
from semel.spark.encoding import BadRowError
from semel.spark.failures import Cancelled, reason_first, reason_in
from semel.spark.ledger_topic import create
from semel.spark.options import OptionError
from semel.spark.sink import sink
from semel.spark.sink_options import SinkOptions
from semel.spark.source import BatchReader, SemelDataSource, StreamReader
from semel.spark.writing import (
    OwnerStalledError,
    Report,
    WrongTaskError,
    failure_report,
    raise_failures,
    report_batches,
)

SENTENCE = "topic 't' cannot be read; create it"


def shown(error: BaseException) -> list[str]:
    """What Spark's Python processes send to the JVM."""
    return "".join(traceback.format_exception(error)).strip().splitlines()


def fails(chained: bool) -> None:
    try:
        raise KeyError("deep down")
    except KeyError as error:
        if chained:
            raise OptionError(SENTENCE) from error
        raise OptionError(SENTENCE) from None


def simplified(call: Callable[[], None]) -> list[str]:
    """The same with spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled, which is true by default."""
    sent = io.BytesIO()
    with patch.dict(os.environ, SPARK_SIMPLIFIED_TRACEBACK="1"):
        try:
            call()
        except Exception as error:
            handle_worker_exception(error, sent)
    return sent.getvalue()[8:].decode().strip().splitlines()


@pytest.mark.parametrize("chained", [True, False])
def test_a_simplified_traceback_begins_and_ends_with_the_reason(chained: bool) -> None:
    assert simplified(lambda: fails(chained))[0].startswith("Traceback")
    lines = simplified(lambda: reason_first()(fails)(chained))
    assert lines[0] == f"Reason: {SENTENCE}"
    assert lines[-1] == f"semel.spark.options.OptionError: {SENTENCE}"
    assert any("deep down" in line for line in lines) == chained


def test_an_error_of_python_is_shown_with_a_simplified_traceback_all_the_same() -> None:
    assert simplified(lambda: reason_first()(int)("x"))[-1].startswith("ValueError: ")


@pytest.mark.parametrize("chained", [True, False])
def test_a_traceback_begins_and_ends_with_the_reason(chained: bool) -> None:
    with pytest.raises(OptionError) as failed, reason_first():
        fails(chained)
    lines = shown(failed.value)
    assert lines[0] == f"Reason: {SENTENCE}"
    assert lines[-1].endswith(f"OptionError: {SENTENCE}")
    assert any("deep down" in line for line in lines) == chained  # nothing is left out
    with pytest.raises(OptionError) as again, reason_first():
        raise failed.value
    assert sum(line.startswith("Reason: ") for line in shown(again.value)) == 1


def test_an_error_that_is_its_own_cause_is_shown_all_the_same() -> None:
    error, other = OptionError(SENTENCE), KeyError("x")
    error.__cause__, other.__cause__ = other, error
    with pytest.raises(OptionError) as failed, reason_first():
        raise error
    assert shown(failed.value)


class Failing(BaseSink):
    """A sink whose job fails as Spark tells it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SinkOptions("127.0.0.1:1", "app", topic="out"))
        self._error = error

    def _same_run(self, session: Any) -> Any:
        raise self._error

    def _batch(self, df: Any, batch: Any) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


class Frame:
    sparkSession = None
    columns = ("value",)


def of_spark(lines: int) -> str:
    java = "\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)\n" * lines
    failed = "Job aborted due to stage failure: Task 0 failed: PythonException: Traceback (most recent call last):"
    return f"{failed}\n  File x, line 1\nsemel.spark.reading.DataLossError: {SENTENCE}\n\n{java}{'x' * lines}"


@pytest.mark.parametrize("lines", [3, MESSAGE_CHARS])
def test_the_reason_of_a_failed_job_is_found_in_sparks_text(lines: int) -> None:
    assert reason_in(of_spark(lines)) == SENTENCE
    with pytest.raises((SinkError, RuntimeError)) as failed:
        Failing(RuntimeError(of_spark(lines)))(Frame(), 0)
    text = shown(failed.value)
    assert text[0] == f"Reason: {SENTENCE}"
    if lines > 3:
        assert text[-1] == SENTENCE


class Py4JJavaError(Exception):
    """As py4j's, whose text has the stack of the JVM."""


Py4JJavaError.__module__ = "py4j.protocol"
# Spark's own, by which it looks for an interruption in the traceback of a function for foreachBatch.
SPARKS_SEARCH = re.compile(
    r"py4j.protocol.Py4JJavaError: An error occurred while calling((.|\r\n|\r|\n)*)(java.lang.InterruptedException|"
    r"java.io.InterruptedIOException|java.nio.channels.ClosedByInterruptException)"
)


def of_java(what: str, lines: int = 80) -> Py4JJavaError:
    stack = "\tat org.apache.spark.sql.classic.Dataset.collectToPython(Dataset.scala:2139)\n" * lines
    return Py4JJavaError(f"An error occurred while calling o214.collectToPython.\n: {what}\n{stack}")


def failing_after(cause: Exception, error: Exception) -> Failing:
    error.__cause__ = cause
    return Failing(error)


@pytest.mark.parametrize("lines", [10, 80])
@pytest.mark.parametrize("is_cause", [True, False])
def test_no_error_overflows_the_stack_of_sparks_thread(is_cause: bool, lines: int) -> None:
    """It would end the query, and nothing would say that it failed."""
    java = of_java("org.apache.spark.SparkException: executor lost", lines)
    sink = failing_after(java, SinkError(SENTENCE)) if is_cause else Failing(java)
    with pytest.raises(Exception) as failed:
        sink(Frame(), 0)
    text = "\n".join(shown(failed.value))
    _, _, searched = text.partition("py4j.protocol.Py4JJavaError: An error occurred while calling")
    assert len(searched) < 1_000, "Spark 4.3 overflows at about 1,500 characters"
    assert (SENTENCE if is_cause else "executor lost") in text


@pytest.mark.parametrize(
    "name", ["java.lang.InterruptedException", "java.nio.channels.ClosedByInterruptException", "java.io.IOException"]
)
def test_spark_finds_the_interruption_in_the_error_of_a_query_that_was_stopped(name: str) -> None:
    java = of_java(name)
    java.java_exception = MagicMock()  # type: ignore[attr-defined]
    java.java_exception.getClass().getName.return_value = name
    java.java_exception.getCause.return_value = None
    is_stop = name != "java.io.IOException"
    with (
        patch("semel.spark.failures._java_condition", return_value=None),
        pytest.raises(Cancelled if is_stop else SinkError) as failed,
    ):
        Failing(java)(Frame(), 0)
    text = "\n".join(shown(failed.value))
    assert (SPARKS_SEARCH.search(text) is not None) == is_stop


def test_the_reason_of_a_function_of_the_user_that_fails_is_its_error() -> None:
    first = "Traceback (most recent call last):\n  File \"a.py\", line 3, in outer\n    inner()\nKeyError: 'x'\n"
    last = 'Traceback (most recent call last):\n  File "b.py", line 1, in bad\nValueError: unlucky number 13\n'
    text = f"An exception was thrown from the Python worker:\n{first}\nDuring handling ...\n\n{last}\n\tat java\n"
    assert reason_in(text) == "ValueError: unlucky number 13"
    assert reason_in("[CAST_INVALID_INPUT] The value 'x'\nmore") == "[CAST_INVALID_INPUT] The value 'x'"


def test_errors_of_the_sink_itself_have_their_reason_first() -> None:
    with pytest.raises(SinkError) as failed:
        Failing(SinkError(SENTENCE))(Frame(), 0)
    assert shown(failed.value)[0] == f"Reason: {SENTENCE}"


def test_the_source_says_its_reason_first_in_every_call() -> None:
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t", "kafka.default.api.timeout.ms": "300"}
    options["kafka.request.timeout.ms"] = "200"
    stream = StreamReader(options)
    for call in (stream.initialOffset, stream.prepareForTriggerAvailableNow, BatchReader(options).partitions):
        with pytest.raises(Exception, match="cannot connect") as failed:
            call()
        assert "cannot connect" in shown(failed.value)[0]


def test_a_wrong_option_is_the_reason_and_not_what_comes_of_it() -> None:
    """Spark stops a reader that could not be made, and fails with that."""
    reader = SemelDataSource({"subscribee": "t"}).streamReader(None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="did you mean subscribe") as failed:
        reader.initialOffset()
    assert "did you mean subscribe" in shown(failed.value)[0]
    with pytest.raises(OptionError, match="did you mean subscribe"):
        reader.partitions({}, {})
    reader.stop()


@pytest.mark.parametrize(
    "fields",
    [
        [("key", StringType()), ("value", BinaryType())],
        [("id", LongType())],
        [("value", BinaryType()), ("key", BinaryType())],
    ],
)
def test_a_schema_that_the_source_does_not_have_is_refused_before_a_task_runs(fields: list[Any]) -> None:
    given = StructType([StructField(*field) for field in fields])
    source = SemelDataSource({"kafka.bootstrap.servers": "h:1", "subscribe": "t", "columns": "key,value"})
    with pytest.raises(OptionError, match=r"given a schema, struct<.*but its columns are key, value\. Leave schema"):
        source.reader(given)
    with pytest.raises(OptionError, match="given a schema"):
        source.streamReader(given).initialOffset()


def test_the_schemas_that_spark_gives_back_are_the_sources_own() -> None:
    headers = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
    fields = {"key": BinaryType(), "headers": headers, "timestamp": TimestampType(), "json": StructType([])}
    given = StructType([StructField(*field) for field in fields.items()])
    options = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "columns": "key,headers,timestamp,json"}
    assert isinstance(SemelDataSource({**options, "jsonSchema": "id long"}).reader(given), BatchReader)


class DataFrame:
    """As that of pandas."""


@pytest.mark.parametrize("given", [DataFrame(), [Frame(), DataFrame()], 7])
def test_a_sink_that_is_called_with_no_dataframe_of_spark_says_what_it_expects(given: Any) -> None:
    with pytest.raises(SinkError, match=r"the sink was called with a \S+, expected a DataFrame of Spark"):
        Failing(AssertionError())(given, 0)


# --- failures that tasks report ---


def test_a_row_that_cannot_be_written_passes_the_shuffle_as_data():
    def blobs():
        yield 3, 1, 0, memoryview(b"batch")
        raise BadRowError("2 rows cannot be written; the first: \u00e4")

    batches = list(writing.to_batches(blobs()))
    read = writing._from_batches(iter(batches))
    assert next(read)[:3] == (3, 1, 0)
    with pytest.raises(BadRowError, match="2 rows cannot be written; the first: \u00e4"):
        next(read)


def test_of_several_reported_failures_the_bad_row_is_the_reason():
    written = Report(0, 5, 0, 0, 4, 4, 1)
    stalled = failure_report(OwnerStalledError("another attempt"))
    moved, bad = failure_report(WrongTaskError("two tasks")), failure_report(BadRowError("too large"))
    (batch,) = report_batches([written, stalled, moved, bad])
    reports = [Report(*row.values()) for row in batch.to_pylist()]
    assert reports == [written, stalled, moved, bad]
    raise_failures(reports[:1])
    for some, error in ((reports, BadRowError), (reports[:3], WrongTaskError), (reports[:2], OwnerStalledError)):
        with pytest.raises(error):
            raise_failures(some)


class JavaError:
    """As much of a Throwable as is looked at."""

    def __init__(self, name: str, cause: JavaError | None = None, condition: str | None = None) -> None:
        self._name, self._cause, self.condition = name, cause, condition

    def getClass(self) -> JavaError:
        return self

    def getName(self) -> str:
        return self._name

    def getCause(self) -> JavaError | None:
        return self._cause


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (JavaError("org.apache.spark.SparkException", condition="SPARK_JOB_CANCELLED"), True),
        (JavaError("java.lang.RuntimeException", JavaError("java.lang.InterruptedException")), True),
        (JavaError("org.apache.spark.SparkException", condition="STAGE_FAILED"), False),
    ],
)
def test_a_cancelled_job_is_known_by_its_causes_not_by_its_text(monkeypatch, error, expected):
    monkeypatch.setattr(failures, "_java_condition", lambda cause: cause.condition)
    raised = RuntimeError("SPARK_JOB_CANCELLED InterruptedException")
    raised.java_exception = error  # type: ignore[attr-defined]
    assert failures.was_cancelled(raised) is expected
    assert not failures.was_cancelled(RuntimeError("SPARK_JOB_CANCELLED"))


@pytest.mark.parametrize(("guarantee", "error_type"), [("exactly_once", SinkError), ("at_least_once", TimedOutError)])
def test_a_broker_that_is_down_is_named_and_no_topic_has_to_be_created(
    guarantee: str, error_type: type[Exception]
) -> None:
    client = {"default.api.timeout.ms": 300}
    with pytest.raises(error_type, match=r"cannot connect to 127\.0\.0\.1:1") as failed:
        sink("127.0.0.1:1", application_id="app", topic="out", guarantee=guarantee, client=client)
    assert "reate it first" not in str(failed.value)


def test_the_calls_that_make_the_ledger_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try had the whole timeout once more: two minutes instead of one."""
    given: list[float | None] = []

    def call(*_: object, timeout_s: float | None = None, **__: object) -> None:
        given.append(timeout_s)
        raise ConnectionFailedError("nobody is there", ErrorCode.NETWORK_EXCEPTION)

    with Cluster(ClientSettings.of({"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": 300})) as cluster:
        monkeypatch.setattr(cluster, "call", call)
        with pytest.raises(TimedOutError, match="nobody is there"):
            create(cluster, "app")
    assert len(given) > 1
    assert all(timeout_s is not None and timeout_s <= 0.3 for timeout_s in given)
