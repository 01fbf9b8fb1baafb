from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.curves import KAFKA, Point, draw
from benchmarks.loop_latency import Latency

SVG = "{http://www.w3.org/2000/svg}"


def test_curves_have_a_point_for_each_interval_and_a_higher_one_for_a_larger_value(tmp_path: Path) -> None:
    points = [
        Point(broker, size, interval_ms, share, {"read_committed": Latency(interval_ms / 2, interval_ms * 1.1, 3)})
        for broker, shares in (("semel", (0.5, 0.9)), (KAFKA, (0.4, 0.8)))
        for size in ("100 B", "1 KB")
        for interval_ms, share in zip((10, 1_000), shares, strict=True)
    ]
    draw(points, tmp_path)
    for name, curves in (("throughput", 2), ("latency", 4)):
        drawn = ElementTree.parse(tmp_path / f"curves-{name}.svg").getroot()
        words = {each.text for each in drawn.iter(f"{SVG}text")}
        assert {"100 B", "1 KB", "10 ms", "1000 ms"} <= words
        legend, *panels = [each.attrib["d"] for each in drawn.iter(f"{SVG}path") if "d" in each.attrib][curves - 1 :]
        assert legend
        assert len(panels) == 2 * curves
        for path in panels:
            (x0, y0), (x1, y1) = ([float(at) for at in pair.split()] for pair in path.lstrip("M").split("L"))
            assert x1 > x0, "later is further to the right"
            assert y1 < y0, "more is higher"
