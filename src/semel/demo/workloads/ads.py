"""Ad views: views in, counts per campaign and second out."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from semel.demo.workloads.base import DemoWorkload, Event, Outcome, OutputRecord, Part, rejected_twice_or_never

CAMPAIGNS = ("spring", "summer", "autumn", "winter", "harvest", "snow", "ferry", "kite")
WRONG = 0.04  # share of all events
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
                _wrong(rng, number, seen_ms) if rng.random() < WRONG else _view(number, rng.choice(CAMPAIGNS), seen_ms)
            )
            number += 1

    def closing(self, started_ms: int, produced: int, per_s: float) -> list[Event]:
        over_ms = started_ms + int(produced * 1000 / per_s) + CLOSING_AFTER_MS
        return [_view(produced + number, CLOSING, over_ms) for number in range(4)]

    def step(self, value: bytes) -> list[Event] | None:
        view = _valid(value)
        if view is None:
            return None
        seen_ms = _milliseconds(view["seen_at"])
        count = {"start": _text(seen_ms - seen_ms % 1000), "campaign": view["campaign"], "views": 1}
        return [] if view["campaign"] == CLOSING else [Event(view["campaign"].encode(), json.dumps(count).encode())]

    def shown(self, total: int) -> str:
        return f"{total:,}"

    def judge(
        self,
        guarantee: str,
        source: Sequence[OutputRecord],
        output: Sequence[OutputRecord],
        rejected: Sequence[OutputRecord],
    ) -> Outcome:
        due, wrong, series_in = _expected(source)
        counts = [(record.timestamp_ms, json.loads(record.value or b"{}")) for record in output]
        found = Counter[tuple[int, str]]()
        for _, count in counts:
            found[_milliseconds(count["start"]), count["campaign"]] += count["views"]
        lost, duplicated = rejected_twice_or_never(wrong, Counter(record.value or b"" for record in rejected))
        for window in {*due, *found}:
            lost += max(0, due[window] - found[window])
            duplicated += max(0, found[window] - due[window])
        records_in = sum(due.values()) + len(wrong)
        return Outcome(
            guarantee,
            records_in=records_in,
            rejected=len(wrong),
            counted=records_in - lost + duplicated,
            lost=lost,
            duplicated=duplicated,
            total_before=sum(due.values()),
            total_after=sum(found.values()),
            parts=_parts(due, found),
            series_in=series_in,
            series_out=[(at_ms, count["views"]) for at_ms, count in counts],
        )


def _view(number: int, campaign: str, seen_ms: int) -> Event:
    view = {"id": number, "campaign": campaign, "seen_at": _text(seen_ms)}
    return Event(b"%d" % number, json.dumps(view, separators=(",", ":")).encode())


def _wrong(rng: random.Random, number: int, seen_ms: int) -> Event:
    """One of the kinds that the pipeline must reject."""
    if rng.random() < 0.5:
        return Event(b"%d" % number, b"%d: this is no view" % number)
    return _view(number, "", seen_ms)


def _expected(source: Sequence[OutputRecord]) -> tuple[Counter[tuple[int, str]], list[bytes], list[tuple[int, int]]]:
    """(window and campaign -> views, what must be rejected, views over time). Windows that are still open are left
    out: those of the closing views."""
    due = Counter[tuple[int, str]]()
    wrong: list[bytes] = []
    series: list[tuple[int, int]] = []
    for record in source:
        value = record.value or b""
        view = _valid(value)
        if view is None:
            wrong.append(value)
        elif view["campaign"] != CLOSING:
            seen_ms = _milliseconds(view["seen_at"])
            due[seen_ms - seen_ms % 1000, view["campaign"]] += 1
            series.append((record.timestamp_ms, 1))
    return due, wrong, series


def _valid(value: bytes) -> dict[str, Any] | None:
    view: dict[str, Any] = json.loads(value) if value.startswith(b"{") else {}
    return view if view.get("campaign") else None


def _parts(due: Counter[tuple[int, str]], found: Counter[tuple[int, str]]) -> list[Part]:
    wanted, counted = Counter[str](), Counter[str]()
    for sums, windows in ((wanted, due), (counted, found)):
        for (_, campaign), views in windows.items():
            sums[campaign] += views
    return [Part(campaign, wanted[campaign], counted[campaign]) for campaign in sorted({*wanted, *counted})]


def _text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _milliseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
