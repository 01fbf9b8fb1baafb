"""One examination: a snapshot of the cluster, and what is wrong in it."""

from __future__ import annotations

import time

import msgspec

from semel.client.admin.calls import AdminCalls
from semel.doctor.checks import Limits, find
from semel.doctor.findings import AILMENTS, Diagnosis
from semel.doctor.snapshot import take_snapshot


class Examination(msgspec.Struct, frozen=True):
    findings: list[Diagnosis]
    not_looked_at: list[str]
    took_ms: float


async def examine(calls: AdminCalls, limits: Limits | None = None, timeout_ms: float = 10_000) -> Examination:
    """Looks at a whole cluster. Changes nothing."""
    started_s = time.monotonic()
    snapshot = await take_snapshot(calls, timeout_ms)
    missing = list(snapshot.not_looked_at)
    if snapshot.steps is None:
        missing.append("fenced-again: only semel's broker tells who was fenced")
    found = find(snapshot, limits)
    return Examination(found, missing, (time.monotonic() - started_s) * 1000)


def told(finding: Diagnosis) -> dict[str, object]:
    """A finding with all its texts, for JSON."""
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
