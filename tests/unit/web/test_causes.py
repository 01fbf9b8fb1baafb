"""Who holds back the last stable offset of a partition, on a cluster that does not hold still while it is read."""

from __future__ import annotations

import asyncio
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from semel.client.admin.transactions import NO_TIMEOUT_MS, ProducerInfo, TransactionInfo
from semel.client.types import TopicPartition
from semel.web import views
from semel.web.views import Views

PLACE = TopicPartition("orders", 0)
OPEN = ProducerInfo(7, 0, 5, 0, 0, 10)


def transaction(name: str = "app", timeout_ms: int = 60_000) -> TransactionInfo:
    return TransactionInfo(name, "Ongoing", 7, 0, timeout_ms, 0, [PLACE], 1)


class Admin:
    """What the brokers say, one response after the other."""

    def __init__(self, producers: list[list[ProducerInfo]], transactions: list[TransactionInfo]) -> None:
        self._producers, self._transactions = producers, transactions

    async def producers_of(self, _: Any) -> dict[TopicPartition, list[ProducerInfo]]:
        return {PLACE: self._producers.pop(0)}

    async def describe_transactions(self, _: Any) -> list[TransactionInfo]:
        return self._transactions


def causes(producers: list[list[ProducerInfo]], transactions: list[TransactionInfo]) -> list[Any]:
    seen = Views(Admin(producers, transactions), "here:1")  # type: ignore[arg-type]
    found = asyncio.run(seen._causes([PLACE], []))
    return [each["transactional_id"] for each in found[PLACE]]


def test_a_transaction_that_began_just_now_is_not_called_unknown() -> None:
    """The page offers to end what no coordinator knows, in one partition."""
    assert causes([[OPEN], [OPEN]], [transaction()]) == ["app"]


def test_what_ended_meanwhile_holds_back_nothing() -> None:
    assert causes([[OPEN], []], []) == []


def test_what_no_coordinator_knows_is_shown() -> None:
    assert causes([[OPEN], [OPEN]], []) == [None]


@pytest.mark.parametrize("timeout_ms", [60_000, NO_TIMEOUT_MS])
@pytest.mark.parametrize("name", ["$(reboot)", "a'b; reboot", "-x"])
def test_the_command_that_the_page_shows_can_be_pasted(
    name: str, timeout_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may produce may choose such a name."""

    async def timeline(*_: Any) -> Any:
        return SimpleNamespace(now=transaction(name, timeout_ms), has_events=False, steps=[], last=0)

    async def nothing(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(views, "timeline", timeline)
    monkeypatch.setattr(Views, "_bars", nothing)
    seen = asyncio.run(Views(Admin([], []), "here:1").transaction(name))  # type: ignore[arg-type]
    words = shlex.split(seen["abort_command"])
    assert words[:3] == ["semel", "txn", "abort"]
    assert set(words[3:]) - {"--", "--force"} == {name, "-b", "here:1"}
    assert ("--force" in words) == (timeout_ms == NO_TIMEOUT_MS)
