"""Shells complete commands, actions and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from semel.cli import available_commands, main
from tests.support.missing import skip_loudly


@pytest.fixture
def bash_script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    if shutil.which("bash") is None:
        skip_loudly("no bash")
    line = f"COMP_WORDS=({' '.join(f'{word!r}' for word in words)}); COMP_CWORD={len(words) - 1}; _semel"
    command = f'{script}\n{line}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_actions_and_options(bash_script: str) -> None:
    assert completed(bash_script, "semel", "") >= set(available_commands())
    assert completed(bash_script, "semel", "tr") == {"trace"}
    assert {"list", "describe", "abort"} <= completed(bash_script, "semel", "txn", "")
    assert completed(bash_script, "semel", "txn", "abort", "--start") == {"--start-offset"}
    assert "--allow-changes" in completed(bash_script, "semel", "ui", "--")
    assert completed(bash_script, "semel", "nonsense", "x", "y") == set()


def test_every_shell_gets_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in available_commands())
    assert main(["completion", "tcsh"]) == 2
