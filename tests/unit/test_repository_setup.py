"""`make setup`: finds Java, asks apt-get only where it may, and survives interruption, other folders and lost files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment() -> types.ModuleType:
    """scripts/environment.py as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts/environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('java version "1.8.0_402"', 8),
        ("Unable to locate a Java Runtime", 0),
    ],
)
def test_the_java_version_is_read_from_its_own_words(
    environment: types.ModuleType, tmp_path: Path, answer: str, version: int
) -> None:
    assert environment.java_version(program(tmp_path / "java", f"echo '{answer}' >&2")) == version


def test_a_java_that_is_too_old_is_not_taken(
    environment: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = program(tmp_path / "old/bin/java", "echo 'openjdk version \"11.0.2\"' >&2")
    new = program(tmp_path / "new/java", "echo 'openjdk version \"21.0.2\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(old.parents[1]))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert environment.find_java() is None
    monkeypatch.setenv("PATH", str(new.parent))
    assert environment.find_java() == new


def test_without_java_and_without_apt_the_user_is_told_what_to_install(
    environment: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "JAVA_STAMP", tmp_path / "stamp")
    environment.find_or_install_java()
    message = capsys.readouterr().err
    assert "NO JAVA 17 OR NEWER FOUND" in message
    assert "openjdk-17-jre-headless" in message
    assert not (tmp_path / "stamp").exists()


def test_apt_tries_the_packages_in_turn_and_can_be_forbidden(
    environment: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    program(tmp_path / "apt-get", f'echo "$@" >> "{log}"; case "$*" in *first*) exit 100;; esac')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(environment.os, "geteuid", lambda: 0)
    assert environment.apt_install("first", "second")
    calls = log.read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["update", "first", "second"]
    # another apt-get holds the lock on many a fresh machine: without a timeout it is not waited for at all
    assert all("DPkg::Lock::Timeout=600" in call for call in calls)
    monkeypatch.setenv("SEMEL_SYSTEM_PACKAGES", "no")
    assert not environment.apt_install("second")
    assert log.read_text().splitlines() == calls


def test_other_pythons_are_those_of_the_classifiers_and_missing_ones_are_named(tmp_path: Path) -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [each.rsplit(" ", 1)[1] for each in classifiers if each.startswith("Programming Language :: Python ::")]
    assert all(f" python{version}" in (ROOT / "scripts/setup").read_text() for version in versions)
    for name in ("dirname", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    bash = shutil.which("bash")
    assert bash is not None
    tree = tmp_path / "tree"
    program(tree / ".venv/bin/python", f"echo {versions[0]}")
    (tree / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/python-matrix"):
        shutil.copy(ROOT / name, tree / name)
    words = [bash, str(tree / "scripts/python-matrix")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    expected = "NOT TESTED, because this machine does not have them: Python " + " ".join(versions[1:])
    assert expected in done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_setup_in_a_fresh_folder_is_repeatable_and_recovers(tmp_path: Path) -> None:
    tree = tmp_path / "a folder with spaces"
    tree.mkdir()
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("scripts", "requirements", "src"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))

    def setup() -> float:
        started = time.monotonic()
        subprocess.run(["make", "setup"], cwd=tree, check=True, capture_output=True)
        version = subprocess.run([tree / ".venv/bin/semel", "--version"], check=True, capture_output=True, text=True)
        assert version.stdout.startswith("semel ")
        return time.monotonic() - started

    setup()
    assert setup() < 3
    (tree / ".venv/.semel-stamp").unlink()  # as an interrupted setup leaves it
    shutil.rmtree(tree / ".venv/lib")
    setup()
    (tree / ".venv/bin/python").unlink()
    setup()
    moved = tree.rename(tmp_path / "moved")
    tree = moved
    setup()
    located = "import semel; print(semel.__file__)"
    answer = subprocess.run([tree / ".venv/bin/python", "-c", located], check=True, capture_output=True, text=True)
    assert answer.stdout.startswith(str(moved))


def test_a_run_without_apache_kafka_says_so_in_its_last_lines(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kafka/test_apache_kafka.py"]
    without = {**os.environ, "SEMEL_KAFKA_LIBS": str(tmp_path / "nothing here")}
    done = subprocess.run(words, cwd=ROOT, env=without, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last_lines = done.stdout.splitlines()[-3:]
    assert "2 TESTS DID NOT RUN" in last_lines[0]
    assert "`make kafka` fetches it" in last_lines[1]
