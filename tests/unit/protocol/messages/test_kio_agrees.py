"""Every message and version that kio knows: it reads our bytes, and what it writes again are the same bytes."""

from __future__ import annotations

import importlib
import io
import random
import re
from pathlib import Path
from typing import Any

import kio
import pytest
from kio.serial import entity_reader, entity_writer

from semel.protocol.messages import groups as consumer_protocol

from .samples import all_formats, sample


def their_module(name: str, version: int) -> str:
    kind = "request" if name.endswith("Request") else "response"
    package = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Request").removesuffix("Response")).lower()
    return f"kio.schema.{package}.v{version}.{kind}"


def exists(module: str) -> bool:
    """Without importing it: five hundred of them take seconds, in every process that collects tests."""
    return Path(kio.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").exists()


def their_class(name: str, version: int) -> Any:
    return getattr(importlib.import_module(their_module(name, version)), name)


CASES = [
    pytest.param(fmt, version, id=name)
    for name, fmt, version in all_formats()
    if exists(their_module(fmt.name, version))
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
