"""Progress on a terminal is drawn over itself; elsewhere it is plain lines."""

from __future__ import annotations

import io

from semel.demo import program as module
from semel.demo.program import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_has_no_escape_sequences() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.lanes["exactly_once"].add(120)
    screen.moment("something happened", bad=True)
    screen.refresh()
    assert "\x1b" not in out.getvalue()
    assert "something happened" in out.getvalue()


def test_the_changing_part_is_erased_before_a_line_that_stays() -> None:
    out = Terminal()
    screen = Screen(out)
    screen.lanes["exactly_once"].add(120)
    screen.line("first")
    screen.refresh()
    drawn = out.getvalue()
    assert "120 rows in 1 batches" in drawn
    screen.line("second")
    assert out.getvalue()[len(drawn) :].startswith("\x1b[5A\x1b[J")


def test_json_mode_is_silent() -> None:
    out = Terminal()
    screen = Screen(out, silent=True)
    screen.line("first")
    screen.moment("second")
    screen.refresh()
    assert out.getvalue() == ""


def test_bars_grow_with_the_rows() -> None:
    lane = module.Lane()
    for rows in (0, 50, 100):
        lane.add(rows)
    assert (lane.rows, lane.batches, list(lane.recent)) == (150, 3, [0, 50, 100])
