"""Every message and version that kio knows: it reads our bytes, and what it writes again are the same bytes."""

from __future__ import annotations

import importlib
import io
import random
import re
from typing import Any

import pytest
from kio.serial import entity_reader, entity_writer

from semel.protocol.messages import groups as consumer_protocol

from .samples import all_formats, sample


def their_class(name: str, version: int) -> Any:
    kind = "request" if name.endswith("Request") else "response"
    package = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Request").removesuffix("Response")).lower()
    try:
        module = importlib.import_module(f"kio.schema.{package}.v{version}.{kind}")
    except ModuleNotFoundError:
        return None
    return getattr(module, name)


CASES = [
    pytest.param(fmt, version, id=name)
    for name, fmt, version in all_formats()
    if their_class(fmt.name, version) is not None
]


def test_nearly_all_versions_are_compared():
    assert len(CASES) > 430


@pytest.mark.parametrize(("fmt", "version"), CASES)
def test_they_read_ours_and_write_the_same(fmt, version):
    check(fmt, version, their_class(fmt.name, version))


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_consumer_protocol_agrees(version):
    for fmt, package in (
        (consumer_protocol.CONSUMER_SUBSCRIPTION, "consumer_protocol_subscription"),
        (consumer_protocol.CONSUMER_ASSIGNMENT, "consumer_protocol_assignment"),
    ):
        module = importlib.import_module(f"kio.schema.{package}.v{version}.data")
        check(fmt, version, getattr(module, fmt.name))


def check(fmt: Any, version: int, theirs: Any) -> None:
    for seed in range(4):
        ours = sample(fmt.struct, version, random.Random(f"{fmt.name}{version}{seed}"))
        encoded = fmt.encode(ours, version)
        decoded, size = entity_reader(theirs)(encoded, 0)
        assert size == len(encoded)
        out = io.BytesIO()
        entity_writer(theirs)(out, decoded)
        assert out.getvalue() == encoded
