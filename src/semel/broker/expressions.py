"""Regular expressions of clients: RE2's syntax, as Kafka has it, and time that is linear in the text.

RE2 (the library google-re2) releases the GIL while it matches, but not while it compiles: what an expression may hold
is limited so that compiling takes milliseconds. Matching many texts belongs into a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

LONGEST_EXPRESSION = 4096  # characters
MOST_UNICODE_CLASSES = 8  # \pL and the like: each takes RE2 a millisecond
MOST_COPIES = 1000  # that repetitions make of their operands, all together: RE2 takes time that is quadratic in them
MEMORY_BYTES = 1 << 20  # of a compiled expression and its states

_UNICODE_CLASS = re.compile(r"\\[pP]")
_REPETITION = re.compile(r"\{(\d{1,4})(?:,(\d{0,4}))?\}")


class ExpressionError(ValueError):
    """Not a regular expression that can be used here."""


@lru_cache(maxsize=256)
def compile_expression(text: str) -> Callable[[str], bool]:
    """Whether the expression describes a whole text; several threads may ask. ExpressionError: RE2 refuses it, or it is
    too large."""
    if len(text) > LONGEST_EXPRESSION:
        raise ExpressionError(f"it has {len(text)} characters, the most are {LONGEST_EXPRESSION}")
    if len(_UNICODE_CLASS.findall(text)) > MOST_UNICODE_CLASSES:
        raise ExpressionError(f"it has more than {MOST_UNICODE_CLASSES} Unicode classes")
    if _copies(text) > MOST_COPIES:
        raise ExpressionError(f"its repetitions come to more than {MOST_COPIES} copies")
    compiled = _compile(text)
    return lambda candidate: compiled.fullmatch(candidate) is not None


def _copies(text: str) -> int:
    """How many copies of characters, classes and groups the repetitions {n,m} of an expression make. It need not be a
    valid one."""
    copies, at, last = 0, 0, 0
    groups = [0]  # the sizes of what is open: the whole expression, its groups, theirs
    while at < len(text):
        char, start = text[at], at
        repetition = _REPETITION.match(text, at) if char == "{" else None
        if repetition is not None:
            times = max(int(repetition[1]), int(repetition[2] or 0))
            added = last * max(times - 1, 0)
            copies, last, at = copies + added, last + added, repetition.end()
            groups[-1] += added
            continue
        at += 1
        if char == "(":
            groups.append(0)
            continue
        if char == ")" and len(groups) > 1:
            last = groups.pop()
        else:
            last = 1
            if char == "\\":
                at = _after(text, "\\E", at + 1) if text.startswith("Q", at) else at + 1
                last = at - start
            elif char == "[":
                at = _after(text, "]", at + 1 + text.startswith("^", at))
        groups[-1] += last
    return copies


def _after(text: str, end: str, at: int) -> int:
    found = text.find(end, at)
    return len(text) if found < 0 else found + len(end)


def _compile(text: str) -> Any:
    import re2  # at the first use: most brokers never need it

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MEMORY_BYTES
    try:
        return re2.compile(text, options)
    except UnicodeEncodeError:
        raise ExpressionError("it has characters that are not Unicode text") from None
    except re2.error as error:
        reason = error.args[0] if error.args else "refused by RE2"
        raise ExpressionError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None
