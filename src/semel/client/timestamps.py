"""Times as Kafka has them, in milliseconds since 1970, and as Python has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from semel.client.errors import ConfigError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_END_MS = 2**63


def timestamp_ms(at: Any, what: str = "a timestamp") -> int:
    """A time as milliseconds since 1970: a number of them, or a datetime that knows its time zone (microseconds are
    dropped). `what` begins the message if it is neither."""
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            raise ConfigError(
                f"{what} is {at!r}, which has no time zone and so names no moment; give it one, such as "
                "datetime.now(timezone.utc) or at.astimezone()"
            )
        at = (at - EPOCH) // _MILLISECOND
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < _END_MS:
        raise ConfigError(f"{what} is a datetime or a number of milliseconds since 1970, from 0 up, not {at!r}")
    return at


def datetime_of(at_ms: int) -> datetime | None:
    """In UTC; None for -1, which stands for no timestamp, and for times that Python cannot name."""
    try:
        return EPOCH + timedelta(milliseconds=at_ms) if at_ms >= 0 else None
    except OverflowError:
        return None
