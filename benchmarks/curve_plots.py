"""Curves as SVG, for the documentation: one panel for each size of a record, the time between commits to the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from semel.demo.report import Point, Scale, element, line, text

PANEL, TOP, HEIGHT, LEFT, GAP = 250, 64, 200, 56, 40
INK, PALE, OURS, PEER = "#33414e", "#d5dce2", "#0f8f7f", "#b7791f"


class Curve(NamedTuple):
    name: str
    values: Sequence[Point]  # milliseconds between commits, and what was measured
    is_peer: bool = False
    is_dashed: bool = False


def plot(title: str, panels: Mapping[str, Sequence[Curve]], unit: str, *, is_log: bool) -> str:
    """The panels side by side, with one scale for all of them."""
    found = [value for curves in panels.values() for curve in curves for _, value in curve.values]
    intervals = sorted({interval for curves in panels.values() for curve in curves for interval, _ in curve.values})
    high = max(found) * (1.5 if is_log else 1.05)
    bounds = (math.log10(min(found) / 1.5), math.log10(high)) if is_log else (0.0, high)
    scale = Scale(*bounds, TOP + HEIGHT, TOP)
    width = LEFT + len(panels) * (PANEL + GAP)
    parts = [
        element("rect", width=width, height=TOP + HEIGHT + 50, rx=8, fill="#f6f7f9"),
        text(LEFT, 22, title, fill=INK, font_weight=600),
    ]
    parts += _legend(next(iter(panels.values())))
    for number, (name, curves) in enumerate(panels.items()):
        left = LEFT + number * (PANEL + GAP)
        across = Scale(math.log10(intervals[0]), math.log10(intervals[-1]), left, left + PANEL)
        parts += _axes(name, across, scale, intervals, unit, is_log=is_log)
        for curve in curves:
            points = [(across(math.log10(x)), scale(math.log10(y) if is_log else y)) for x, y in curve.values]
            parts.append(_drawn(curve, points))
    named = {"viewBox": f"0 0 {width} {TOP + HEIGHT + 50}", "role": "img", "aria_label": title}
    named |= {"xmlns": "http://www.w3.org/2000/svg", "font_family": "system-ui, sans-serif", "font_size": "12"}
    return element("svg", "".join(parts), **named) + "\n"


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, x = [], float(LEFT)
    for curve in curves:
        parts.append(_drawn(curve, [(x, 38.0), (x + 24, 38.0)]))
        parts.append(text(x + 30, 42, curve.name, fill=INK))
        x += 50 + 7 * len(curve.name)
    return parts


def _drawn(curve: Curve, points: Sequence[Point]) -> str:
    color = PEER if curve.is_peer else OURS
    dashes = {"stroke_dasharray": "5 4"} if curve.is_dashed else {}
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    dots = "".join(element("circle", cx=x, cy=y, r=2.5, fill=color) for x, y in points)
    return element("path", d=path, fill="none", stroke=color, stroke_width=2, **dashes) + dots


def _axes(name: str, across: Scale, scale: Scale, intervals: Sequence[float], unit: str, *, is_log: bool) -> list[str]:
    parts = [text(across.start, TOP - 6, name, fill=INK, font_weight=600)]
    for tick in range(math.ceil(scale.low), math.floor(scale.high) + 1) if is_log else scale.ticks(5):
        y = scale(tick)
        parts.append(line((across.start, y), (across.end, y), stroke=PALE))
        value = f"{10.0**tick:g} {unit}" if is_log else f"{tick:g} {unit}"
        parts.append(text(across.start - 4, y + 4, value, fill=INK, text_anchor="end", font_size=10))
    for interval in intervals:
        x = across(math.log10(interval))
        parts.append(line((x, scale.start), (x, scale.start + 4), stroke=INK))
        parts.append(text(x, scale.start + 18, f"{interval:g} ms", fill=INK, text_anchor="middle", font_size=10))
    middle = (across.start + across.end) / 2
    parts.append(text(middle, scale.start + 36, "between commits", fill=INK, text_anchor="middle", font_size=10))
    return parts
