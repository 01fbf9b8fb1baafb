"""`semel prove` as users run it: a process, an exit code, a result in JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from semel.local.brokers import semel_command


class Proof(NamedTuple):
    code: int
    result: dict[str, Any]
    told: str

    @property
    def violations(self) -> list[dict[str, Any]]:
        return list(self.result["violations"])

    @property
    def kinds(self) -> set[str]:
        return {violation["kind"] for violation in self.violations}


def prove(folder: Path, *options: str, timeout_s: float = 280) -> Proof:
    command = semel_command("prove", "--json", "--save", str(folder / "schedule.json"), *options)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout, f"ended with {done.returncode}: {done.stderr[-3000:]}"
    return Proof(done.returncode, json.loads(done.stdout), done.stderr)


def held(proof: Proof, faults: int) -> Proof:
    assert proof.violations == [], proof.told
    assert proof.code == 0, proof.told
    assert proof.result["faults_fired"] >= faults, proof.told
    return proof
