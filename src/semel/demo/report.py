"""The result of a demo: as a table, as JSON, and as a page."""

from __future__ import annotations

import os
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from semel import __version__
from semel.demo import charts
from semel.demo.charts import drawing, element, line, text
from semel.demo.play import Story, reader_name
from semel.demo.program import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, FAULTS, RETURNED
from semel.demo.workloads import DemoWorkload, Outcome


class Facts(NamedTuple):
    """All that a report is made of."""

    workload: DemoWorkload
    engine: str
    seed: int
    outcomes: list[Outcome]
    story: Story


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
    story = facts.story
    return {
        "demo": facts.workload.name,
        "engine": facts.engine,
        "seed": facts.seed,
        "duration_s": round(story.ended_s - story.started_s, 1),
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
            {"at_s": round(moment.at_s - story.started_s, 1), "killed": moment.who, "what": moment.text}
            for moment in charts.kills(story)
        ],
        "held": [{"fault": fault, "guarantee": guarantee, "point": point} for fault, guarantee, point in story.held],
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
        _what_happened(facts.story),
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


def _what_happened(story: Story) -> str:
    items = "".join(
        f"<li>{escape(moment.text)} <span>after {moment.at_s - story.started_s:.1f} s</span></li>"
        for moment in charts.kills(story)
    )
    return (
        f'<section><h2>What happened</h2><div class="wide">{charts.timeline(story)}</div>'
        f'<ol class="faults">{items}</ol></section>'
    )


def _headline(facts: Facts) -> str:
    exact = next(outcome for outcome in facts.outcomes if outcome.guarantee == EXACTLY_ONCE)
    killed = [moment.who for moment in charts.kills(facts.story)]
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
    workload, story, name = facts.workload, facts.story, outcome.guarantee.replace("_", " ")
    shown, difference = partial(_rounded, workload), _difference(workload, outcome)
    kind = "right" if difference == "exact" else "wrong"
    by_part = "Balances" if workload.name == "bank" else f"By {workload.part}"
    wrong = f"{outcome.wrong_parts} of {len(outcome.parts)} {workload.part}s wrong"
    return (
        f'<article class="{outcome.guarantee}"><h2><i></i>{name}</h2><p>{MEANINGS[outcome.guarantee]}</p>'
        f'<h3>{workload.total.capitalize()} <b class="{kind}">{difference}</b></h3>'
        '<p class="key"><span class="came"></span>came in <span class="said"></span>by the output</p>'
        + charts.totals(outcome, story, shown, f"{name}: {workload.total} over time")
        + "<h3>Rows written per second</h3>"
        + charts.throughput(outcome, story, f"{name}: throughput")
        + f'<h3>{by_part} <b class="{"wrong" if outcome.wrong_parts else "right"}">'
        + (wrong if outcome.wrong_parts else "all right")
        + '</b></h3><p class="key"><span class="due"></span>as it should be '
        + '<span class="found"></span>by the output</p>'
        + charts.balances(outcome, shown, f"{name}: {workload.part}s")
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
        for name, guarantee, point in facts.story.held:
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
    width = 3 * charts.WIDTH + 4 * MARGIN
    parts = [element("style", PICTURE_STYLE), element("rect", width=width, height=HEIGHT, rx=12, class_="paper")]
    for number, outcome in enumerate(facts.outcomes):
        x = MARGIN + number * (charts.WIDTH + MARGIN)
        parts += _column(facts, outcome, x)
    killed = "   ".join(
        f"{number} {moment.text.removeprefix('kill -9: ')};"
        for number, moment in enumerate(charts.kills(facts.story), 1)
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
    chart = charts.totals(outcome, facts.story, shown, "", width=charts.WIDTH, height=170, x=x, y=TOP)
    return [
        element("rect", x=x + 6, y=26, width=11, height=11, rx=3, class_=f"mark {outcome.guarantee}"),
        text(x + 24, 36, outcome.guarantee.replace("_", " "), class_="name"),
        text(x + 6, 58, f"{outcome.records_in:,} {workload.records} in, {outcome.counted:,} counted"),
        text(x + 6, 76, verdict, class_="right" if outcome.is_exact else "fault-mark"),
        line((x, 90), (x + charts.WIDTH, 90), class_="grid"),
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
