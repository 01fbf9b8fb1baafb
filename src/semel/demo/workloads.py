"""The pipelines of the demo: topics, example, events and expected output of each."""

from __future__ import annotations

import importlib.util
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

# --- A workload: its topics, its example, its events and what must come out ---
PARTITIONS = 2


class DemoTopics(NamedTuple):
    """The names of one pipeline's topics. All three pipelines read the same source."""

    source: str
    output: str
    rejected: str
    application_id: str

    @classmethod
    def of(cls, prefix: str, guarantee: str) -> DemoTopics:
        stem = f"{prefix}.{guarantee}"
        return cls(f"{prefix}.in", f"{stem}.out", f"{stem}.rejected", stem)

    def partitions(self) -> dict[str, int]:
        return {self.source: PARTITIONS, self.output: PARTITIONS, self.rejected: 1}


class Event(NamedTuple):
    key: bytes
    value: bytes


class OutputRecord(Protocol):
    """A record as a reader got it."""

    @property
    def timestamp_ms(self) -> int: ...

    @property
    def value(self) -> bytes | None: ...


class Part(NamedTuple):
    """An account, a campaign: what it should have, and what the output says."""

    name: str
    expected: int
    found: int


class Outcome(msgspec.Struct, frozen=True):
    """What a guarantee led to. records_in - lost + duplicated = counted."""

    guarantee: str
    records_in: int
    rejected: int  # of the records in: what is not valid and must be in the dead-letter topic
    counted: int
    lost: int
    duplicated: int
    total_before: int
    total_after: int
    parts: list[Part]
    series_in: list[tuple[int, int]]  # (when in ms, how much came in)
    series_out: list[tuple[int, int]]

    @property
    def is_exact(self) -> bool:
        return not self.lost and not self.duplicated and self.total_before == self.total_after

    @property
    def wrong_parts(self) -> int:
        return sum(part.expected != part.found for part in self.parts)


class DemoWorkload(ABC):
    name: str
    title: str
    file: str  # of its example
    records: str  # what the records in are called
    total: str  # what is summed up
    part: str  # what the sum is made of

    @abstractmethod
    def events(self, rng: random.Random, started_ms: int, per_s: float) -> Iterator[Event]:
        """All that may be produced, without an end. Every event has an id of its own."""

    @abstractmethod
    def closing(self, started_ms: int, produced: int, per_s: float) -> list[Event]:
        """Produced last, so that nothing waits for more."""

    @abstractmethod
    def step(self, value: bytes) -> list[Event] | None:
        """The pipeline without Spark, for one record: what goes out, or None if it is rejected."""

    @abstractmethod
    def amounts(self, value: bytes) -> dict[str, int] | None:
        """What a record of the source adds to each part; None if it is rejected, nothing if it is not counted."""

    @abstractmethod
    def amount(self, line: dict[str, Any]) -> tuple[str, int]:
        """(part, what a record of the output adds to it)"""

    @abstractmethod
    def lost_and_duplicated(self, valid: list[bytes], lines: list[dict[str, Any]]) -> tuple[int, int]:
        """Of the valid records of the source, by the records of the output."""

    def compare(
        self,
        guarantee: str,
        source: Sequence[OutputRecord],
        output: Sequence[OutputRecord],
        rejected: Sequence[OutputRecord],
    ) -> Outcome:
        """What came out with what went in, all of it as an independent reader saw it."""
        wrong: list[bytes] = []
        valid: list[bytes] = []
        due, found = Counter[str](), Counter[str]()
        series_in, series_out = [], []
        for record in source:
            value = record.value or b""
            amounts = self.amounts(value)
            if amounts is None:
                wrong.append(value)
            elif amounts:
                valid.append(value)
                due.update(amounts)
                series_in.append((record.timestamp_ms, sum(amounts.values())))
        lines = [json.loads(record.value or b"{}") for record in output]
        for record, line in zip(output, lines, strict=True):
            part, amount = self.amount(line)
            found[part] += amount
            series_out.append((record.timestamp_ms, amount))
        lost, duplicated = self.lost_and_duplicated(valid, lines)
        dead_letters = Counter(record.value or b"" for record in rejected)
        lost += sum(dead_letters[value] == 0 for value in wrong)
        duplicated += sum(max(0, dead_letters[value] - 1) for value in wrong)
        records_in = len(valid) + len(wrong)
        return Outcome(
            guarantee,
            records_in=records_in,
            rejected=len(wrong),
            counted=records_in - lost + duplicated,
            lost=lost,
            duplicated=duplicated,
            total_before=sum(due.values()),
            total_after=sum(found.values()),
            parts=[Part(name, due[name], found[name]) for name in sorted({*due, *found})],
            series_in=series_in,
            series_out=series_out,
        )

    @abstractmethod
    def shown(self, total: int) -> str:
        """A total for people."""

    def example(self) -> Any:
        """The program that users read: examples/ in the repository, a copy of it in an installed package."""
        here = Path(__file__).resolve()
        for folder in (here.parent / "examples", here.parents[3] / "examples"):
            if (folder / self.file).exists():
                return _load(folder / self.file)
        raise FileNotFoundError(
            f"examples/{self.file} is not there; install semel again, or run it from its repository"
        )


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- The bank: deposits and transfers in, a statement line for each booking out ---
ACCOUNTS = tuple(f"acc-{number:02}" for number in range(1, 25))
OPENING_CENTS = 100_000
DEPOSITS, WRONG_TRANSFERS = 0.35, 0.04  # shares of all events


class Bank(DemoWorkload):
    name = "bank"
    title = "a bank: deposits and transfers in, statements out"
    file = "bank.py"
    records = "transfers"
    total = "money"
    part = "account"

    def events(self, rng: random.Random, started_ms: int, per_s: float) -> Iterator[Event]:
        for number, account in enumerate(ACCOUNTS):
            yield _bank_event(number, kind="deposit", to=account, cents=OPENING_CENTS)
        number = len(ACCOUNTS)
        while True:
            yield _bank_wrong(rng, number) if rng.random() < WRONG_TRANSFERS else _bank_right(rng, number)
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

    def amounts(self, value: bytes) -> dict[str, int] | None:
        return _bookings_of(value)

    def amount(self, line: dict[str, Any]) -> tuple[str, int]:
        return line["account"], line["cents"]

    def lost_and_duplicated(self, valid: list[bytes], lines: list[dict[str, Any]]) -> tuple[int, int]:
        """By transfer: it is lost if one of its lines is missing."""
        found = Counter((line["id"], line["account"]) for line in lines)
        copies = [[found[json.loads(value)["id"], part] for part in _bookings_of(value) or ()] for value in valid]
        return sum(min(counts) == 0 for counts in copies), sum(max(0, max(counts) - 1) for counts in copies)


def _bank_event(number: int, **facts: Any) -> Event:
    return Event(b"%d" % number, json.dumps({"id": number, **facts}, separators=(",", ":")).encode())


def _bank_right(rng: random.Random, number: int) -> Event:
    if rng.random() < DEPOSITS:
        return _bank_event(number, kind="deposit", to=rng.choice(ACCOUNTS), cents=rng.randrange(100, 20_000))
    payer, payee = rng.sample(ACCOUNTS, 2)
    return _bank_event(number, kind="transfer", **{"from": payer}, to=payee, cents=rng.randrange(100, 10_000))


def _bank_wrong(rng: random.Random, number: int) -> Event:
    """One of the kinds that the pipeline must reject."""
    account = rng.choice(ACCOUNTS)
    kind = rng.randrange(4)
    if kind == 0:
        return Event(b"%d" % number, b"%d: this is no transfer" % number)
    if kind == 1:
        return _bank_event(number, kind="deposit", to=account, cents=-rng.randrange(1, 10_000))
    if kind == 2:
        return _bank_event(number, kind="transfer", **{"from": account}, to=account, cents=500)
    return _bank_event(number, kind="transfer", to=account, cents=500)


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


# --- Ad views: views in, counts per campaign and second out ---
CAMPAIGNS = ("spring", "summer", "autumn", "winter", "harvest", "snow", "ferry", "kite")
WRONG_VIEWS = 0.04  # share of all events
LATE_MS = 1_500  # views come out of order by so much; the pipeline waits longer than that
CLOSING = "closing"  # a last view, long after all others: every window before it is over
CLOSING_AFTER_MS = 60_000


class Ads(DemoWorkload):
    name = "ads"
    title = "ad views in, counts per campaign and second out"
    file = "ad_views.py"
    records = "views"
    total = "views"
    part = "campaign"

    def events(self, rng: random.Random, started_ms: int, per_s: float) -> Iterator[Event]:
        number = 0
        while True:
            seen_ms = started_ms + int(number * 1000 / per_s) - rng.randrange(LATE_MS)
            yield (
                _ads_wrong(rng, number, seen_ms)
                if rng.random() < WRONG_VIEWS
                else _ads_view(number, rng.choice(CAMPAIGNS), seen_ms)
            )
            number += 1

    def closing(self, started_ms: int, produced: int, per_s: float) -> list[Event]:
        over_ms = started_ms + int(produced * 1000 / per_s) + CLOSING_AFTER_MS
        return [_ads_view(produced + number, CLOSING, over_ms) for number in range(4)]

    def step(self, value: bytes) -> list[Event] | None:
        view = _ads_valid(value)
        if view is None:
            return None
        seen_ms = _ads_milliseconds(view["seen_at"])
        count = {"start": _ads_text(seen_ms - seen_ms % 1000), "campaign": view["campaign"], "views": 1}
        return [] if view["campaign"] == CLOSING else [Event(view["campaign"].encode(), json.dumps(count).encode())]

    def shown(self, total: int) -> str:
        return f"{total:,}"

    def amounts(self, value: bytes) -> dict[str, int] | None:
        """Windows that are still open are left out: those of the closing views."""
        view = _ads_valid(value)
        return None if view is None else {} if view["campaign"] == CLOSING else {view["campaign"]: 1}

    def amount(self, line: dict[str, Any]) -> tuple[str, int]:
        return line["campaign"], line["views"]

    def lost_and_duplicated(self, valid: list[bytes], lines: list[dict[str, Any]]) -> tuple[int, int]:
        """By window and campaign."""
        missing = Counter[tuple[int, str]]()  # below 0: there are too many
        for view in map(json.loads, valid):
            seen_ms = _ads_milliseconds(view["seen_at"])
            missing[seen_ms - seen_ms % 1000, view["campaign"]] += 1
        for line in lines:
            missing[_ads_milliseconds(line["start"]), line["campaign"]] -= line["views"]
        return (+missing).total(), (-missing).total()


def _ads_view(number: int, campaign: str, seen_ms: int) -> Event:
    view = {"id": number, "campaign": campaign, "seen_at": _ads_text(seen_ms)}
    return Event(b"%d" % number, json.dumps(view, separators=(",", ":")).encode())


def _ads_wrong(rng: random.Random, number: int, seen_ms: int) -> Event:
    """One of the kinds that the pipeline must reject."""
    if rng.random() < 0.5:
        return Event(b"%d" % number, b"%d: this is no view" % number)
    return _ads_view(number, "", seen_ms)


def _ads_valid(value: bytes) -> dict[str, Any] | None:
    view: dict[str, Any] = json.loads(value) if value.startswith(b"{") else {}
    return view if view.get("campaign") else None


def _ads_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ads_milliseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


# --- the table ---
WORKLOADS: dict[str, DemoWorkload] = {workload.name: workload for workload in (Bank(), Ads())}
