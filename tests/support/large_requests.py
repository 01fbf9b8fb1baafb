"""Large requests, made from the tables of the protocol: every array of every API, one at a time, with many entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from semel.broker.dispatch import TABLE
from semel.protocol.api import NAMES, Api, api_of
from semel.protocol.schema import Field, FieldKind, Struct, fields_of

_TOPIC_NAMES = ("name", "topic", "topic_name")
_BITS = {"int8": 7, "int16": 15, "uint16": 16}


class Known(NamedTuple):
    """A topic that exists, with as many partitions as a request has entries, or fewer."""

    name: str
    topic_id: bytes


class LargeRequest(NamedTuple):
    """A request whose array at a path of fields has many entries."""

    api: Api[Any, Any]
    path: tuple[Field, ...]
    version: int

    @property
    def name(self) -> str:
        return f"{NAMES[self.api.key]}.{'.'.join(field.name for field in self.path)}"

    def make(self, count: int, known: Known | None = None) -> Any:
        """The request. With a topic, entries are for its partitions; without, for things that do not exist."""
        request = self.api.request.struct()
        if self.api.key == 0:
            request.acks = -1  # with 0 there is no response
        self._fill_arrays(request, self.path, count, known)
        return request

    def _fill_arrays(self, owner: Any, path: tuple[Field, ...], count: int, known: Known | None) -> None:
        field, *deeper = path
        entries = [self._entry(field, number, known) for number in range(1 if deeper else count)]
        setattr(owner, field.name, entries)
        for entry in entries if deeper else ():
            self._fill_arrays(entry, tuple(deeper), count, known)

    def _entry(self, field: Field, number: int, known: Known | None) -> Any:
        if isinstance(field.kind, FieldKind):
            return _value(field, number, known)
        entry = field.kind()
        for part in fields_of(field.kind):
            if not part.is_array and isinstance(part.kind, FieldKind) and self.version in part.present:
                setattr(entry, part.name, _value(part, number, known))
        return entry


def _value(field: Field, number: int, known: Known | None) -> Any:
    assert isinstance(field.kind, FieldKind)
    kind = field.kind.name
    if kind == "string":
        return known.name if known is not None and field.name in _TOPIC_NAMES else f"x{number}"
    if kind == "uuid":
        return known.topic_id if known is not None else number.to_bytes(16, "big")
    if kind.startswith(("int", "uint")):
        return number & ((1 << _BITS.get(kind, 31)) - 1)
    return field.default


def all_large_requests() -> Iterator[LargeRequest]:
    """One for each array in the requests that the broker serves, in the newest version that has it."""
    for key, row in sorted(TABLE.items()):
        api = api_of(key)
        for path in _paths(api.request.struct):
            version = min(row.max_version, *(field.present.high for field in path))
            if all(version in field.present for field in path) and version >= row.min_version:
                yield LargeRequest(api, path, version)


def _paths(owner: type[Struct]) -> Iterator[tuple[Field, ...]]:
    for field in fields_of(owner):
        if field.is_array:
            yield (field,)
        if field.is_array and not isinstance(field.kind, FieldKind):
            yield from ((field, *rest) for rest in _paths(field.kind))
