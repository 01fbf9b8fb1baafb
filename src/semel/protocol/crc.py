"""CRC-32C from the library's extension alone. The package around it reads its own version from the metadata of all that
is installed, for which Python loads a parser of mail: a seventh of the time in which a broker starts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

Crc = Callable[..., int]


def _extension() -> Any:
    package = PathFinder.find_spec("crc32c")
    spec = package and PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        import crc32c  # another version, another layout

        return crc32c
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


crc32c: Crc = _extension().crc32c
