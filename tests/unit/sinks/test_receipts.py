"""Event ids as text that PostgreSQL can hold."""

from __future__ import annotations

from typing import Any

import pytest

from semel.sinks.postgres.rows import LONGEST_ID, event_id_of


@pytest.mark.parametrize("found", ["\ud800", "a\0b", "\ud800" * LONGEST_ID, b"\xff\0", 7])
def test_an_event_id_of_any_kind_becomes_text_that_can_be_stored(found: Any) -> None:
    """A half character comes out of JSON; it ended the loop although it had dead letters."""
    text = event_id_of(lambda record: found)(None)
    assert "\0" not in text.encode().decode()
    assert len(text) <= LONGEST_ID + len("sha256:")
