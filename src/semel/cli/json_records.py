"""Records to write, from JSON: as `semel consume -J` writes it, or kcat.

What is not understood is refused. A misspelt `value` must not become a null, which deletes a key of a compacted topic.
"""

from __future__ import annotations

import base64
import difflib
import json
from typing import Any, NamedTuple

from semel.cli.errors import CommandError

# The fields of a record, each with the other names that stand for it.
NAMES = {
    "value": ("value", "value_base64", "payload"),
    "key": ("key", "key_base64"),
    "headers": ("headers",),
    "partition": ("partition",),
    "timestamp": ("timestamp", "ts"),
}
# Where a record came from, which says nothing about where it goes.
IGNORED = ("topic", "offset", "tstype", "broker")
KNOWN = (*(name for names in NAMES.values() for name in names), *IGNORED)


class Line(NamedTuple):
    """A record to write."""

    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    timestamp: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def json_line(data: bytes, where: str) -> Line:
    """A record from a JSON object; `where` it stands, for the error."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise CommandError(f"{where}: this is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CommandError(f"{where}: expected a JSON object with a value, got {type(fields).__name__}")
    try:
        return _line(fields)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{where}: {error}") from None


def _line(fields: dict[str, Any]) -> Line:
    for name in fields:
        if name not in KNOWN:
            raise ValueError(f"unknown field {name!r}; {_advice(name)}")
    value, key, headers, partition, timestamp = (_one_of(fields, names) for names in NAMES.values())
    if value is None:
        raise ValueError('there is no value; write "value": null for a null (it deletes the key of a compacted topic)')
    return Line(
        _bytes_of(fields, value),
        None if key is None else _bytes_of(fields, key),
        # The partition of another topic says nothing about this one.
        _number(fields, partition) if fields.get("topic") is None else None,
        _number(fields, timestamp),
        () if headers is None else tuple(_headers(fields[headers])),
    )


def _advice(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f'the fields are {", ".join(NAMES)}; an object that is itself the value goes into "value"'


def _one_of(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Which of the names of a field is there."""
    found = [name for name in names if name in fields]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are two names of one field; give one of them")
    return found[0] if found else None


def _number(fields: dict[str, Any], name: str | None) -> int | None:
    number = None if name is None else fields[name]
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise ValueError(f"{name} is {number!r}; expected a whole number")
    return number


def _headers(given: Any) -> list[tuple[str, bytes | None]]:
    """An object, a list of [name, value], or kcat's list of names and values in turn."""
    listed = given
    if given is None:
        return []
    if isinstance(given, dict):
        listed = list(given.items())
    elif isinstance(given, list) and given and isinstance(given[0], str) and not len(given) % 2:
        listed = list(zip(given[::2], given[1::2], strict=True))
    if not isinstance(listed, list) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str) for entry in listed
    ):
        raise ValueError(f"headers is {given!r}; expected an object, or a list of [name, value]")
    return [(name, _plain_bytes(value)) for name, value in listed]


def _bytes_of(fields: dict[str, Any], name: str) -> bytes | None:
    if name.endswith("_base64"):
        return _plain_bytes({"base64": fields[name]})
    return _plain_bytes(fields[name])


def _plain_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
