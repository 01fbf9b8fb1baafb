"""Messages as tables: a struct says which field has which type in which versions; the codec is compiled from it.

A message is a `Struct` whose annotations are the specification, in the order of the wire:

    class Topic(Struct):
        name: Annotated[str, versions("0-12")] = ""
        topic_id: Annotated[uuid, versions("13+")] = NO_UUID
        partitions: list[Partition] = []

Markers: `versions` (default: all), `nullable` (default for `X | None`: wherever the field exists), `tag` (tagged),
`ignorable` (may be dropped silently where a version lacks it; any other field that is set but cannot be sent is an
`EncodeError`). `compiler` turns a table into code, `api` puts request and response together.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, get_args, get_origin

import msgspec

Buffer = bytes | bytearray | memoryview
NO_UUID = bytes(16)
MAX_VERSION = 0x7FFF


# -- what a table is made of -------------------------------------------------------------------------------------------
class Struct(msgspec.Struct):
    """A message or a part of one."""


class FieldKind(msgspec.Struct, frozen=True):
    """A primitive type: its name in the specification and, for numbers, its letter for `struct`."""

    name: str
    letter: str = ""


int8 = Annotated[int, FieldKind("int8", "b")]
int16 = Annotated[int, FieldKind("int16", "h")]
uint16 = Annotated[int, FieldKind("uint16", "H")]
int32 = Annotated[int, FieldKind("int32", "i")]
uint32 = Annotated[int, FieldKind("uint32", "I")]
int64 = Annotated[int, FieldKind("int64", "q")]
float64 = Annotated[float, FieldKind("float64", "d")]
uuid = Annotated[bytes, FieldKind("uuid", "16s")]
record_set = Annotated[Buffer | list[Buffer], FieldKind("records")]

_IMPLIED_KINDS: dict[type, FieldKind] = {
    bool: FieldKind("bool", "?"),
    str: FieldKind("string"),
    bytes: FieldKind("bytes"),
}


class VersionRange(msgspec.Struct, frozen=True):
    """The versions from `low` to `high`, both included; empty if low is above high."""

    low: int
    high: int

    def __contains__(self, version: int) -> bool:
        return self.low <= version <= self.high

    def __str__(self) -> str:
        return "none" if self.low > self.high else str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_versions(text: str) -> VersionRange:
    """'3+', '0-12', '4' or 'none'."""
    if text == "none":
        return VersionRange(0, -1)
    if text.endswith("+"):
        return VersionRange(int(text[:-1]), MAX_VERSION)
    low, _, high = text.partition("-")
    return VersionRange(int(low), int(high or low))


class Present(msgspec.Struct, frozen=True):
    range: VersionRange


class Nullable(msgspec.Struct, frozen=True):
    range: VersionRange


class Tag(msgspec.Struct, frozen=True):
    number: int
    range: VersionRange


class Ignorable(msgspec.Struct, frozen=True):
    pass


def versions(text: str) -> Present:
    """The versions that have this field."""
    return Present(parse_versions(text))


def nullable(text: str) -> Nullable:
    """The versions in which this field may be null."""
    return Nullable(parse_versions(text))


def tag(number: int, text: str = "0+") -> Tag:
    """A tagged field: sent only where it differs from its default, skipped by readers who do not know it."""
    return Tag(number, parse_versions(text))


ignorable = Ignorable()


# -- the table, read ---------------------------------------------------------------------------------------------------
class Field(msgspec.Struct, frozen=True):
    name: str
    kind: FieldKind | type[Struct]
    is_array: bool
    present: VersionRange
    null: VersionRange
    tag: Tag | None
    is_ignorable: bool
    default: Any

    def is_tagged(self, version: int) -> bool:
        return self.tag is not None and version in self.tag.range


def fields_of(cls: type[Struct]) -> tuple[Field, ...]:
    """The rows of a struct's table, in the order of the wire."""
    cached: tuple[Field, ...] | None = cls.__dict__.get("__semel_fields__")
    if cached is None:
        hints = typing.get_type_hints(cls, include_extras=True)
        cached = tuple(_read_field(info, hints[info.name]) for info in msgspec.structs.fields(cls))
        cls.__semel_fields__ = cached  # type: ignore[attr-defined]
    return cached


def _read_field(info: msgspec.structs.FieldInfo, hint: Any) -> Field:
    markers: dict[type, Any] = {}
    hint = _strip(hint, markers)
    optional = False
    if get_origin(hint) in (typing.Union, types.UnionType) and type(None) in get_args(hint):
        optional = True
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        hint = _strip(inner[0] if len(inner) == 1 else typing.Union[tuple(inner)], markers)  # noqa: UP007
    is_array = get_origin(hint) is list and FieldKind not in markers
    if is_array:
        hint = _strip(get_args(hint)[0], markers)
    kind = markers.get(FieldKind) or _IMPLIED_KINDS.get(hint) or hint
    present = markers[Present].range if Present in markers else VersionRange(0, MAX_VERSION)
    null = markers[Nullable].range if Nullable in markers else present if optional else VersionRange(0, -1)
    default = info.default_factory() if info.default is msgspec.NODEFAULT else info.default
    return Field(info.name, kind, is_array, present, null, markers.get(Tag), Ignorable in markers, default)


def _strip(hint: Any, markers: dict[type, Any]) -> Any:
    while get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        markers.update((type(extra), extra) for extra in extras)
    return hint
