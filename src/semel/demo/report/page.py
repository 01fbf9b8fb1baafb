"""The page: words, a table and the charts."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from semel import __version__
from semel.demo import tables
from semel.demo.plan import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, FAULTS, RETURNED
from semel.demo.play import Story
from semel.demo.reading import reader_name
from semel.demo.report import charts
from semel.demo.report.style import STYLE
from semel.demo.workloads import Outcome, Workload

MEANINGS = {
    AT_MOST_ONCE: "Positions first, then the rows. A crash in between leaves rows out.",
    AT_LEAST_ONCE: "Rows first, then the positions. A crash in between writes rows again.",
    EXACTLY_ONCE: "Rows, positions and the ledger entry in one transaction. A crash leaves all of it, or nothing.",
}
POINTS = {
    "sink.after_positions": {
        AT_MOST_ONCE: "positions stored, rows not written",
        EXACTLY_ONCE: "rows, ledger and positions in the transaction, EndTxn not sent",
    },
    "sink.after_write": {AT_LEAST_ONCE: "rows written, positions not stored"},
    "sink.after_commit": {EXACTLY_ONCE: "EndTxn answered, Spark's commit log not written"},
    RETURNED: dict.fromkeys((AT_MOST_ONCE, AT_LEAST_ONCE), "batch written, Spark's commit log not written"),
}


class Facts(NamedTuple):
    """All that a page is made of."""

    workload: Workload
    engine: str
    seed: int
    outcomes: list[Outcome]
    story: Story


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
    killed = [moment.who for moment in facts.story.moments if moment.what == "killed"]
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
    head = "".join(f"<th>{escape(cell)}</th>" for cell in tables.header(facts.workload))
    lines = []
    for outcome, row in zip(facts.outcomes, tables.rows(facts.workload, facts.outcomes), strict=True):
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

    def shown(value: float) -> str:
        return workload.shown(round(value)).removesuffix(".00")

    drift = outcome.total_after - outcome.total_before
    difference = f"{'+' if drift > 0 else '-'}{workload.shown(abs(drift))}" if drift else "exact"
    wrong = f"{outcome.wrong_parts} of {len(outcome.parts)} {workload.part}s wrong"
    return (
        f'<article class="{outcome.guarantee}"><h2><i></i>{name}</h2><p>{MEANINGS[outcome.guarantee]}</p>'
        f'<h3>{workload.total.capitalize()} <b class="{"wrong" if drift else "right"}">{difference}</b></h3>'
        '<p class="key"><span class="came"></span>came in <span class="said"></span>by the output</p>'
        + charts.totals(outcome, story, shown, f"{name}: {workload.total} over time")
        + "<h3>Rows written per second</h3>"
        + charts.throughput(outcome, story, f"{name}: throughput")
        + f'<h3>{_by_part(workload)} <b class="{"wrong" if outcome.wrong_parts else "right"}">'
        + (wrong if outcome.wrong_parts else "all right")
        + '</b></h3><p class="key"><span class="due"></span>as it should be '
        + '<span class="found"></span>by the output</p>'
        + charts.balances(outcome, shown, f"{name}: {workload.part}s")
        + "</article>"
    )


def _by_part(workload: Workload) -> str:
    return "Balances" if workload.name == "bank" else f"By {workload.part}"


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
