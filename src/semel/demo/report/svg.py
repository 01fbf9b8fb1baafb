"""The few pieces of SVG that the charts are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

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
