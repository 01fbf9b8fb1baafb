"""Times as datetime and as milliseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from semel import ConfigError
from semel.client import ConsumerRecord
from semel.client.types import datetime_of, timestamp_ms

NOON = datetime(2024, 2, 29, 12, 0, 0, 123_999, tzinfo=UTC)
NOON_MS = 1_709_208_000_123


def record_at(timestamp: int) -> ConsumerRecord:
    return ConsumerRecord("t", 0, 0, timestamp, None, None)


def test_a_datetime_is_its_milliseconds_in_any_time_zone() -> None:
    assert timestamp_ms(NOON) == NOON_MS
    assert timestamp_ms(NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))) == NOON_MS
    assert timestamp_ms(NOON_MS) == NOON_MS
    assert timestamp_ms(datetime(1970, 1, 1, tzinfo=UTC)) == 0


def test_every_millisecond_comes_back_as_it_was() -> None:
    for at_ms in (0, 1, 999, NOON_MS, NOON_MS + 1, 253_402_300_799_999):
        at = datetime_of(at_ms)
        assert at is not None
        assert timestamp_ms(at) == at_ms
        assert record_at(at_ms).datetime == at
        assert at.tzinfo is UTC


def test_a_datetime_without_time_zone_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"a time is .*no time zone.*timezone\.utc"):
        timestamp_ms(NOON.replace(tzinfo=None), "a time")


@pytest.mark.parametrize("at", [-1, 2**63, 1.5, True, "now", datetime(1969, 12, 31, 23, 59, tzinfo=UTC)])
def test_what_is_no_time_is_refused(at: Any) -> None:
    with pytest.raises(ConfigError, match="milliseconds since 1970"):
        timestamp_ms(at)


def test_no_timestamp_and_one_beyond_python_have_no_datetime() -> None:
    assert record_at(-1).datetime is None
    assert record_at(2**62).datetime is None
