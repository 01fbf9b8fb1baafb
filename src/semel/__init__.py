"""Exactly-once Kafka pipelines on PySpark, with a Kafka-compatible broker that pip can install."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.broker.embedded import Broker as Broker

__version__ = "0.1.0"

# Public name -> where it lives. Loaded when first used, so that `import semel` costs nothing.
_LAZY = {"Broker": "semel.broker.embedded"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
