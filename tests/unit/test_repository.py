"""The repository keeps its own rules: portable files, import rules, light imports, docs that work as pasted."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import semel
from semel.cli import available_commands
from semel.local.apache_kafka import KafkaMissing, java
from tests.support.missing import skip_loudly
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
IMPORT_LIMIT_S = 0.25

# Written in pieces, because this file is checked too.
MACHINE_PATHS = re.compile(
    "|".join(["/" + "work/", "/" + "root/", "/" + r"home/\w", "/" + r"Users/\w", "/" + "opt/wheels"])
)
REGISTRIES = re.compile(
    "|".join([r"pypi\." + "org", "python" + "hosted", r"maven\." + "org", "index" + "-url", "find" + "-links"])
)


def repository_files() -> list[Path]:
    """What is, or would be, tracked."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    assert lines_with(MACHINE_PATHS) == []


def test_no_file_names_a_package_registry() -> None:
    assert lines_with(REGISTRIES) == []


def test_every_locked_package_has_a_version_and_a_hash() -> None:
    for name in ("dev.lock", "installer.lock"):
        entries = re.split(r"\n(?=\S)", (ROOT / "requirements" / name).read_text().strip())
        assert entries
        for entry in entries:
            assert re.match(r"[\w.\[\]-]+==\S+", entry), f"{name}: not pinned: {entry[:80]}"
            assert "--hash=sha256:" in entry, f"{name}: no hash: {entry[:80]}"


def test_the_version_is_the_same_everywhere() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == semel.__version__


def test_import_rules_hold() -> None:
    words = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- light imports ---


def fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["semel", "semel.protocol", "semel.client"])
def test_import_is_fast_and_leaves_spark_alone(module: str) -> None:
    code = (
        "import sys, time\n"
        "started = time.process_time()\n"  # not what others on the machine took
        f"import {module}\n"
        "print(time.process_time() - started)\n"
        "print(*(name for name in ('pyspark', 'pandas', 'psycopg', 'confluent_kafka') if name in sys.modules))\n"
    )
    fresh_interpreter(code)  # the first one compiles and fills the disk cache
    answers = [fresh_interpreter(code).split("\n") for _ in range(5)]
    assert {answer[1] for answer in answers} == {""}, "the light part pulled in a heavy package"
    assert statistics.median(float(answer[0]) for answer in answers) < IMPORT_LIMIT_S


def test_help_pages_load_no_heavy_package() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from semel.cli import available_commands, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for command in available_commands():\n"
        "        assert main([command, '--help']) == 0\n"
        "print(*(name for name in ('numpy', 'pyarrow', 'pyspark', 'asyncio') if name in sys.modules))\n"
    )
    assert fresh_interpreter(code).strip() == ""


# --- docs that work as pasted ---


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def programs_with_arguments() -> list[str]:
    """The commands of the table of examples that need an address, or more."""
    table = (ROOT / "examples/README.md").read_text()
    return re.findall(r"^\| `python (examples/\w+\.py) [^`]+` \|", table, re.MULTILINE)


@pytest.mark.parametrize("program", programs_with_arguments())
@pytest.mark.parametrize("given", [[], ["one", "two", "three", "four"]], ids=["without", "with too many"])
def test_an_example_says_how_it_is_run(program: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, *given])
    with pytest.raises(SystemExit, match=rf"(?m)^    python {program} \S+"):
        runpy.run_path(str(ROOT / program), run_name="__main__")


def test_most_examples_that_need_an_address_are_known() -> None:
    assert len(programs_with_arguments()) >= 9


@pytest.mark.parametrize("number", range(len(examples())))
def test_readme_examples_run_as_pasted(number: int, tmp_path: Path) -> None:
    example = examples()[number]
    if "spark" in example:
        try:
            java()
        except KafkaMissing as missing:
            skip_loudly(str(missing))
    is_pytest = "def test_" in example
    file = tmp_path / "test_example.py"
    file.write_text(example)
    words = [sys.executable, *(("-m", "pytest", "-p", "no:cacheprovider") if is_pytest else ()), str(file)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
    expected = ["1 passed"] if is_pytest else re.findall(r"# prints (.*)", example)
    assert expected, "an example shows what it prints"
    assert [line for line in expected if line not in done.stdout] == []


def test_readme_has_a_spark_query_and_the_broker_in_a_pytest() -> None:
    assert ["foreachBatch(sink)" in text for text in examples()].count(True) == 1
    assert ["(semel_broker)" in text for text in examples()].count(True) == 1


def test_every_command_that_the_docs_name_exists() -> None:
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    begins = r"(?:^    |^\$ |`)(?:\.venv/bin/)?"  # in a block or as inline code
    assert set(re.findall(begins + r"make ([a-z][a-z-]+)", text, re.MULTILINE)) <= targets
    named = set(re.findall(begins + r"semel ([a-z]+)", text, re.MULTILINE))
    assert "demo" in named
    assert named <= set(available_commands())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [path for path in repository_files() if path.suffix == ".md"]:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            there = (page.parent / target) if target else page
            assert there.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if anchor:
                assert anchor in anchors(there), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


# --- setup ---


def test_setup_says_what_is_missing_when_python_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" || exit 1\n')
    old.chmod(0o755)
    words = [str(ROOT / "scripts" / "setup")]
    done = subprocess.run(
        words, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, found: Python 3.9.2" in done.stderr


def test_a_class_name_means_one_thing() -> None:
    found = re.findall(r"^class (\w+)", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")), re.M)
    named_twice = {name for name, count in Counter(found).items() if count > 1 and not name.startswith("_")}
    assert len(found) > 500
    assert not named_twice, f"give each of these classes a name of its own: {sorted(named_twice)}"


def test_the_wheel_holds_the_product_and_no_benchmarks_or_tests() -> None:
    from hatchling.builders.wheel import WheelBuilder

    files = WheelBuilder(str(ROOT)).recurse_included_files()
    names = sorted(path.distribution_path for path in files if path.distribution_path is not None)
    assert "semel/cli/bench.py" in names  # it says where the benchmarks are
    assert {name.partition("/")[0] for name in names} == {"semel", "pyspark_semel"}
    laboratory = re.compile(r"bench(marks)?/|tests?/|/test_|conftest")
    assert [name for name in names if laboratory.search(name)] == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_wheel_installs_light_and_runs_in_a_clean_environment(tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("semel-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    assert run(tmp_path / "clean/bin/semel", "--version") == f"semel {semel.__version__}\n"
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "pyarrow" in installed
    assert "pyspark" not in installed
    run(tmp_path / "clean/bin/semel", "demo")  # no Spark there: the processing loop


def test_types_are_prepared_for_decoding_when_a_module_is_imported() -> None:
    """msgspec looks at a Struct when it decodes the first one, and crashes the process when two threads do so
    at once. A module is imported by one thread. A type that a function makes for itself is nobody else's."""
    late = re.compile(r"msgspec\.(?:json|msgpack)\.decode\(.*type=|^ .*msgspec\.(?:json|msgpack)\.Decoder\(", re.M)
    found = [
        f"{path.relative_to(ROOT)}: {each}"
        for path in (ROOT / "src").rglob("*.py")
        for each in late.findall(path.read_text())
        if "msgspec.defstruct(" not in path.read_text()
    ]
    assert found == []
