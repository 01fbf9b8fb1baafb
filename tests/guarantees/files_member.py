"""An instance of a loop that writes files, for a process that is forked from one that has everything loaded."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from semel.prove.injection import Injection
from semel.prove.workers import run_compactor, run_files
from semel.sinks.files import manifests

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "semel.patterns.process", "pyarrow.parquet"])


def _run(name: str, options: dict[str, Any], fault: str, output: str) -> None:
    sys.stderr = sys.stdout = open(output, "w", buffering=1)  # noqa: SIM115
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    Injection(fault).install()
    manifests.CHECKPOINT_EVERY = 5
    try:
        {"files": run_files, "compactor": run_compactor}[name](options)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)


def start(name: str, options: dict[str, Any], output: Path, fault: str = "") -> ForkServerProcess:
    process = CONTEXT.Process(target=_run, args=(name, options, fault, str(output)), daemon=True)
    process.start()
    return process
