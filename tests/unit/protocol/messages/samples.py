"""Random but repeatable messages: every field that a version has is filled with something that is not its default."""

from __future__ import annotations

import random
import string
from typing import Any

from semel.protocol.api import APIS, Format, api_of
from semel.protocol.schema import Field, FieldKind, Struct, fields_of

# The foreign codecs turn some numbers into times, error codes and the like: stay where they all agree that it is valid.
LARGEST = {"int8": 3, "int16": 100, "uint16": 60_000, "int32": 100_000, "uint32": 4_000_000_000, "int64": 10**11}


def all_formats() -> list[tuple[str, Format[Any], int]]:
    """(name, format, version) of every request and response in every version."""
    found = []
    for key in APIS:
        for fmt in (api_of(key).request, api_of(key).response):
            found += [(f"{fmt.name}-v{v}", fmt, v) for v in range(fmt.valid.low, fmt.valid.high + 1)]
    return found


def sample(cls: type[Struct], version: int, rng: random.Random, depth: int = 0) -> Struct:
    values = {f.name: _value(f, version, rng, depth) for f in fields_of(cls) if version in f.present}
    return cls(**values)


def _value(field: Field, version: int, rng: random.Random, depth: int) -> Any:
    if version in field.null and rng.random() < 0.15:
        return None
    if field.is_array:
        return [_single(field.kind, version, rng, depth) for _ in range(rng.randrange(0 if depth else 1, 3))]
    return _single(field.kind, version, rng, depth)


def _single(kind: FieldKind | type[Struct], version: int, rng: random.Random, depth: int) -> Any:
    if not isinstance(kind, FieldKind):
        return sample(kind, version, rng, depth + 1)
    if kind.name in LARGEST:
        return rng.randrange(1, LARGEST[kind.name] + 1)
    if kind.name == "bool":
        return rng.random() < 0.5
    if kind.name == "float64":
        return rng.random()
    if kind.name == "uuid":
        return rng.randbytes(16)
    if kind.name == "string":
        return "".join(rng.choices(string.ascii_letters + "äß€", k=rng.randrange(1, 8)))
    return rng.randbytes(rng.randrange(1, 200))


def plain(value: Any) -> Any:
    """Structs as dictionaries, buffers as bytes: for comparing with other people's objects."""
    if isinstance(value, Struct):
        return {f.name: plain(getattr(value, f.name)) for f in fields_of(type(value))}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return value


def same(one: Struct, other: Struct) -> bool:
    return plain(one) == plain(other)
