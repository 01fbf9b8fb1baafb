"""Finding the user's functions by their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


class AppError(Exception):
    """What was named is not there, or is not a function."""


def load(name: str) -> Callable[..., Any]:
    """`package.module:function`, looked for in the current folder too."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise AppError(f"{name!r} should read module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise AppError(f"{name}: the module cannot be imported: {error}") from error
    except AttributeError:
        raise AppError(f"{name}: module {module_name} has no {attribute!r}") from None
    if not callable(found):
        raise AppError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


def expectation_name(app: str) -> str:
    """Where the function that says what is expected is, unless the user says otherwise."""
    return f"{app.partition(':')[0]}:expected"
