"""Every message and version that kafka-python knows: we read its bytes and it reads ours, field by field."""

from __future__ import annotations

import importlib
import pkgutil
import random
import uuid
from typing import Any

import pytest
from kafka.protocol.api_message import ApiMessage

from semel.protocol.api import APIS, FLEXIBLE_FROM, api_of, read_request_header
from semel.protocol.schema import FieldKind, Struct, fields_of

from .samples import all_formats, plain, sample


def their_classes() -> dict[str, type]:
    for package in ("admin", "consumer", "metadata", "producer"):
        parent = importlib.import_module(f"kafka.protocol.{package}")
        for module in pkgutil.iter_modules(parent.__path__):
            importlib.import_module(f"{parent.__name__}.{module.name}")
    importlib.import_module("kafka.protocol.sasl")
    found, queue = {}, [ApiMessage]
    while queue:
        cls = queue.pop()
        queue += type.__subclasses__(cls)
        if cls.__dict__.get("_json") is not None or getattr(cls, "_json", None) is not None:
            found.setdefault(cls.__name__, cls)
    return found


THEIRS = their_classes()
CASES = [
    pytest.param(fmt, version, id=name)
    for name, fmt, version in all_formats()
    if fmt.name in THEIRS and version <= THEIRS[fmt.name].max_version
]


def test_nearly_all_apis_are_compared():
    missing = {fmt.name for _, fmt, _ in all_formats()} - set(THEIRS)
    # kafka-python has no codecs for these; kio has (see test_kio_agrees).
    tokens = [f"{verb}DelegationToken" for verb in ("Create", "Renew", "Expire", "Describe")]
    unknown = ["ConsumerGroupHeartbeat", "ConsumerGroupDescribe", "UnregisterBroker", *tokens]
    unknown += ["DescribeTransactionEvents"]  # semel's own
    assert missing <= {f"{name}{kind}" for name in unknown for kind in ("Request", "Response")}
    assert len(CASES) > 400


def their_name(fields: Any, ours: str) -> str:
    """Their names are ours but for digits, which they attach to the word before, and a prefix that they leave out."""
    if ours.endswith("_authorized_operations") and "authorized_operations" in fields:
        return "authorized_operations"
    return next(key for key in fields if key.replace("_", "") == ours.replace("_", ""))


def as_theirs(cls: Any, ours: Struct, version: int) -> Any:
    """Our struct as an object of theirs."""
    values = {}
    for field in fields_of(type(ours)):
        if version not in field.present:
            continue
        name = their_name(cls._struct.fields, field.name)
        values[name] = _convert(cls._struct.fields[name], field, getattr(ours, field.name), version)
    return cls(version=version, **values)


def _convert(their_field: Any, field: Any, value: Any, version: int) -> Any:
    if value is None:
        return None
    if not isinstance(field.kind, FieldKind):
        cls = their_field.data_class
        return [as_theirs(cls, v, version) for v in value] if field.is_array else as_theirs(cls, value, version)
    if their_field.name == "authorized_operations":  # a set of bit numbers there, a number here
        return {bit for bit in range(31) if value >> bit & 1}
    if field.kind.name == "uuid":
        return [uuid.UUID(bytes=v) for v in value] if field.is_array else uuid.UUID(bytes=value)
    return value


def as_plain(obj: Any, ours: Struct, version: int) -> Any:
    """Their decoded object, read through our table."""
    if obj is None:
        return None
    out = plain(type(ours)())
    for field in fields_of(type(ours)):
        if version in field.present:
            value = getattr(obj, their_name(obj._struct.fields, field.name))
            mine = getattr(ours, field.name)
            out[field.name] = _plain_value(field, value, mine, version)
    return out


def _plain_value(field: Any, value: Any, mine: Any, version: int) -> Any:
    if value is None or mine is None:
        return value
    if not isinstance(field.kind, FieldKind):
        if field.is_array:
            return [as_plain(v, m, version) for v, m in zip(value, mine, strict=True)]
        return as_plain(value, mine, version)
    if field.kind.name == "uuid":
        return [v.bytes for v in value] if field.is_array else value.bytes
    if isinstance(value, set):
        return sum(1 << bit for bit in value)
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return list(value) if field.is_array else value


@pytest.mark.parametrize(("fmt", "version"), CASES)
def test_bytes_agree_both_ways(fmt, version):
    theirs = THEIRS[fmt.name]
    for seed in range(4):
        ours = sample(fmt.struct, version, random.Random(f"{fmt.name}{version}{seed}"))
        if fmt.name == "ApiVersionsResponse":
            ours.error_code = 0  # with an error they read version 0, whatever the version
        encoded = fmt.encode(ours, version)
        assert as_plain(theirs.decode(encoded, version=version), ours, version) == plain(ours)
        assert plain(fmt.decode(as_theirs(theirs, ours, version).encode(version=version), version)) == plain(ours)


@pytest.mark.parametrize("key", [key for key in APIS if api_of(key).request.name in THEIRS])
def test_frames_and_headers_agree(key):
    api = api_of(key)
    for version in range(api.request.valid.low, min(api.request.valid.high, THEIRS[api.request.name].max_version) + 1):
        ours = sample(api.request.struct, version, random.Random(f"{key}{version}"))
        theirs = as_theirs(THEIRS[api.request.name], ours, version)
        theirs.with_header(correlation_id=77, client_id="someone")
        frame = bytes(theirs.encode(version=version, header=True, framed=True))
        assert b"".join(api.frame_request(ours, version, 77, "someone")) == frame
        header = read_request_header(memoryview(frame)[4:], FLEXIBLE_FROM)
        assert header[:4] == (key, version, 77, "someone")
        assert plain(api.request.decode(memoryview(frame)[4:], version, header.body_at)) == plain(ours)
