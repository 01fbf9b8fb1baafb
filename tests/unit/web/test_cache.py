"""What the page reads is shared and renewed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from semel.client.types import TopicPartition
from semel.web.cache import MOST_KEYS, Cached
from semel.web.views import LIVE_S, SLOW_S, Views


def test_callers_share_one_reading_and_old_results_are_read_again() -> None:
    async def run() -> None:
        now_s = [0.0]
        cached, reads = Cached(lambda: now_s[0]), []

        async def read() -> int:
            reads.append(1)
            await asyncio.sleep(0)
            return len(reads)

        assert await asyncio.gather(*(cached.get("k", 1.0, read) for _ in range(5))) == [1] * 5
        now_s[0] = 0.9
        assert await cached.get("k", 1.0, read) == 1
        now_s[0] = 1.1
        assert await cached.get("k", 1.0, read) == 2
        cached.forget()
        assert await cached.get("k", 1.0, read) == 3
        for number in range(2 * MOST_KEYS):
            await cached.get(number, 1.0, read)
        assert len(cached._found) <= MOST_KEYS

    asyncio.run(run())


def test_what_takes_long_to_read_is_read_less_often() -> None:
    async def run() -> None:
        now_s = [0.0]
        cached, reads = Cached(lambda: now_s[0]), []

        async def read() -> int:
            now_s[0] += 0.2
            reads.append(1)
            return len(reads)

        assert await cached.get("k", 1.0, read, is_large=True) == 1
        now_s[0] = 15.0
        assert await cached.get("k", 1.0, read, is_large=True) == 1, "a hundred times as old as it took"
        assert await cached.get("k", 0.0, read, is_large=True) == 2, "unless it has to be new"
        now_s[0] = 40.0
        assert await cached.get("k", 1.0, read, is_large=True) == 3

    asyncio.run(run())


def test_one_slow_reading_does_not_make_what_is_shown_minutes_old() -> None:
    async def run() -> None:
        now_s = [0.0]
        cached, reads = Cached(lambda: now_s[0]), []

        async def read() -> int:
            now_s[0] += 5.0  # a busy machine
            reads.append(1)
            return len(reads)

        assert await cached.get("k", 1.0, read, is_large=True) == 1
        now_s[0] = 30.0
        assert await cached.get("k", 1.0, read, is_large=True) == 1
        now_s[0] = 31.0
        assert await cached.get("k", 1.0, read, is_large=True) == 2

    asyncio.run(run())


def test_a_topic_that_a_transaction_holds_is_shown_although_topics_were_read_slowly_before() -> None:
    async def run() -> None:
        now_s = [0.0]
        admin = StandIn(now_s)
        views = Views(admin, "broker:9092")  # type: ignore[arg-type]
        views._cached = Cached(lambda: now_s[0])
        assert (await views.topics(held=True))["topics"] == []
        admin.topics["new"] = SimpleNamespace(is_internal=False, partitions={})
        admin.open = [SimpleNamespace(partitions=[TopicPartition("new", 0)])]
        now_s[0] += SLOW_S + LIVE_S + 0.1
        assert [topic["name"] for topic in (await views.topics(held=True))["topics"]] == ["new"]
        assert admin.readings == 2
        admin.open.append(SimpleNamespace(partitions=[TopicPartition("deleted", 0)]))
        now_s[0] += LIVE_S + 0.1
        await views.topics(held=True)
        await views.topics(held=True)
        assert admin.readings == 2, "a topic that is gone is not looked for with every view"

    asyncio.run(run())


class StandIn:
    """Of an admin client: a cluster of which reading the metadata takes three seconds."""

    def __init__(self, now_s: list[float]) -> None:
        self._now_s, self.readings = now_s, 0
        self.topics: dict[str, Any] = {"old": SimpleNamespace(is_internal=False, partitions={})}
        self.open: list[Any] = []

    async def _all_metadata(self, deadline: None) -> dict[str, Any]:
        self._now_s[0] += 3.0
        self.readings += 1
        return dict(self.topics)

    async def describe_transactions(self, states: Any) -> list[Any]:
        return self.open


def test_a_failure_is_raised_and_not_kept() -> None:
    async def run() -> None:
        cached, failing = Cached(), [True]

        async def read() -> str:
            if failing[0]:
                raise ValueError("not now")
            return "well"

        with pytest.raises(ValueError, match="not now"):
            await cached.get("k", 100, read)
        failing[0] = False
        assert await cached.get("k", 100, read) == "well"

    asyncio.run(run())


def test_an_old_result_is_returned_while_a_new_one_is_read() -> None:
    async def run() -> None:
        now_s, release = [0.0], asyncio.Event()
        cached, answers = Cached(lambda: now_s[0]), ["old", "new"]

        async def read() -> str:
            if len(answers) == 1:
                await release.wait()
            return answers.pop(0)

        async def get() -> str:
            return await cached.get("k", 1.0, read, old_is_better_than_late=True)

        assert await get() == "old"
        now_s[0] = 2.0
        assert await get() == "old", "without waiting"
        release.set()
        assert await get() == "new"

    asyncio.run(run())
