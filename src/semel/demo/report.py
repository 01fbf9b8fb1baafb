"""The result of a demo: as a table, as JSON, and as a page."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from semel import __version__
from semel.demo.program import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, FAULTS, RETURNED
from semel.demo.testbed import Moment, RunHistory, reader_name
from semel.demo.workloads import DemoWorkload, Outcome

# --- Charts of a demo as SVG ---


Point = tuple[float, float]


class Scale(NamedTuple):
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[float]:
        """Round numbers inside the range."""
        raw = (self.high - self.low) / max(1, about) or 1.0
        magnitude = 10 ** math.floor(math.log10(raw))
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def element(name: str, content: str = "", /, **attributes: object) -> str:
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    return element("text", escape(words), x=x, y=y, **attributes)


def title(words: str) -> str:
    """Shown by a browser when the pointer rests on what it is part of."""
    return element("title", escape(words))


def line(a: Point, b: Point, **attributes: object) -> str:
    return element("line", x1=a[0], y1=a[1], x2=b[0], y2=b[1], **attributes)


def steps(points: Sequence[Point], end_x: float) -> str:
    """A path that holds each value until the next."""
    path = []
    for number, (x, y) in enumerate(points):
        path.append(f"M{x} {y}" if not number else f"H{x}V{y}")
    return "".join(path) + f"H{end_x}" if path else ""


def drawing(width: int, height: int, parts: Iterable[str], label: str, /, **attributes: object) -> str:
    return element(
        "svg",
        "".join(parts),
        **{"viewBox": f"0 0 {width} {height}", "role": "img", "aria_label": label, **attributes},
    )


# --- totals and throughput over time, the parts of the total, and which process was up when ---
WIDTH = 360
LEFT, RIGHT = 54, 10
Shown = Callable[[float], str]


class TimeAxis(NamedTuple):
    """Seconds of the demo to pixels, the same for all charts."""

    started_s: float
    scale: Scale

    @classmethod
    def of(cls, history: RunHistory, width: int = WIDTH) -> TimeAxis:
        duration_s = max(1.0, history.ended_s - history.started_s)
        return cls(history.started_s, Scale(0, duration_s, LEFT, width - RIGHT))

    def x(self, at_s: float) -> float:
        return self.scale(min(max(at_s - self.started_s, 0), self.scale.high))

    def axis(self, top: float, bottom: float, about: int = 5) -> list[str]:
        parts = []
        for tick in self.scale.ticks(about):
            x = self.scale(tick)
            parts.append(line((x, top), (x, bottom), class_="grid"))
            parts.append(text(x, bottom + 15, f"{tick:g} s", class_="tick", text_anchor="middle"))
        return parts


def kills(history: RunHistory) -> list[Moment]:
    """The faults; their numbers are their places in this list, from 1."""
    return [moment for moment in history.moments if moment.what == "killed"]


def fault_lines(clock: TimeAxis, history: RunHistory, top: float, bottom: float) -> list[str]:
    parts = []
    for number, moment in enumerate(kills(history), 1):
        x = clock.x(moment.at_s)
        words = title(moment.text)
        parts.append(element("g", words + line((x, top), (x, bottom), class_="fault"), class_="faults"))
        parts.append(text(x, top - 4, str(number), class_="fault-mark", text_anchor="middle"))
    return parts


def totals(outcome: Outcome, history: RunHistory, shown: Shown, label: str, **attributes: object) -> str:
    """What came in and what the output says, summed up over time."""
    height, top, bottom = 170, 18, 148
    clock = TimeAxis.of(history)
    came, said = _sums(outcome.series_in), _sums(outcome.series_out)
    high = max([1, *(value for _, value in came), *(value for _, value in said)])
    scale = Scale(0, high * 1.05, bottom, top)
    parts = _levels(scale, shown, 4)
    parts += clock.axis(top, bottom)
    parts += fault_lines(clock, history, top, bottom)
    end_x = clock.scale.end
    for series, kind in ((came, "came"), (said, "said")):
        points: list[Point] = [(clock.x(at_ms / 1000), scale(value)) for at_ms, value in series]
        parts.append(element("path", d=steps(points, end_x), class_=kind))
    return drawing(WIDTH, height, parts, label, class_=f"chart {outcome.guarantee}", **attributes)


def _levels(scale: Scale, shown: Shown, about: int) -> list[str]:
    parts = []
    for tick in scale.ticks(about):
        y = scale(tick)
        parts.append(line((LEFT, y), (WIDTH - RIGHT, y), class_="grid"))
        parts.append(text(LEFT - 6, y + 4, shown(tick), class_="tick", text_anchor="end"))
    return parts


def _sums(series: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Running totals, one point for each moment."""
    by_time = Counter[int]()
    for at_ms, amount in series:
        by_time[at_ms] += amount
    times = sorted(by_time)
    return list(zip(times, accumulate(by_time[at_ms] for at_ms in times), strict=True))


def throughput(outcome: Outcome, history: RunHistory, label: str) -> str:
    """Rows written in each second."""
    height, top, bottom = 108, 18, 86
    clock = TimeAxis.of(history)
    seconds = Counter(int(at_ms / 1000 - history.started_s) for at_ms, _ in outcome.series_out)
    scale = Scale(0, max(seconds.values(), default=1) * 1.05, bottom, top)
    parts = _levels(scale, lambda value: f"{value:,.0f}", 4)
    parts += clock.axis(top, bottom)
    width = max(1.5, clock.scale(1) - clock.scale(0) - 1)
    for second, rows in sorted(seconds.items()):
        y = scale(rows)
        words = title(f"second {second}: {rows:,} rows")
        parts.append(
            element("rect", words, x=clock.scale(second), y=y, width=width, height=round(bottom - y, 1), class_="bar")
        )
    parts += fault_lines(clock, history, top, bottom)
    return drawing(WIDTH, height, parts, label, class_=f"chart {outcome.guarantee}")


def balances(outcome: Outcome, shown: Shown, label: str) -> str:
    """Each part as it should be (wide, pale) and as the output says (narrow)."""
    height, top, bottom = 132, 8, 110
    values = [value for part in outcome.parts for value in (part.expected, part.found)]
    scale = Scale(min(0, *values), max(1, *values) * 1.05, bottom, top)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(outcome.parts))
    parts = _levels(scale, shown, 3)
    for number, part in enumerate(outcome.parts):
        x = round(LEFT + number * slot, 1)
        words = title(f"{part.name}: should be {shown(part.expected)}, is {shown(part.found)}")
        bars = _upright(scale, part.expected, x + slot * 0.1, slot * 0.8, "due")
        kind = "found" if part.expected == part.found else "found wrong"
        bars += _upright(scale, part.found, x + slot * 0.32, slot * 0.36, kind)
        parts.append(element("g", words + bars))
        if slot > 30 or number % 3 == 0:
            name = part.name.removeprefix("acc-")
            parts.append(text(round(x + slot / 2, 1), bottom + 15, name, class_="tick", text_anchor="middle"))
    parts.append(line((LEFT, scale(0)), (WIDTH - RIGHT, scale(0)), class_="zero"))
    return drawing(WIDTH, height, parts, label, class_=f"chart {outcome.guarantee}")


def _upright(scale: Scale, value: float, x: float, width: float, kind: str) -> str:
    top, bottom = sorted((scale(value), scale(0)))
    return element(
        "rect",
        x=round(x, 1),
        y=top,
        width=round(width, 1),
        height=max(0.5, round(bottom - top, 1)),
        class_=kind,
    )


def timeline(history: RunHistory, width: int = 1120) -> str:
    """Who was up when, and the moments of the faults."""
    clock = TimeAxis.of(history, width)
    parts = clock.axis(16, 92, about=12)
    for row, who in enumerate(("broker", "driver")):
        y = 24 + row * 36
        parts.append(text(LEFT - 8, y + 17, who, class_="label", text_anchor="end"))
        for start_s, end_s in _spans(history, who):
            x = clock.x(start_s)
            parts.append(
                element("rect", x=x, y=y, width=max(1, round(clock.x(end_s) - x, 1)), height=26, rx=4, class_="up")
            )
    for number, moment in enumerate(kills(history), 1):
        x, y = clock.x(moment.at_s), 24 if moment.who == "broker" else 60
        parts.append(line((x, y - 5), (x, y + 31), class_="fault"))
        parts.append(element("circle", title(moment.text), cx=x, cy=y + 13, r=9, class_="fault-dot"))
        parts.append(text(x, y + 17, str(number), class_="fault-number", text_anchor="middle"))
    return drawing(width, 112, parts, "when the broker and the driver were up", class_="chart timeline")


def _spans(history: RunHistory, who: str) -> list[tuple[float, float]]:
    """From each start to the end that followed it."""
    spans: list[tuple[float, float]] = []
    since_s: float | None = None
    for moment in history.moments:
        if moment.who != who:
            continue
        if moment.what == "up":
            since_s = moment.at_s if since_s is None else since_s
        elif since_s is not None:
            spans.append((since_s, moment.at_s))
            since_s = None
    return [*spans, (since_s, history.ended_s)] if since_s is not None else spans


class Facts(NamedTuple):
    """All that a report is made of."""

    workload: DemoWorkload
    engine: str
    seed: int
    outcomes: list[Outcome]
    history: RunHistory


# --- The result of a demo as a small table, and as JSON ---
def table_header(workload: DemoWorkload) -> tuple[str, ...]:
    return ("", "records in", "counted", "lost", "duplicated", f"{workload.total} in", f"{workload.total} out")


def table_rows(facts: Facts) -> list[tuple[str, ...]]:
    return [
        (
            outcome.guarantee,
            f"{outcome.records_in:,}",
            f"{outcome.counted:,}",
            f"{outcome.lost:,}",
            f"{outcome.duplicated:,}",
            facts.workload.shown(outcome.total_before),
            facts.workload.shown(outcome.total_after),
        )
        for outcome in facts.outcomes
    ]


def text_table(facts: Facts) -> str:
    """Aligned columns, numbers to the right."""
    table = [table_header(facts.workload), *table_rows(facts)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  " + "  ".join([row[0].ljust(widths[0]), *cells])

    rule = "  " + "  ".join("─" * width for width in widths)
    return "\n".join([line(table[0]), rule, *(line(row) for row in table[1:])])


def as_json(facts: Facts) -> dict[str, Any]:
    history = facts.history
    return {
        "demo": facts.workload.name,
        "engine": facts.engine,
        "seed": facts.seed,
        "duration_s": round(history.ended_s - history.started_s, 1),
        "guarantees": {
            outcome.guarantee: {
                "records_in": outcome.records_in,
                "rejected": outcome.rejected,
                "counted": outcome.counted,
                "lost": outcome.lost,
                "duplicated": outcome.duplicated,
                "total_before": outcome.total_before,
                "total_after": outcome.total_after,
                f"wrong_{facts.workload.part}s": outcome.wrong_parts,
            }
            for outcome in facts.outcomes
        },
        "faults": [
            {"at_s": round(moment.at_s - history.started_s, 1), "killed": moment.who, "what": moment.text}
            for moment in kills(history)
        ],
        "held": [{"fault": fault, "guarantee": guarantee, "point": point} for fault, guarantee, point in history.held],
    }


# --- The report as a page, and the picture for the README ---
COLOURS = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1d21; --soft: #62656e; --rule: #e4e4e0; --grid: #ecece8;
  --most: #c2570c; --least: #7a4fd0; --exact: #0b7a6b; --fault: #d02c3f; --pale: #c9ccd3; --good: #0b7a6b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14151a; --card: #1c1e25; --ink: #ecedf0; --soft: #9da1ad; --rule: #2d3039; --grid: #272a32;
  --most: #f2995a; --least: #b197f5; --exact: #43c7b2; --fault: #ff6b7a; --pale: #4c505c; --good: #43c7b2; } }
.at_most_once { --c: var(--most); } .at_least_once { --c: var(--least); } .exactly_once { --c: var(--exact); }
"""

SHAPES = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
.timeline text { font-size: 12px; } .timeline .label { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; } .zero { stroke: var(--soft); stroke-width: 1; }
path.came, path.said { fill: none; stroke-width: 2; stroke-linejoin: round; }
path.came { stroke: var(--pale); stroke-width: 5; } path.said { stroke: var(--c); }
.bar { fill: var(--c); } .due { fill: var(--pale); } .found { fill: var(--c); } .mark { fill: var(--c); }
.up { fill: var(--exact); opacity: 0.22; } .fault { stroke: var(--fault); stroke-width: 1.5; stroke-dasharray: 3 3; }
.timeline .fault { stroke-dasharray: none; stroke-width: 2; }
text.fault-mark { fill: var(--fault); font-weight: 650; } text.right { fill: var(--good); font-weight: 650; }
.fault-dot { fill: var(--fault); } .timeline text.fault-number { fill: var(--card); font-weight: 700; }
.paper { fill: var(--card); stroke: var(--rule); }
"""

PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: 30px; line-height: 1.2; margin: 4px 0 10px; letter-spacing: -0.01em; text-wrap: balance; }
h1.bad { color: var(--fault); }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 13px; margin: 18px 0 2px; color: var(--soft); font-weight: 600; }
h3 b { font-weight: 600; margin-left: 6px; } b.wrong, td.wrong { color: var(--fault); } b.right { color: var(--good); }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: 0.06em; text-transform: uppercase; }
.lead { max-width: 72ch; color: var(--soft); margin: 0; font-size: 16px; }
section, article { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 20px; }
section { margin-top: 20px; } .table { overflow-x: auto; } .wide { overflow-x: auto; } .wide svg { min-width: 760px; }
.lanes { display: grid; gap: 20px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }
article > p { margin: 0; color: var(--soft); min-height: 4.5em; } article > p.key { min-height: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 12px; border-top: 1px solid var(--rule); white-space: nowrap; }
thead th { border: 0; color: var(--soft); font-size: 13px; font-weight: 500; }
th:first-child, .words td, .words th { text-align: left; } td.wrong { font-weight: 650; }
.words td { white-space: normal; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; background: var(--c); }
.key { font-size: 12px; color: var(--soft); }
.key span { display: inline-block; width: 16px; height: 3px; margin: 0 6px 3px 0; vertical-align: middle; }
.key span:not(:first-child) { margin-left: 14px; }
span.came { background: var(--pale); } span.said { background: var(--c); }
.key span.due { height: 10px; width: 10px; background: var(--pale); }
.key span.found { height: 10px; width: 5px; background: var(--c); }
svg { display: block; width: 100%; height: auto; }
ol.faults { margin: 12px 0 0; padding-left: 22px; } ol.faults ::marker { color: var(--fault); font-weight: 650; }
ol.faults span { color: var(--soft); }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; max-width: 90ch; }
"""

STYLE = COLOURS + SHAPES + PAGE


# --- the page ---
MEANINGS = {
    AT_MOST_ONCE: "Offsets first, then the rows. A crash in between leaves rows out.",
    AT_LEAST_ONCE: "Rows first, then the offsets. A crash in between writes rows again.",
    EXACTLY_ONCE: "Rows, offsets and the ledger entry in one transaction. A crash leaves all of it, or nothing.",
}
POINTS = {
    "sink.after_offsets": {
        AT_MOST_ONCE: "offsets stored, rows not written",
        EXACTLY_ONCE: "rows, ledger and offsets in the transaction, EndTxn not sent",
    },
    "sink.after_write": {AT_LEAST_ONCE: "rows written, offsets not stored"},
    "sink.after_commit": {EXACTLY_ONCE: "EndTxn responded, Spark's commit log not written"},
    RETURNED: dict.fromkeys((AT_MOST_ONCE, AT_LEAST_ONCE), "batch written, Spark's commit log not written"),
}


def page(facts: Facts) -> str:
    body = [
        _headline(facts),
        _table(facts),
        _what_happened(facts.history),
        '<div class="lanes">' + "".join(_lane(facts, outcome) for outcome in facts.outcomes) + "</div>",
        _where_they_stood(facts),
        _footer(facts),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>semel demo: {facts.workload.name}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _what_happened(history: RunHistory) -> str:
    items = "".join(
        f"<li>{escape(moment.text)} <span>after {moment.at_s - history.started_s:.1f} s</span></li>"
        for moment in kills(history)
    )
    return (
        f'<section><h2>What happened</h2><div class="wide">{timeline(history)}</div>'
        f'<ol class="faults">{items}</ol></section>'
    )


def _headline(facts: Facts) -> str:
    exact = next(outcome for outcome in facts.outcomes if outcome.guarantee == EXACTLY_ONCE)
    killed = [moment.who for moment in kills(facts.history)]
    engine = "Spark" if facts.engine == "spark" else "semel.process"
    verdict = (
        f"Exactly once, {exact.records_in:,} {facts.workload.records} through {len(killed)} kills: "
        "nothing lost, nothing doubled."
        if exact.is_exact
        else f"Exactly once was violated: {exact.lost} lost, {exact.duplicated} duplicated. "
        "Please report it, with the seed."
    )
    lead = (
        f"{facts.workload.title.capitalize()}. One program on {engine} ran the same pipeline three times side by "
        f"side, on the same input. It was killed with kill -9 {_times(killed.count('driver'))} while it committed, and "
        f"the broker {_times(killed.count('broker'))}."
    )
    kind = "good" if exact.is_exact else "bad"
    return (
        f'<header><p class="kicker">semel demo</p><h1 class="{kind}">{escape(verdict)}</h1>'
        f'<p class="lead">{escape(lead)}</p></header>'
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _table(facts: Facts) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table_header(facts.workload))
    lines = []
    for outcome, row in zip(facts.outcomes, table_rows(facts), strict=True):
        wrong = {3: outcome.lost, 4: outcome.duplicated, 6: outcome.total_after != outcome.total_before}
        cells = "".join(
            f'<td class="{"wrong" if wrong.get(number) else ""}">{escape(cell)}</td>'
            for number, cell in enumerate(row)
            if number
        )
        lines.append(f'<tr><th class="{outcome.guarantee}"><i></i>{row[0].replace("_", " ")}</th>{cells}</tr>')
    return (
        f'<section class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></section>'
    )


def _lane(facts: Facts, outcome: Outcome) -> str:
    workload, history, name = facts.workload, facts.history, outcome.guarantee.replace("_", " ")
    shown, difference = partial(_rounded, workload), _difference(workload, outcome)
    kind = "right" if difference == "exact" else "wrong"
    by_part = "Balances" if workload.name == "bank" else f"By {workload.part}"
    wrong = f"{outcome.wrong_parts} of {len(outcome.parts)} {workload.part}s wrong"
    return (
        f'<article class="{outcome.guarantee}"><h2><i></i>{name}</h2><p>{MEANINGS[outcome.guarantee]}</p>'
        f'<h3>{workload.total.capitalize()} <b class="{kind}">{difference}</b></h3>'
        '<p class="key"><span class="came"></span>came in <span class="said"></span>by the output</p>'
        + totals(outcome, history, shown, f"{name}: {workload.total} over time")
        + "<h3>Rows written per second</h3>"
        + throughput(outcome, history, f"{name}: throughput")
        + f'<h3>{by_part} <b class="{"wrong" if outcome.wrong_parts else "right"}">'
        + (wrong if outcome.wrong_parts else "all right")
        + '</b></h3><p class="key"><span class="due"></span>as it should be '
        + '<span class="found"></span>by the output</p>'
        + balances(outcome, shown, f"{name}: {workload.part}s")
        + "</article>"
    )


def _rounded(workload: DemoWorkload, value: float) -> str:
    return workload.shown(round(value)).removesuffix(".00")


def _difference(workload: DemoWorkload, outcome: Outcome) -> str:
    drift = outcome.total_after - outcome.total_before
    return f"{'+' if drift > 0 else '-'}{workload.shown(abs(drift))}" if drift else "exact"


def _where_they_stood(facts: Facts) -> str:
    lines = []
    for fault in FAULTS:
        for name, guarantee, point in facts.history.held:
            if name == fault.name:
                what = POINTS.get(point, {}).get(guarantee, point)
                cells = (f"{fault.victim}, {fault.what}", guarantee.replace("_", " "), what)
                lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        '<section class="table"><h2>Where each pipeline stood when it was hit</h2>'
        '<table class="words"><thead><tr><th>kill -9</th>'
        f"<th>guarantee</th><th>at that moment</th></tr></thead><tbody>{''.join(lines)}</tbody></table></section>"
    )


def _footer(facts: Facts) -> str:
    exact = facts.outcomes[-1]
    words = (
        f"Records in: what the producer committed, {exact.rejected:,} of them invalid on purpose (they belong in the "
        "dead-letter topic, once each). Counted: how often they are in the output. "
        f"Counted by {reader_name()}, from the topics alone. semel {__version__}, seed {facts.seed}. "
        f"Again: semel demo {facts.workload.name} --seed {facts.seed}"
    )
    return f"<footer><p>{escape(words)}</p></footer>"


# --- one image, for pages that cannot hold HTML ---
MARGIN, TOP = 20, 96
HEIGHT = TOP + 240
# Images are shown with the fonts and the colours of their own: nothing is inherited from the page around them.
OWN = """
svg svg { overflow: visible; } text { font-size: 13px; } .name { font-size: 17px; font-weight: 600; fill: var(--ink); }
"""
PICTURE_STYLE = COLOURS + SHAPES + OWN


def picture(facts: Facts) -> str:
    width = 3 * WIDTH + 4 * MARGIN
    parts = [element("style", PICTURE_STYLE), element("rect", width=width, height=HEIGHT, rx=12, class_="paper")]
    for number, outcome in enumerate(facts.outcomes):
        x = MARGIN + number * (WIDTH + MARGIN)
        parts += _column(facts, outcome, x)
    killed = "   ".join(
        f"{number} {moment.text.removeprefix('kill -9: ')};" for number, moment in enumerate(kills(facts.history), 1)
    )
    key = f"{facts.workload.total} over time: grey came in, coloured by the output"
    parts.append(text(MARGIN + 6, HEIGHT - 44, key))
    parts.append(text(MARGIN + 6, HEIGHT - 22, f"kill -9 of {killed[:-1]}", class_="fault-mark"))
    return drawing(width, HEIGHT, parts, "semel demo", xmlns="http://www.w3.org/2000/svg", width=width, height=HEIGHT)


def _column(facts: Facts, outcome: Outcome, x: float) -> list[str]:
    workload = facts.workload
    wrong = [f"{outcome.lost:,} lost"] * bool(outcome.lost) + [f"{outcome.duplicated:,} twice"] * bool(
        outcome.duplicated
    )
    difference = _difference(workload, outcome)
    verdict = f"{', '.join(wrong) or 'none lost, none twice'}; {workload.total} {difference}"
    shown = partial(_rounded, workload)
    chart = totals(outcome, facts.history, shown, "", width=WIDTH, height=170, x=x, y=TOP)
    return [
        element("rect", x=x + 6, y=26, width=11, height=11, rx=3, class_=f"mark {outcome.guarantee}"),
        text(x + 24, 36, outcome.guarantee.replace("_", " "), class_="name"),
        text(x + 6, 58, f"{outcome.records_in:,} {workload.records} in, {outcome.counted:,} counted"),
        text(x + 6, 76, verdict, class_="right" if outcome.is_exact else "fault-mark"),
        line((x, 90), (x + WIDTH, 90), class_="grid"),
        chart,
    ]


# --- the file ---
def write(path: Path, facts: Facts) -> Path:
    """Writes the page beside its place first, so that a reader never finds half of it."""
    path = path.absolute()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(page(facts))
    aside.replace(path)
    return path
