"""The bank: deposits and transfers in, a statement line for each booking out."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from semel.demo.workloads.base import DemoWorkload, Event, Outcome, OutputRecord, Part, rejected_twice_or_never

ACCOUNTS = tuple(f"acc-{number:02}" for number in range(1, 25))
OPENING_CENTS = 100_000
DEPOSITS, WRONG = 0.35, 0.04  # shares of all events


class Bank(DemoWorkload):
    name = "bank"
    title = "a bank: deposits and transfers in, statements out"
    file = "bank.py"
    records = "transfers"
    total = "money"
    part = "account"

    def events(self, rng: random.Random, started_ms: int, per_s: float) -> Iterator[Event]:
        for number, account in enumerate(ACCOUNTS):
            yield _event(number, kind="deposit", to=account, cents=OPENING_CENTS)
        number = len(ACCOUNTS)
        while True:
            yield _wrong(rng, number) if rng.random() < WRONG else _right(rng, number)
            number += 1

    def closing(self, started_ms: int, produced: int, per_s: float) -> list[Event]:
        return []

    def step(self, value: bytes) -> list[Event] | None:
        parts = _bookings_of(value)
        if parts is None:
            return None
        number = json.loads(value)["id"]
        lines = ({"id": number, "account": account, "cents": cents} for account, cents in parts.items())
        return [Event(line["account"].encode(), json.dumps(line).encode()) for line in lines]

    def shown(self, total: int) -> str:
        return f"{total / 100:,.2f}"

    def judge(
        self,
        guarantee: str,
        source: Sequence[OutputRecord],
        output: Sequence[OutputRecord],
        rejected: Sequence[OutputRecord],
    ) -> Outcome:
        bookings, wrong, series_in = _expected(source)
        lines = [(record.timestamp_ms, json.loads(record.value or b"{}")) for record in output]
        found = Counter((line["id"], line["account"]) for _, line in lines)
        balances = Counter[str]()
        for _, line in lines:
            balances[line["account"]] += line["cents"]
        lost, duplicated = rejected_twice_or_never(wrong, Counter(record.value or b"" for record in rejected))
        for number, parts in bookings.items():
            copies = [found[number, account] for account in parts]
            lost += min(copies) == 0
            duplicated += max(0, max(copies) - 1)
        due = Counter[str]()
        for parts in bookings.values():
            due.update(parts)
        return Outcome(
            guarantee,
            records_in=len(source),
            rejected=len(wrong),
            counted=len(source) - lost + duplicated,
            lost=lost,
            duplicated=duplicated,
            total_before=sum(due.values()),
            total_after=sum(balances.values()),
            parts=[Part(account, due[account], balances[account]) for account in sorted({*due, *balances})],
            series_in=series_in,
            series_out=[(at_ms, line["cents"]) for at_ms, line in lines],
        )


def _event(number: int, **facts: Any) -> Event:
    return Event(b"%d" % number, json.dumps({"id": number, **facts}, separators=(",", ":")).encode())


def _right(rng: random.Random, number: int) -> Event:
    if rng.random() < DEPOSITS:
        return _event(number, kind="deposit", to=rng.choice(ACCOUNTS), cents=rng.randrange(100, 20_000))
    payer, payee = rng.sample(ACCOUNTS, 2)
    return _event(number, kind="transfer", **{"from": payer}, to=payee, cents=rng.randrange(100, 10_000))


def _wrong(rng: random.Random, number: int) -> Event:
    """One of the kinds that the pipeline must reject."""
    account = rng.choice(ACCOUNTS)
    kind = rng.randrange(4)
    if kind == 0:
        return Event(b"%d" % number, b"%d: this is no transfer" % number)
    if kind == 1:
        return _event(number, kind="deposit", to=account, cents=-rng.randrange(1, 10_000))
    if kind == 2:
        return _event(number, kind="transfer", **{"from": account}, to=account, cents=500)
    return _event(number, kind="transfer", to=account, cents=500)


Bookings = dict[int, dict[str, int]]


def _expected(source: Sequence[OutputRecord]) -> tuple[Bookings, list[bytes], list[tuple[int, int]]]:
    """The same rules once more, without Spark: (id -> account -> cents, what must be rejected, money over time)."""
    bookings: Bookings = {}
    wrong: list[bytes] = []
    series: list[tuple[int, int]] = []
    for record in source:
        value = record.value or b""
        parts = _bookings_of(value)
        if parts is None:
            wrong.append(value)
        else:
            bookings[json.loads(value)["id"]] = parts
            series.append((record.timestamp_ms, sum(parts.values())))
    return bookings, wrong, series


def _bookings_of(value: bytes) -> dict[str, int] | None:
    try:
        transfer = json.loads(value)
    except ValueError:
        return None
    payer, payee, cents = transfer.get("from"), transfer.get("to"), transfer["cents"]
    if cents <= 0 or payee is None:
        return None
    if transfer["kind"] == "deposit":
        return {payee: cents}
    return None if payer is None or payer == payee else {payer: -cents, payee: cents}
