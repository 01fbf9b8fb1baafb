"""What went wrong, and what Spark says about it.

What the driver decides by, it has as data: tasks report failures (`writing.FAILURES`), Spark's errors have a condition
and causes (`was_cancelled`). Only for people is the text searched: Spark shows an error of Python as a traceback inside
a longer text, and the reason is the last line of the traceback. An error that passes `reason_first` has its sentence as
the first line of the traceback, too.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

REASON_CHARS = 1_000
_OURS = re.compile(r"^semel\.[\w.]+: (.+)$", re.MULTILINE)  # the last line of a traceback
_PYTHONS = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)


class FailedGuessError(RuntimeError):
    """Rows were not as expected. The batch is aborted and runs again in the way that is always right. No failure of the
    query: it costs none of its attempts. A guess is made until it fails, so once in a query at most."""


class Cancelled(Exception):
    """The job was cancelled, or its query was stopped. Not to be tried again."""


# When a function for foreachBatch fails, Spark searches its traceback for an interruption behind these words, with a
# regular expression that recurses for every character. Where more than a thousand follow it overflows the stack of the
# query's thread: the query then ends, and nothing says that it failed.
SEARCHED_BEHIND = "py4j.protocol.Py4JJavaError: An error occurred while calling"
SEARCHED_CHARS = 500
INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)


def overflows_spark(error: BaseException) -> bool:
    """Whether Spark would not survive to read the traceback of an error, its causes among it."""
    _, _, rest = "".join(traceback.format_exception(error)).partition(SEARCHED_BEHIND)
    return len(rest) > SEARCHED_CHARS


def cancelled(error: BaseException) -> Cancelled:
    """What is raised for an error that `was_cancelled`. Spark finds the interruption in it: a query that was stopped
    ends without an error."""
    what = str(error).partition("\n\t")[0][:SEARCHED_CHARS]
    is_interrupted = any(name in what for name in INTERRUPTIONS)
    return Cancelled(
        "the query was stopped, or its job was cancelled, while the batch was written; nothing of it is visible "
        f"({f'py4j.protocol.Py4JJavaError: {what}' if is_interrupted else what})"
    )


class Reason(Exception):
    """Never raised: the sentence of another error, where tracebacks begin."""


Reason.__module__ = "builtins"  # tracebacks show it without a module


@contextmanager
def reason_first() -> Iterator[None]:
    """Around what Spark calls; as a decorator, too."""
    try:
        yield
    except Exception as error:
        put_first(error, reason_in(str(error)))
        _keep_causes(error)
        raise


def _keep_causes(error: BaseException) -> None:
    """Where PySpark simplifies tracebacks, as it does by default, it sets the cause of an error to None before it shows
    it. Here that has no effect: the error becomes one of a class of the same name, whose cause cannot be set."""
    kind, cause = type(error), error.__cause__
    fixed = {"__cause__": property(lambda _: cause, lambda _, __: None), "__module__": kind.__module__}
    with suppress(TypeError):  # Python's own errors keep their class
        error.__class__ = type(kind.__name__, (kind,), fixed)


def put_first(error: BaseException, sentence: str) -> None:
    """Makes the sentence the first cause of an error. Nothing of its traceback is left out."""
    seen, first = {id(error)}, error
    while (before := _before(first)) is not None and id(before) not in seen:
        seen.add(id(before))
        first = before
    if not isinstance(first, Reason):
        first.__cause__ = Reason(sentence)


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def reason_in(text: str) -> str:
    """The sentence of semel's own error in what Spark says about a failed job; that of another error of Python, such as
    one of a UDF, where there is none of semel; else the first line."""
    ours: list[str] = _OURS.findall(text) or _PYTHONS.findall(text)
    return (ours[-1] if ours else text.partition("\n")[0])[:REASON_CHARS]


def condition_of(error: BaseException) -> str | None:
    """The name that Spark gives to a kind of error; None for errors of others."""
    named = getattr(error, "getCondition", None)
    return None if named is None else named()


def was_cancelled(error: BaseException) -> bool:
    """Whether a job ended because its query was stopped: Spark cancelled it, or interrupted who waits for it."""
    cause: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    while cause is not None:
        name = str(cause.getClass().getName())
        if name in INTERRUPTIONS or _java_condition(cause) == "SPARK_JOB_CANCELLED":
            return True
        cause = cause.getCause()
    return False


def _java_condition(cause: Any) -> str | None:
    from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
    from pyspark import SparkContext

    if not is_instance_of(SparkContext._gateway, cause, "org.apache.spark.SparkThrowable"):
        return None
    found: str | None = cause.getCondition()
    return found
