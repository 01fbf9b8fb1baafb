"""Topics by regular expression, in the syntax of RE2 as far as it says something about topic names.

The expression comes from a client and runs in the broker, so it must not be able to take long: it is turned into an
automaton that looks at each character of a name once. What RE2 refuses (back-references, looking around) is refused.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

ALPHABET = frozenset(string.ascii_letters + string.digits + "._-")  # what topic names are made of
MAX_STATES = 10_000
MAX_REPEAT = 1000  # as RE2
_CLASSES = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset[str](),
}
_CONTROLS = "tnrfvaxAzQEbBpPCk"  # escapes that never match a topic name, or mean more than a character


class PatternError(ValueError):
    """Not a regular expression that can be used here."""


class _State(NamedTuple):
    """One state: reads a character out of `chars`, or (None) goes on at once to each of `nexts`."""

    chars: frozenset[str] | None
    nexts: list[int]
    only_at: str = ""  # "^" or "$": goes on only at the start or the end of the name


Node = Callable[[list[_State], int], int]  # adds its states in front of the given one; returns where it starts


class Pattern:
    """A compiled expression."""

    def __init__(self, text: str) -> None:
        node = _Parser(text).parse()
        self._states: list[_State] = [_State(frozenset(), [])]  # the first state is the end: it reads nothing
        self._start = node(self._states, 0)

    def matches(self, name: str) -> bool:
        """Whether the whole name is described."""
        here = self._reachable([self._start], "^" if name else "^$")
        for at, char in enumerate(name, 1):
            states = map(self._states.__getitem__, here)
            nexts = [state.nexts[0] for state in states if state.chars and char in state.chars]
            here = self._reachable(nexts, "$" if at == len(name) else "")
        return 0 in here

    def _reachable(self, starts: list[int], place: str) -> set[int]:
        """All states that can be reached without reading; `place` says which ends of the name are here."""
        found: set[int] = set()
        while starts:
            index = starts.pop()
            state = self._states[index]
            if index not in found:
                found.add(index)
                if state.chars is None and state.only_at in place:
                    starts.extend(state.nexts)
        return found


@lru_cache(maxsize=256)
def compile_pattern(text: str) -> Pattern:
    return Pattern(text)


# -- building blocks ---------------------------------------------------------------------------------------------------
def _add(states: list[_State], state: _State) -> int:
    if len(states) >= MAX_STATES:
        raise PatternError("the expression is too large")
    states.append(state)
    return len(states) - 1


def _one_of(chars: frozenset[str]) -> Node:
    return lambda states, then: _add(states, _State(chars, [then]))


def _sequence(nodes: list[Node]) -> Node:
    def build(states: list[_State], then: int) -> int:
        for node in reversed(nodes):
            then = node(states, then)
        return then

    return build


def _either(nodes: list[Node]) -> Node:
    return lambda states, then: _add(states, _State(None, [node(states, then) for node in nodes]))


def _repeat(node: Node, least: int, most: int | None) -> Node:
    def build(states: list[_State], then: int) -> int:
        if most is None:
            loop = _add(states, _State(None, [then]))
            states[loop].nexts.append(node(states, loop))
            then = loop
        for _ in range((most or least) - least if most is not None else 0):
            then = _add(states, _State(None, [then, node(states, then)]))
        for _ in range(least):
            then = node(states, then)
        return then

    return build


# -- the syntax --------------------------------------------------------------------------------------------------------
class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._ignores_case = False

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise PatternError(f"unexpected {self._text[self._at]!r} at {self._at}")
        return node

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("the expression ends too early")
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self) -> Node:
        branches = [self._branch()]
        while self._skip("|"):
            branches.append(self._branch())
        return branches[0] if len(branches) == 1 else _either(branches)

    def _branch(self) -> Node:
        nodes: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            nodes.append(self._quantified())
        return _sequence(nodes)

    def _quantified(self) -> Node:
        node = self._atom()
        while self._peek() and self._peek() in "*+?{":
            limits = self._limits()
            if limits is None:
                break
            self._skip("?")  # lazy or greedy: the same names are described
            node = _repeat(node, *limits)
        return node

    def _limits(self) -> tuple[int, int | None] | None:
        """(least, most) of a quantifier; None for a brace that is not one."""
        char = self._take()
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at : end].partition(",") if end >= 0 else ("", "", "")
        if not least.isdigit() or (most and not most.isdigit()):
            self._at -= 1
            raise PatternError(f"a brace at {self._at} that is no repetition")
        self._at = end + 1
        low = int(least)
        high = low if not comma else int(most) if most else None
        if low > MAX_REPEAT or (high is not None and (high > MAX_REPEAT or high < low)):
            raise PatternError(f"a repetition of {least}{comma}{most} times")
        return low, high

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return _one_of(self._folded(self._set()))
        if char == ".":
            return _one_of(ALPHABET)
        if char in "^$":
            return lambda states, then: _add(states, _State(None, [then], char))
        if char == "\\":
            return _one_of(self._folded(self._escape()))
        if char in "*+?{":
            raise PatternError(f"nothing to repeat at {self._at - 1}")
        return _one_of(self._folded(frozenset(char)))

    def _group(self) -> Node:
        if self._skip("?"):
            if self._skip("P<") or self._skip("<"):
                if self._peek() in "=!":
                    raise PatternError("looking around is not supported")
                self._at = self._text.find(">", self._at) + 1 or len(self._text)
            else:
                self._flags()
                if self._skip(")"):
                    return _sequence([])
        node = self._alternatives()
        if not self._skip(")"):
            raise PatternError("a group is not closed")
        return node

    def _flags(self) -> None:
        on = True
        while self._peek() not in (":", ")"):
            char = self._take()
            if char == "-":
                on = False
            elif char == "i":
                self._ignores_case = on
            elif char not in "msU":
                raise PatternError(f"(?{char} is not supported")
        if self._peek() == ":":
            self._at += 1

    def _set(self) -> frozenset[str]:
        negated = self._skip("^")
        chars: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._set_item()
            if len(low) == 1 and self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._set_item()
                if len(high) != 1 or min(high) < min(low):
                    raise PatternError("a range that has no end or goes backwards")
                chars.update(map(chr, range(ord(min(low)), ord(min(high)) + 1)))
            else:
                chars |= low
        self._at += 1
        return ALPHABET - self._folded(frozenset(chars)) if negated else frozenset(chars)

    def _set_item(self) -> frozenset[str]:
        char = self._take()
        return self._escape() if char == "\\" else frozenset(char)

    def _escape(self) -> frozenset[str]:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.lower() in _CLASSES:
            return ALPHABET - _CLASSES[char.lower()]
        if char.isdigit() or char in _CONTROLS:
            raise PatternError(f"\\{char} is not supported")
        return frozenset(char)

    def _folded(self, chars: frozenset[str]) -> frozenset[str]:
        return (
            frozenset(form for char in chars for form in (char.lower(), char.upper())) if self._ignores_case else chars
        )
