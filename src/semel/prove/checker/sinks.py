"""What is in a folder of files, and what is wrong with it: read with json and pyarrow, with nothing of semel.

Only what manifests name counts: `_semel/checkpoint-N.json` has everything up to N, `_semel/manifest-N.json` what each
number after it adds and removes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from semel.prove.checker.check import Violation, ViolationKind

TRIES = 50


class FolderContent(NamedTuple):
    files: dict[str, int]  # name -> rows
    offsets: dict[tuple[str, int], int]


def folder_content(folder: Path) -> FolderContent:
    """Manifests may be added, and be replaced by checkpoints, meanwhile."""
    for _ in range(TRIES):
        try:
            return _content(folder / "_semel")
        except FileNotFoundError:
            continue
    raise AssertionError(f"{folder} could not be read {TRIES} times")


def _content(own: Path) -> FolderContent:
    checkpoints = sorted(own.glob("checkpoint-*.json"))
    files: dict[str, int] = {}
    offsets: dict[tuple[str, int], int] = {}
    number = 0
    if checkpoints:
        found = json.loads(checkpoints[-1].read_text())
        number = found["number"]
        files = {entry["name"]: entry["rows"] for entry in found["files"] if entry["kind"] == "data"}
        offsets = {(entry["topic"], entry["partition"]): entry["next_offset"] for entry in found["offsets"]}
    while (path := own / f"manifest-{number + 1:020d}.json").exists():
        number += 1
        manifest = json.loads(path.read_text())
        files = _changed(files, manifest.get("remove", []), manifest.get("add", []))
        for entry in manifest.get("offsets", ()):
            place = (entry["topic"], entry["partition"])
            assert entry["next_offset"] >= offsets.get(place, 0), f"manifest {number} takes {place} back"
            offsets[place] = entry["next_offset"]
    if sorted(own.glob("checkpoint-*.json")) != checkpoints:
        raise FileNotFoundError("a new checkpoint")
    return FolderContent(files, offsets)


def _changed(files: dict[str, int], remove: list[str], add: list[dict[str, Any]]) -> dict[str, int]:
    """What takes the place of other files stands where the first of them stood."""
    names = list(files)
    at = min((names.index(name) for name in remove), default=len(names))
    added = {entry["name"]: entry["rows"] for entry in add if entry.get("kind", "data") == "data"}
    assert not added.keys() & files.keys(), f"{added} is added twice"
    if remove:
        assert sum(files[name] for name in remove) == sum(added.values()), f"{added} is not {remove}"
    order = [*names[:at], *added, *(name for name in names[at:] if name not in remove)]
    return {name: (files | added)[name] for name in order}


def folder_rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    for _ in range(TRIES):
        rows: list[dict[str, Any]] = []
        try:
            for name in folder_content(folder).files:
                if name.endswith(".parquet"):
                    rows += pq.ParquetFile(folder / name).read().to_pylist()
                else:
                    rows += [json.loads(line) for line in (folder / name).read_text().splitlines()]
            return rows
        except FileNotFoundError:  # a compaction; one that is missing for good is missing the next time, too
            continue
    raise AssertionError(f"{folder} names files that are not there")


def check_folder(folder: Path, expected: Mapping[str, int]) -> list[Violation]:
    """Every value is in the folder as often as it should be, in the order of its partition, and before the offset that
    the manifests have. Rows have the columns topic, partition, offset and value."""
    rows, offsets = folder_rows(folder), folder_content(folder).offsets
    found = Counter(row["value"] for row in rows)
    violations = []
    for name, times in (Counter(dict(expected)) - found).items():
        violations.append(_violation(ViolationKind.LOST, folder, name, f"{times} of {expected[name]} rows are missing"))
    for name, times in (found - Counter(dict(expected))).items():
        kind = ViolationKind.DUPLICATED if name in expected else ViolationKind.UNEXPECTED
        violations.append(_violation(kind, folder, name, f"{times} rows too many"))
    last: dict[tuple[str, int], int] = {}
    for row in rows:
        place, offset = (row["topic"], row["partition"]), row["offset"]
        if offset < last.get(place, -1):
            detail = f"offset {offset} comes after {last[place]} of {place}"
            violations.append(_violation(ViolationKind.REORDERED, folder, row["value"], detail))
        if offset >= offsets.get(place, 0):
            detail = f"the folder is at {offsets.get(place)} of {place}, and has offset {offset}"
            violations.append(_violation(ViolationKind.OFFSETS, folder, row["value"], detail))
        last[place] = max(offset, last.get(place, -1))
    return violations


def _violation(kind: ViolationKind, folder: Path, record: str, detail: str) -> Violation:
    return Violation(kind, folder.name, -1, -1, record, "", detail)


# --- What is in a table, and what is wrong with it: read through psycopg, with nothing of semel ---


def check_table(dsn: str, table: str, column: str, expected: Mapping[str, int]) -> list[Violation]:
    """Every id is in the table as often as it should be."""
    import psycopg
    from psycopg import sql

    query = sql.SQL("SELECT {} FROM {}").format(sql.Identifier(column), sql.Identifier(table))
    with psycopg.connect(dsn) as connection:
        found = Counter(value for (value,) in connection.execute(query))
    violations = []
    for name, times in (Counter(dict(expected)) - found).items():
        detail = f"{found[name]} rows, expected {expected[name]}: {times} missing"
        violations.append(Violation(ViolationKind.LOST, table, -1, -1, name, "", detail))
    for name, times in (found - Counter(dict(expected))).items():
        kind = ViolationKind.DUPLICATED if name in expected else ViolationKind.UNEXPECTED
        detail = f"{found[name]} rows, expected {expected.get(name, 0)}: {times} too many"
        violations.append(Violation(kind, table, -1, -1, name, "", detail))
    return violations
