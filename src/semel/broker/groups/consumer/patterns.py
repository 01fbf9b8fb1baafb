"""Topics by regular expression. What an expression says about a topic's name is remembered: heartbeats ask again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from functools import lru_cache

from semel.broker.expressions import Expression

MATCHED_AT_ONCE = 64  # names; more are matched by a thread
FORGOTTEN_ABOVE = 2  # times as many names as there are topics


class TopicPattern:
    """An expression and the topic names that it was held against."""

    def __init__(self, text: str) -> None:
        self._expression = Expression(text)
        self._verdicts: dict[str, bool] = {}

    def matches(self, name: str) -> bool:
        verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = self._verdicts[name] = self._expression.matches(name)
        return verdict

    async def look_at(self, names: Collection[str]) -> None:
        """Matches the names that are new, off the event loop where they are many."""
        if len(self._verdicts) > FORGOTTEN_ABOVE * len(names) + MATCHED_AT_ONCE:
            self._verdicts.clear()  # of topics that were deleted
        new = [name for name in names if name not in self._verdicts]
        if len(new) > MATCHED_AT_ONCE:
            matches = self._expression.matches
            self._verdicts.update(await asyncio.to_thread(lambda: {name: matches(name) for name in new}))


@lru_cache(maxsize=64)
def compile_pattern(text: str) -> TopicPattern:
    """ExpressionError: it cannot be used."""
    return TopicPattern(text)


async def look_at(patterns: Iterable[str], names: Collection[str]) -> None:
    """Prepares `matches` of these patterns for these topics."""
    for pattern in patterns:
        await compile_pattern(pattern).look_at(names)
