"""What went wrong, before everything that Spark says about it.

Spark shows an error of Python as a traceback inside a longer text, and the reason is the last line of the traceback. An
error that passes `reason_first` has its sentence as the first line of the traceback, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

REASON_CHARS = 1_000
_OURS = re.compile(r"^semel\.[\w.]+: (.+)$", re.MULTILINE)  # the last line of a traceback


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
        raise


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
    """The sentence of semel's own error in what Spark says about a failed job; the first line where there is none."""
    ours: list[str] = _OURS.findall(text)
    return (ours[-1] if ours else text.partition("\n")[0])[:REASON_CHARS]
