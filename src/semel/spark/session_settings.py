"""Settings of a query's session, changed for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(session: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """The session with other settings; afterwards it has those it had. A session belongs to one query."""
    before = {name: session.conf.get(name) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            session.conf.set(name, value)
