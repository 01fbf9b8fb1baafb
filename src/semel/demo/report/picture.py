"""One image of a demo, for pages that cannot hold HTML: what came in and what came out, for each guarantee."""

from __future__ import annotations

from semel.demo.report import charts
from semel.demo.report.page import Facts
from semel.demo.report.style import COLOURS, SHAPES
from semel.demo.report.svg import drawing, element, line, text
from semel.demo.workloads import Outcome

MARGIN, TOP = 20, 96
HEIGHT = TOP + 240
# Images are shown with the fonts and the colours of their own: nothing is inherited from the page around them.
OWN = """
svg svg { overflow: visible; } text { font-size: 13px; } .name { font-size: 17px; font-weight: 600; fill: var(--ink); }
"""
STYLE = COLOURS + SHAPES + OWN


def picture(facts: Facts) -> str:
    width = 3 * charts.WIDTH + 4 * MARGIN
    parts = [element("style", STYLE), element("rect", width=width, height=HEIGHT, rx=12, class_="paper")]
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

    def shown(value: float) -> str:
        return workload.shown(round(value)).removesuffix(".00")

    wrong = [f"{outcome.lost:,} lost"] * bool(outcome.lost) + [f"{outcome.duplicated:,} twice"] * bool(
        outcome.duplicated
    )
    drift = outcome.total_after - outcome.total_before
    money = f"{'+' if drift > 0 else '-'}{workload.shown(abs(drift))}" if drift else "exact"
    verdict = f"{', '.join(wrong) or 'none lost, none twice'}; {workload.total} {money}"
    chart = charts.totals(outcome, facts.story, shown, "", width=charts.WIDTH, height=170, x=x, y=TOP)
    return [
        element("rect", x=x + 6, y=26, width=11, height=11, rx=3, class_=f"mark {outcome.guarantee}"),
        text(x + 24, 36, outcome.guarantee.replace("_", " "), class_="name"),
        text(x + 6, 58, f"{outcome.records_in:,} {workload.records} in, {outcome.counted:,} counted"),
        text(x + 6, 76, verdict, class_="right" if outcome.is_exact else "fault-mark"),
        line((x, 90), (x + charts.WIDTH, 90), class_="grid"),
        chart,
    ]
