"""The result of a demo as a small table, and as JSON."""

from __future__ import annotations

from typing import Any

from semel.demo.play import Story
from semel.demo.workloads import DemoWorkload, Outcome


def header(workload: DemoWorkload) -> tuple[str, ...]:
    return ("", "records in", "counted", "lost", "duplicated", f"{workload.total} in", f"{workload.total} out")


def rows(workload: DemoWorkload, outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    return [
        (
            outcome.guarantee,
            f"{outcome.records_in:,}",
            f"{outcome.counted:,}",
            f"{outcome.lost:,}",
            f"{outcome.duplicated:,}",
            workload.shown(outcome.total_before),
            workload.shown(outcome.total_after),
        )
        for outcome in outcomes
    ]


def text(workload: DemoWorkload, outcomes: list[Outcome]) -> str:
    """Aligned columns, numbers to the right."""
    table = [header(workload), *rows(workload, outcomes)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  " + "  ".join([row[0].ljust(widths[0]), *cells])

    rule = "  " + "  ".join("─" * width for width in widths)
    return "\n".join([line(table[0]), rule, *(line(row) for row in table[1:])])


def as_json(workload: DemoWorkload, outcomes: list[Outcome], story: Story, seed: int, engine: str) -> dict[str, Any]:
    return {
        "demo": workload.name,
        "engine": engine,
        "seed": seed,
        "duration_s": round(story.ended_s - story.started_s, 1),
        "guarantees": {
            outcome.guarantee: {
                "records_in": outcome.records_in,
                "rejected": outcome.rejected,
                "counted": outcome.counted,
                "lost": outcome.lost,
                "duplicated": outcome.duplicated,
                "total_before": outcome.total_before,
                "total_after": outcome.total_after,
                f"wrong_{workload.part}s": outcome.wrong_parts,
            }
            for outcome in outcomes
        },
        "faults": [
            {"at_s": round(moment.at_s - story.started_s, 1), "killed": moment.who, "what": moment.text}
            for moment in story.moments
            if moment.what == "killed"
        ],
        "held": [{"fault": fault, "guarantee": guarantee, "point": point} for fault, guarantee, point in story.held],
    }
