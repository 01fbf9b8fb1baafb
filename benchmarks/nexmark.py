"""Nexmark on Spark: queries 0, 1, 2, 3, 5, 7 and 8, Kafka to Kafka on one Apache Kafka node, semel exactly once beside
Spark's own connector (at-least-once).

The events are written anew from the benchmark's published definition: of 50 events one is a person, three are auctions,
46 are bids; half of the bids are for the auction that is hot, three of four come from the bidder that is hot; an event
each 100 us of event time. They are JSON, without keys. Results are written as JSON without a key.

The value is events per second of wall time, from the making of a query to its end in a warm session. What the programs
have written is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from benchmarks.harness import Collected, Report, compare, interleave, table
from benchmarks.spark_contestants import Contestant, Job, peers_there, semel_frame, semel_json, spark_own, spark_same
from benchmarks.spark_topics import count_committed, filled, fresh_topic, removed
from semel.local.apache_kafka import ApacheKafka

BENCH = "nexmark"
UNIT = "events/s"
QUERIES = ("q0", "q1", "q2", "q3", "q5", "q7", "q8")
EVENTS = 500_000
EVENT_BYTES = 200  # about
BATCHES = 6
SUBJECTS = ("semel", "semel, jsonSchema")
CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "semel": semel_frame,
    "json": semel_json,
    "spark": spark_own,
    "same": spark_same,
}

# --- the generator ---
ROUND, PEOPLE, AUCTIONS = 50, 1, 3  # events; the rest are bids
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1_000, 10, 5
HOT_STEP, ACTIVE_PEOPLE, ACTIVE_AUCTIONS = 100, 1_000, 100
STEP_US = 100
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
FAMILIES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
SIZES = {"person": 200, "auction": 500, "bid": 100}  # bytes, about


def event(number: int, rng: random.Random) -> dict[str, Any]:
    """The event with this number."""
    rounds, place = divmod(number, ROUND)
    at = BEGAN + timedelta(microseconds=number * STEP_US)
    last_person, last_auction = rounds, rounds * AUCTIONS + min(max(place - PEOPLE, 0), AUCTIONS - 1)
    if place < PEOPLE:
        return {"event_type": 0, "person": _padded("person", _person(last_person, at, rng))}
    if place < PEOPLE + AUCTIONS:
        return {"event_type": 1, "auction": _padded("auction", _auction(last_auction, last_person, at, rng))}
    return {"event_type": 2, "bid": _padded("bid", _bid(last_auction, last_person, at, rng))}


def _person(person: int, at: datetime, rng: random.Random) -> dict[str, Any]:
    return {
        "id": FIRST_ID + person,
        "name": f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}",
        "emailAddress": f"{_letters(rng, 7)}@{_letters(rng, 5)}.com",
        "creditCard": " ".join(f"{rng.randrange(10_000):04}" for _ in range(4)),
        "city": rng.choice(CITIES),
        "state": rng.choice(STATES),
        "dateTime": _text(at),
    }


def _auction(auction: int, last_person: int, at: datetime, rng: random.Random) -> dict[str, Any]:
    is_hot = rng.randrange(4) > 0
    seller = last_person // HOT_STEP * HOT_STEP if is_hot else _recent(last_person, ACTIVE_PEOPLE, rng)
    first = _price(rng)
    return {
        "id": FIRST_ID + auction,
        "itemName": _letters(rng, 20),
        "description": _letters(rng, 100),
        "initialBid": first,
        "reserve": first + _price(rng),
        "dateTime": _text(at),
        "expires": _text(
            at + timedelta(microseconds=STEP_US * ROUND * rng.randint(1, 2 * ACTIVE_AUCTIONS // AUCTIONS))
        ),
        "seller": FIRST_ID + seller,
        "category": FIRST_CATEGORY + rng.randrange(CATEGORIES),
    }


def _bid(last_auction: int, last_person: int, at: datetime, rng: random.Random) -> dict[str, Any]:
    hot_auction, hot_bidder = rng.randrange(2) > 0, rng.randrange(4) > 0
    auction = last_auction // HOT_STEP * HOT_STEP if hot_auction else _recent(last_auction, ACTIVE_AUCTIONS, rng)
    bidder = last_person // HOT_STEP * HOT_STEP + 1 if hot_bidder else _recent(last_person, ACTIVE_PEOPLE, rng)
    channel = rng.choice(CHANNELS)
    return {
        "auction": FIRST_ID + auction,
        "bidder": FIRST_ID + bidder,
        "price": _price(rng),
        "channel": channel,
        "url": f"https://www.nexmark.com/{channel.lower()}/item.htm?query=1",
        "dateTime": _text(at),
    }


def _recent(last: int, active: int, rng: random.Random) -> int:
    return last - rng.randrange(min(last + 1, active))


def _price(rng: random.Random) -> int:
    return round(10 ** (rng.random() * 6) * 100)


def _letters(rng: random.Random, most: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(3, most)))


def _text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _padded(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    missing = SIZES[kind] - sum(len(str(value)) for value in found.values())
    return {**found, "extra": "x" * max(missing, 0)}


def events(first: int, count: int) -> Any:
    import pyarrow as pa

    rng = random.Random(first)
    values = [json.dumps(event(number, rng)).encode() for number in range(first, first + count)]
    return pa.table({"value": pa.array(values, pa.binary())})


# --- the benchmark ---
class Plan(NamedTuple):
    """What to run. The default is everything."""

    queries: Sequence[str] = QUERIES
    names: Sequence[str] = tuple(CONTESTANTS)
    runs: int = 5
    share: float = 1.0  # of the events


def run(report: Report, quick: bool = False) -> None:
    run_plan(report, Plan(runs=2, share=0.1) if quick else Plan())


def run_plan(report: Report, plan: Plan) -> None:
    with ApacheKafka() as kafka, contextlib.ExitStack() as stack:
        contestants = peers_there(BENCH, {name: CONTESTANTS[name] for name in plan.names}, stack)
        source = filled(
            kafka.bootstrap,
            "events",
            EVENT_BYTES,
            int(EVENTS * plan.share),
            make=lambda _, count: events(0, count),
            later=lambda table, number: events(number * table.num_rows, table.num_rows),
        )
        for query in plan.queries:
            _measure(report, Job(kafka.bootstrap, source, BATCHES, work=query), contestants, plan.runs)


def _measure(report: Report, job: Job, contestants: Mapping[str, Contestant], runs: int) -> None:
    written: dict[str, tuple[int, int]] = {}
    turns = {each.name: lambda each=each: _once(each, job, written) for each in contestants.values()}
    values = interleave(turns, runs=runs)
    if len(set(written.values())) > 1:
        raise RuntimeError(f"{job.work}: not everybody wrote the same (records, bytes of values): {written}")
    peers = [name for name in values if name not in SUBJECTS]
    for subject in (name for name in SUBJECTS if name in values):
        case = job.work if subject == "semel" else f"{job.work}: {subject}"
        chosen = {name: values[name] for name in (subject, *peers)}
        compare(report, bench=BENCH, case=case, unit=UNIT, values=chosen, subject=subject)


def _once(contestant: Contestant, job: Job, written: dict[str, tuple[int, int]]) -> float:
    target = fresh_topic(job.bootstrap, "bench-out")
    try:
        result = contestant.copy(job, target)
        written[contestant.name] = count_committed(job.bootstrap, target)
        return job.source.record_count / result.seconds
    finally:
        removed(job.bootstrap, target)


def main() -> None:
    """Some of it: python -m benchmarks.nexmark --queries q0,q5 --names semel,spark --runs 3 --share 0.2"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default=",".join(QUERIES))
    parser.add_argument("--names", default=",".join(CONTESTANTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the events")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    collected = Collected(args.json)
    run_plan(collected, Plan(args.queries.split(","), args.names.split(","), args.runs, args.share))
    if not args.json:
        print(table(collected.rows))


if __name__ == "__main__":
    main()
