"""Charts of a demo as SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from semel.demo.play import Moment, Story
from semel.demo.workloads import Outcome

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
    def of(cls, story: Story, width: int = WIDTH) -> TimeAxis:
        duration_s = max(1.0, story.ended_s - story.started_s)
        return cls(story.started_s, Scale(0, duration_s, LEFT, width - RIGHT))

    def x(self, at_s: float) -> float:
        return self.scale(min(max(at_s - self.started_s, 0), self.scale.high))

    def axis(self, top: float, bottom: float, about: int = 5) -> list[str]:
        parts = []
        for tick in self.scale.ticks(about):
            x = self.scale(tick)
            parts.append(line((x, top), (x, bottom), class_="grid"))
            parts.append(text(x, bottom + 15, f"{tick:g} s", class_="tick", text_anchor="middle"))
        return parts


def kills(story: Story) -> list[Moment]:
    """The faults; their numbers are their places in this list, from 1."""
    return [moment for moment in story.moments if moment.what == "killed"]


def fault_lines(clock: TimeAxis, story: Story, top: float, bottom: float) -> list[str]:
    parts = []
    for number, moment in enumerate(kills(story), 1):
        x = clock.x(moment.at_s)
        words = title(moment.text)
        parts.append(element("g", words + line((x, top), (x, bottom), class_="fault"), class_="faults"))
        parts.append(text(x, top - 4, str(number), class_="fault-mark", text_anchor="middle"))
    return parts


def totals(outcome: Outcome, story: Story, shown: Shown, label: str, **attributes: object) -> str:
    """What came in and what the output says, summed up over time."""
    height, top, bottom = 170, 18, 148
    clock = TimeAxis.of(story)
    came, said = _sums(outcome.series_in), _sums(outcome.series_out)
    high = max([1, *(value for _, value in came), *(value for _, value in said)])
    scale = Scale(0, high * 1.05, bottom, top)
    parts = _levels(scale, shown, 4)
    parts += clock.axis(top, bottom)
    parts += fault_lines(clock, story, top, bottom)
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


def throughput(outcome: Outcome, story: Story, label: str) -> str:
    """Rows written in each second."""
    height, top, bottom = 108, 18, 86
    clock = TimeAxis.of(story)
    seconds = Counter(int(at_ms / 1000 - story.started_s) for at_ms, _ in outcome.series_out)
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
    parts += fault_lines(clock, story, top, bottom)
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


def timeline(story: Story, width: int = 1120) -> str:
    """Who was up when, and the moments of the faults."""
    clock = TimeAxis.of(story, width)
    parts = clock.axis(16, 92, about=12)
    for row, who in enumerate(("broker", "driver")):
        y = 24 + row * 36
        parts.append(text(LEFT - 8, y + 17, who, class_="label", text_anchor="end"))
        for start_s, end_s in _spans(story, who):
            x = clock.x(start_s)
            parts.append(
                element("rect", x=x, y=y, width=max(1, round(clock.x(end_s) - x, 1)), height=26, rx=4, class_="up")
            )
    for number, moment in enumerate(kills(story), 1):
        x, y = clock.x(moment.at_s), 24 if moment.who == "broker" else 60
        parts.append(line((x, y - 5), (x, y + 31), class_="fault"))
        parts.append(element("circle", title(moment.text), cx=x, cy=y + 13, r=9, class_="fault-dot"))
        parts.append(text(x, y + 17, str(number), class_="fault-number", text_anchor="middle"))
    return drawing(width, 112, parts, "when the broker and the driver were up", class_="chart timeline")


def _spans(story: Story, who: str) -> list[tuple[float, float]]:
    """From each start to the end that followed it."""
    spans: list[tuple[float, float]] = []
    since_s: float | None = None
    for moment in story.moments:
        if moment.who != who:
            continue
        if moment.what == "up":
            since_s = moment.at_s if since_s is None else since_s
        elif since_s is not None:
            spans.append((since_s, moment.at_s))
            since_s = None
    return [*spans, (since_s, story.ended_s)] if since_s is not None else spans
