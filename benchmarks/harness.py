"""What the benchmarks share: taking turns, medians, and one way to report a comparison."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

from semel.progress import ProgressBar

NAMES = (
    "codec",
    "broker",
    "transactions",
    "curves",
    "client",
    "spark",
    "jobs",
    "nexmark",
    "spark_latency",
    "postgres",
    "decisions",
    "outbox",
    "state",
    "loop",
    "recovery",
    "watching",
)

Better = Literal["higher", "lower"]


class Row(NamedTuple):
    """One comparison; the field names are the keys of the JSON output."""

    bench: str
    case: str
    unit: str
    semel: float
    peer: str
    peer_value: float
    ratio: float
    runs: int
    spread: float


class Report(Protocol):
    """Takes one comparison: exactly the fields of `Row`, by name."""

    def __call__(self, **row: object) -> None: ...


def available() -> list[str]:
    """The benchmarks whose module is installed."""
    return [name for name in NAMES if find_spec(f"benchmarks.{name}") is not None]


# --- measuring ---


def interleave(
    contestants: Mapping[str, Callable[[], float]], runs: int = 5, warmup: int = 1
) -> dict[str, list[float]]:
    """Lets the contestants take turns and returns each one's values; a slow moment of the machine hits them all.

    A contestant measures itself and returns its value (see `rate` and `seconds`). Every second round goes backwards, so
    that nobody always runs in the wake of the same rival. Warm-up values are dropped.
    """
    names = list(contestants)
    values: dict[str, list[float]] = {name: [] for name in names}
    with ProgressBar("measuring", (warmup + runs) * len(names), "runs") as bar:
        for round_number in range(-warmup, runs):
            order = names if round_number % 2 == 0 else names[::-1]
            for turn, name in enumerate(order):
                gc.collect()  # the rubbish of one contestant is not charged to the next,
                gc.freeze()  # nor what this process holds to those who make many objects
                bar.show((round_number + warmup) * len(names) + turn, name, now=True)
                value = contestants[name]()
                if round_number >= 0:
                    values[name].append(value)
    gc.unfreeze()
    return values


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rate(work: Callable[[], object], amount: float) -> float:
    """Amount per second of one call, e.g. records/s."""
    return amount / seconds(work)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """(max - min) / median: 0.1 means that the runs differ by a tenth."""
    return (max(values) - min(values)) / median(values)


def compare(
    report: Report,
    *,
    bench: str,
    case: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    better: Better = "higher",
    subject: str = "semel",
) -> None:
    """Reports the subject against each of the others: throughput (`better="higher"`) or latency (`better="lower"`)."""
    ours = median(values[subject])
    for peer, peer_values in values.items():
        if peer == subject:
            continue
        theirs = median(peer_values)
        report(
            bench=bench,
            case=case,
            unit=unit,
            semel=ours,
            peer=peer,
            peer_value=theirs,
            ratio=ours / theirs if better == "higher" else theirs / ours,
            runs=len(values[subject]),
            spread=max(spread(values[subject]), spread(peer_values)),
        )


# --- reporting ---


def run_benchmarks(names: Sequence[str], *, as_json: bool, quick: bool) -> int:
    """Runs them one after the other; one that fails (a peer is missing, say) is reported and the others still run."""
    failed = []
    for name in names:
        print(f"semel bench {name} ...", file=sys.stderr, flush=True)
        collected = Collected(as_json)
        try:
            import_module(f"benchmarks.{name}").run(collected, quick=quick)
        except Exception as error:
            if len(names) == 1:
                raise
            print(f"semel bench {name} FAILED: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
        if collected.rows and not as_json:
            print(table(collected.rows), flush=True)
    return 1 if failed else 0


class Collected:
    """A `Report` that keeps the rows for a table, or prints each at once as a JSON line."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.rows: list[Row] = []

    def __call__(self, **fields: object) -> None:
        row = checked(fields)
        self.rows.append(row)
        if self.as_json:
            print(json.dumps(row._asdict()), flush=True)


def checked(fields: Mapping[str, object]) -> Row:
    """A benchmark that reports too much or too little is a bug, found here and not by whoever reads the output."""
    if set(fields) != set(Row._fields):
        raise TypeError(f"a comparison has exactly the keys {', '.join(Row._fields)}; got {', '.join(sorted(fields))}")
    return Row(**fields)  # type: ignore[arg-type]


def table(rows: Sequence[Row]) -> str:
    """The comparisons as aligned columns, ready to print."""
    head = ("bench", "case", "unit", "semel", "peer", "its value", "ratio", "runs", "spread")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    numbers = {3, 5, 6, 7, 8}
    return "\n".join(
        "  ".join(
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.bench,
        row.case,
        row.unit,
        readable(row.semel),
        row.peer,
        readable(row.peer_value),
        f"{row.ratio:.2f}x",
        str(row.runs),
        f"{row.spread:.0%}",
    )


def readable(value: float) -> str:
    """Three digits that matter: 1,234,567 stays whole, 0.01234 becomes 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
