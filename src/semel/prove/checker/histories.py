"""What calls returned, held against what is in the topics: appends to entities, and sagas. Nothing of semel is in
it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from semel.prove.checker.check import Violation, ViolationKind
from semel.prove.checker.reading import Seen


# --- entities: each is a register that is written if it has the expected version ---
class AppendCall(NamedTuple):
    """A call of append, as its caller noted it. Times are those of one clock; without a return it may have any end."""

    command: str
    entity: str
    expected: int
    invoked_s: float
    returned_s: float | None = None
    outcome: str = ""  # appended, conflict
    version: int = 0


def read_calls(path: Path) -> list[AppendCall]:
    """From lines of JSON: {"command", "entity", "expected", "at_s"} when it is called, {"command", "at_s", "outcome",
    "version"} when it returns. A line that a killed process did not finish is left out."""
    calls: dict[str, AppendCall] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            noted = json.loads(line)
        except ValueError:
            continue
        command = noted["command"]
        if "entity" in noted:  # called again after a crash: it began with the first
            calls.setdefault(command, AppendCall(command, noted["entity"], noted["expected"], noted["at_s"]))
        else:
            end = {"returned_s": noted["at_s"], "outcome": noted["outcome"], "version": noted["version"]}
            calls[command] = calls[command]._replace(**end)
    return list(calls.values())


def check_appends(topic: str, calls: Iterable[AppendCall], events: Iterable[Seen]) -> list[Violation]:
    """Versions of an entity count up in one partition; what was acknowledged is there, what was refused is not; and the
    order of versions is one in which the calls, which overlap, can have happened (linearizability)."""
    by_entity: dict[str, list[AppendCall]] = defaultdict(list)
    for call in calls:
        by_entity[call.entity].append(call)
    logs: dict[str, list[Seen]] = defaultdict(list)
    for event in events:
        logs[(event.key or b"").decode()].append(event)
    found: list[Violation] = []
    for entity in sorted({*by_entity, *logs}):
        found += _check_log(topic, entity, logs[entity])
        found += _check_outcomes(topic, by_entity[entity], logs[entity])
        found += _check_real_time(topic, entity, by_entity[entity], logs[entity])
    return found


def _number(event: Seen) -> int:
    return int(event.header("version") or b"-1")


def _command(event: Seen) -> str:
    return (event.header("command") or b"").decode()


def _check_log(topic: str, entity: str, events: list[Seen]) -> Iterator[Violation]:
    places = {event.partition for event in events}
    if len(places) > 1:
        detail = f"the entity is in partitions {sorted(places)}"
        yield Violation(ViolationKind.UNEXPECTED, topic, -1, -1, entity, "", detail)
    for wanted, event in enumerate(sorted(events, key=lambda event: event[1:3]), 1):
        if _number(event) != wanted:
            detail = f"it has version {_number(event)}, expected {wanted}"
            yield Violation(ViolationKind.REORDERED, topic, *event[1:3], entity, "", detail)
            return


def _check_outcomes(topic: str, calls: list[AppendCall], events: list[Seen]) -> Iterator[Violation]:
    versions = {_command(event): _number(event) for event in events}
    for call in calls:
        there = versions.get(call.command)
        if call.outcome == "appended" and there != call.version:
            detail = f"acknowledged as version {call.version} of {call.entity}; the topic has {there}"
            yield Violation(ViolationKind.LOST, topic, -1, -1, call.command, "", detail)
        if call.outcome == "conflict" and there is not None:
            detail = f"its call returned a conflict with version {call.version}, and it is version {there}"
            yield Violation(ViolationKind.UNEXPECTED, topic, -1, -1, call.command, "", detail)
        if there is not None and there != call.expected + 1:
            detail = f"appended as version {there}, expected to follow {call.expected}"
            yield Violation(ViolationKind.UNEXPECTED, topic, -1, -1, call.command, "", detail)


def _check_real_time(topic: str, entity: str, calls: list[AppendCall], events: list[Seen]) -> Iterator[Violation]:
    """A call that begins after another has returned comes after it; none knows a version whose append began later."""
    ended = sorted((call.returned_s, call.version) for call in calls if call.returned_s is not None)
    times_s = [time_s for time_s, _ in ended]
    highest: list[int] = []
    for _, version in ended:
        highest.append(max(version, highest[-1] if highest else 0))
    begun_s = {call.command: call.invoked_s for call in calls}
    began_s = {_number(event): begun_s.get(_command(event), 0.0) for event in events}
    for call in calls:
        if call.returned_s is None:
            continue
        before = bisect_left(times_s, call.invoked_s)
        least = highest[before - 1] if before else 0
        if call.version < least + (call.outcome == "appended"):
            detail = f"{call.outcome} with version {call.version}, begun after a call returned version {least}"
            yield Violation(ViolationKind.REORDERED, topic, -1, -1, entity, call.command, detail)
        if began_s.get(call.version, 0.0) > call.returned_s:
            detail = f"{call.outcome} with version {call.version}, before the append of that version began"
            yield Violation(ViolationKind.REORDERED, topic, -1, -1, entity, call.command, detail)


# --- sagas: every one whole ---
def last_values(records: Iterable[Seen]) -> dict[bytes, bytes]:
    """A compacted topic as a table."""
    table: dict[bytes, bytes] = {}
    for record in records:
        table.pop(record.key or b"", None)
        if record.value is not None:
            table[record.key or b""] = record.value
    return table


def statuses(log: Iterable[Seen]) -> dict[str, str]:
    return {key.decode(): json.loads(value)["status"] for key, value in last_values(log).items()}


def check_sagas(
    topic: str,
    ends: Mapping[str, str],
    wanted: Mapping[str, tuple[str, ...]],
    totals: Mapping[str, int],
    effects: Callable[[str], Mapping[str, int]],
) -> list[Violation]:
    """Each saga has ended as it may (`wanted`), and the totals of the participants are the effects of those that are
    done, and of no other: a saga of which a part is missing, doubled or left behind shows in them."""
    found = []
    for saga, allowed in wanted.items():
        if ends.get(saga) not in allowed:
            detail = f"it is {ends.get(saga)}, expected {' or '.join(allowed)}"
            found.append(Violation(ViolationKind.PARTIAL, topic, -1, -1, saga, "", detail))
    unknown = sorted(ends.keys() - wanted.keys())
    found += [Violation(ViolationKind.UNEXPECTED, topic, -1, -1, saga, "", "nobody started it") for saga in unknown]
    expected: dict[str, int] = defaultdict(int)
    for saga, end in ends.items():
        if end == "done":
            for name, amount in effects(saga).items():
                expected[name] += amount
    for name in sorted({*expected, *totals}):
        if expected.get(name, 0) != totals.get(name, 0):
            detail = f"it is {totals.get(name, 0)}, the sagas that are done make it {expected.get(name, 0)}"
            found.append(Violation(ViolationKind.PARTIAL, topic, -1, -1, name, "", detail))
    return found
