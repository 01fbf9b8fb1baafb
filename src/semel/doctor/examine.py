"""One examination: a snapshot of the cluster, and what is wrong in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from semel.client.admin.calls import AdminCalls
from semel.doctor.checks import Limits, find
from semel.doctor.findings import AILMENTS, Diagnosis
from semel.doctor.snapshot import take_snapshot


class Examination(msgspec.Struct, frozen=True):
    findings: list[Diagnosis]
    not_looked_at: list[str]
    took_ms: float


async def examine(
    calls: AdminCalls,
    limits: Limits | None = None,
    timeout_ms: float = 10_000,
    on_step: Callable[[int, str], None] = lambda number, what: None,
) -> Examination:
    """Looks at a whole cluster. Changes nothing. `on_step` is that of `take_snapshot`."""
    started_s = time.monotonic()
    snapshot = await take_snapshot(calls, timeout_ms, on_step)
    missing = list(snapshot.not_looked_at)
    if snapshot.steps is None:
        missing.append("fenced-again: only semel's broker lists who was fenced")
    found = find(snapshot, limits)
    return Examination(found, missing, (time.monotonic() - started_s) * 1000)


def as_json(finding: Diagnosis) -> dict[str, object]:
    """A finding with all its texts."""
    return {
        "name": finding.name,
        "where": finding.where,
        "certainty": finding.certainty.value,
        "title": AILMENTS[finding.name].title,
        "seen": finding.seen,
        "meaning": AILMENTS[finding.name].meaning,
        "cure": finding.cure,
        "is_command": finding.is_command,
    }
