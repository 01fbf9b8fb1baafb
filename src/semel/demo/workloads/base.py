"""A workload: its topics, its example, its events and its judge."""

from __future__ import annotations

import importlib.util
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

PARTITIONS = 2


class DemoTopics(NamedTuple):
    """The names of one pipeline's topics. All three pipelines read the same source."""

    source: str
    output: str
    rejected: str
    application_id: str

    @classmethod
    def of(cls, prefix: str, guarantee: str) -> DemoTopics:
        stem = f"{prefix}.{guarantee}"
        return cls(f"{prefix}.in", f"{stem}.out", f"{stem}.rejected", stem)

    def partitions(self) -> dict[str, int]:
        return {self.source: PARTITIONS, self.output: PARTITIONS, self.rejected: 1}


class Event(NamedTuple):
    """One record to be produced."""

    key: bytes
    value: bytes


class OutputRecord(Protocol):
    """A record as a reader got it."""

    @property
    def timestamp_ms(self) -> int: ...

    @property
    def value(self) -> bytes | None: ...


class Part(NamedTuple):
    """An account, a campaign: what it should have, and what the output says."""

    name: str
    expected: int
    found: int


class Outcome(msgspec.Struct, frozen=True):
    """What a guarantee led to. records_in - lost + duplicated = counted."""

    guarantee: str
    records_in: int
    rejected: int  # of the records in: what is not valid and must be in the dead-letter topic
    counted: int
    lost: int
    duplicated: int
    total_before: int
    total_after: int
    parts: list[Part]
    series_in: list[tuple[int, int]]  # (when in ms, how much came in)
    series_out: list[tuple[int, int]]

    @property
    def is_exact(self) -> bool:
        return not self.lost and not self.duplicated and self.total_before == self.total_after

    @property
    def wrong_parts(self) -> int:
        return sum(part.expected != part.found for part in self.parts)


class DemoWorkload(ABC):
    """What a demo needs to know of a pipeline."""

    name: str
    title: str
    file: str  # of its example
    records: str  # what the records in are called
    total: str  # what is summed up
    part: str  # what the sum is made of

    @abstractmethod
    def events(self, rng: random.Random, started_ms: int, per_s: float) -> Iterator[Event]:
        """All that may be produced, without an end. Every event has an id of its own."""

    @abstractmethod
    def closing(self, started_ms: int, produced: int, per_s: float) -> list[Event]:
        """Produced last, so that nothing waits for more."""

    @abstractmethod
    def step(self, value: bytes) -> list[Event] | None:
        """The pipeline without Spark, for one record: what goes out, or None if it is rejected."""

    @abstractmethod
    def judge(
        self,
        guarantee: str,
        source: Sequence[OutputRecord],
        output: Sequence[OutputRecord],
        rejected: Sequence[OutputRecord],
    ) -> Outcome:
        """Compares what came out with what went in, all of it as an independent reader saw it."""

    @abstractmethod
    def shown(self, total: int) -> str:
        """A total for people."""

    def example(self) -> Any:
        """The program that users read: examples/ in the repository, a copy of it in an installed package."""
        here = Path(__file__).resolve()
        for folder in (here.parents[1] / "examples", here.parents[4] / "examples"):
            if (folder / self.file).exists():
                return _load(folder / self.file)
        raise FileNotFoundError(
            f"examples/{self.file} is not there; install semel again, or run it from its repository"
        )


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rejected_twice_or_never(expected: Iterable[bytes], found: Counter[bytes]) -> tuple[int, int]:
    """(lost, duplicated) of the dead letters."""
    wanted = list(expected)
    return sum(found[value] == 0 for value in wanted), sum(max(0, found[value] - 1) for value in wanted)
