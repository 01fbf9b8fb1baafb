"""Runs a Python program with faults: `python -m semel.prove INJECTION PROGRAM`, see `semel.prove.injection`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import msgspec

from semel.prove.injection import Injection

_decode_injection = msgspec.json.Decoder(Injection).decode


def main(text: str, *program: str) -> None:
    _decode_injection(text).install()
    first, *rest = program
    if first == "-c":  # Spark reads the version so
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
