"""How the page and its drawings look, in light and in dark."""

from __future__ import annotations

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
