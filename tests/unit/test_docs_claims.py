"""README and docs name only what is there: extras, packages, files, commands, options, environment variables, names of
the API, and clients that a test uses."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def wrong(claims: Callable[[str], Iterator[str]], exists: Callable[[str], bool]) -> list[str]:
    """Claims of all pages that do not hold; there must be some that do."""
    found = [(page, claim) for page, text in TEXTS.items() for claim in claims(text)]
    assert found, "nothing was looked at"
    return [f"{page}: {claim}" for page, claim in found if not exists(claim)]


def inline_code(text: str) -> Iterator[str]:
    yield from re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each block of code: fenced, or indented by four spaces."""
    yield from re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    yield from (("", line) for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE))


# --- what can be installed ---


def extras(text: str) -> Iterator[str]:
    for names in re.findall(r"(?:\bsemel|pip install '\.)\[([\w, -]+)\]", text):
        yield from (name.strip() for name in names.split(","))


def test_extras_exist() -> None:
    there = PROJECT["project"]["optional-dependencies"]
    assert wrong(extras, there.__contains__) == []
    in_messages = {name for path in SOURCES for name in extras(path.read_text(encoding="utf-8"))}
    assert in_messages <= set(there), "messages name them, too"
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    for name, packages in there.items():
        assert packages, f"[{name}] installs nothing"
        modules = [re.split(r"[\[<>=; ]", package)[0].replace("-", "_") for package in packages]
        used = [module for module in modules if re.search(rf"^\s*(import|from) {module}\b", code, re.MULTILINE)]
        assert used, f"nothing imports what [{name}] installs"


# --- packages and files ---


def contracts(kind: str) -> list[dict[str, Any]]:
    return [contract for contract in PROJECT["tool"]["importlinter"]["contracts"] if contract["type"] == kind]


def layers() -> list[list[str]]:
    (contract,) = contracts("layers")
    assert contract["containers"] == ["semel"]
    assert contract["exhaustive"]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def may_import(package: str) -> list[str]:
    """By the contracts of import-linter: what is in a lower layer and not forbidden. Sub-packages have rules beyond."""
    (level,) = [number for number, layer in enumerate(layers()) if package in layer]
    below = [name for layer in layers()[level + 1 :] for name in layer]
    name = f"semel.{package}"
    refused = {
        other for contract in contracts("independence") if name in contract["modules"] for other in contract["modules"]
    }
    for contract in contracts("forbidden"):
        if name in contract["source_modules"]:
            refused.update(contract["forbidden_modules"])
    return [other for other in below if f"semel.{other}" not in refused]


def test_every_package_has_a_layer_and_a_line_on_the_architecture_page() -> None:
    folder = ROOT / "src/semel"
    there = {path.parent.name for path in folder.glob("*/__init__.py")} | {path.stem for path in folder.glob("*.py")}
    there.remove("__init__")
    assert {name for layer in layers() for name in layer} == there
    lines = re.findall(r"^\| `(\w+)(?:/|\.py)` \| .+? \| (.*?) \|$", TEXTS["architecture.md"], re.MULTILINE)
    assert {name for name, _ in lines} == there
    assert dict(lines) == {name: ", ".join(may_import(name)) or "nothing" for name in there}


def test_every_import_rule_is_on_the_architecture_page() -> None:
    rules = [contract["name"] for contract in PROJECT["tool"]["importlinter"]["contracts"]]
    assert len(rules) >= 5
    assert [rule for rule in rules if f"- {rule}" not in TEXTS["architecture.md"]] == []


def test_import_rules_name_modules_that_exist() -> None:
    text = str(PROJECT["tool"]["importlinter"])
    named = set(re.findall(r"\bsemel(?:\.\w+)+", text)) | {f"semel.{name}" for layer in layers() for name in layer}
    assert [name for name in sorted(named) if not _is_module(name)] == []


def _is_module(name: str) -> bool:
    path = (ROOT / "src").joinpath(*name.split("."))
    return (path / "__init__.py").exists() or path.with_suffix(".py").exists()


def test_docstrings_of_packages_name_modules_that_exist() -> None:
    """Those that list them in columns: a name, two spaces or more, what it does."""
    listed: dict[Path, set[str]] = {}
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found = {
            name for line in docstring.splitlines()[1:] for name in re.findall(r"(?:^|  )([a-z_]+)(?:\.py)?  ", line)
        }
        if len(found) > 2:
            listed[path.parent] = found
    assert len(listed) > 5
    there = {folder: {path.stem for path in folder.iterdir()} for folder in listed}
    assert {str(folder): names - there[folder] for folder, names in listed.items() if names - there[folder]} == {}


def paths(text: str) -> Iterator[str]:
    """Code that looks like a path of the repository."""
    for code in inline_code(text):
        if re.fullmatch(r"(?:tests|src|scripts|docs|examples|semel|requirements)/[\w./-]+|[a-z_]+/[a-z_]+\.py", code):
            yield code


def test_files_and_folders_exist() -> None:
    roots = (ROOT, ROOT / "src", ROOT / "src/semel")
    assert wrong(paths, lambda path: any((root / path).exists() for root in roots)) == []


# --- commands and their options ---


def command_lines(text: str) -> Iterator[str]:
    """Whatever runs `semel COMMAND ...`, in blocks and in the text."""
    for code in [*(line for _, block in blocks(text) for line in block.splitlines()), *inline_code(text)]:
        found = re.search(r"(?:^|[|;&] ?|\$ ?|\bbin/)semel ((?!\[)[a-z].*)", code.strip())
        if found:
            yield found[1]


def is_valid_command(line: str) -> bool:
    words = [word for word in shlex.split(line, comments=True) if word not in ("...", "|")]
    name = words[0]
    if name not in COMMANDS:
        return False
    known = options_of(name)
    given = {word.partition("=")[0] for word in words[1:] if re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", word)}
    return given <= known


def options_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    import_module(f"semel.cli.{command}").configure(parser)
    return set(_options(parser))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _options(child)


def test_commands_and_their_options_exist() -> None:
    assert wrong(command_lines, is_valid_command) == []


@pytest.mark.parametrize(
    "line", ["window", "broker --data x --web", "audit --app a --loop", "topic create x --copies 3"]
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    assert not is_valid_command(line)


def make_targets(text: str) -> Iterator[str]:
    for code in [*inline_code(text), *(line for _, block in blocks(text) for line in block.splitlines())]:
        found = re.match(r"make ([a-z-]+)\b", code.strip())
        if found:
            yield found[1]


def test_targets_of_make_exist() -> None:
    there = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wrong(make_targets, there.__contains__) == []


def variables(text: str) -> Iterator[str]:
    yield from re.findall(r"\bSEMEL_[A-Z_]+\b", text)


def test_environment_variables_are_read_somewhere() -> None:
    files = [*SOURCES, *(ROOT / "tests/support").glob("*.py"), *(ROOT / "scripts").iterdir(), ROOT / "Makefile"]
    there = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())
    assert wrong(variables, lambda name: bool(re.search(rf"\b{name}\b", there))) == []


def test_environment_variables_of_users_are_documented() -> None:
    internal = {"SEMEL_PYTHON", "SEMEL_SPARK_STAGES", "SEMEL_VENV"}  # set by semel itself, and by its own tools
    files = [*SOURCES, *(ROOT / "tests/browser").glob("*.py"), *(ROOT / "scripts").glob("*.py")]
    read = {name for path in files for name in variables(path.read_text(encoding="utf-8"))}
    table = (ROOT / "docs/operations.md").read_text(encoding="utf-8").split("## Environment variables")[1]
    assert read - internal == set(variables(table))


# --- names of the API ---


def api_names(text: str) -> Iterator[str]:
    for code in [*inline_code(text), *(block for language, block in blocks(text) if language == "python")]:
        yield from re.findall(r"(?<![\w./-])semel(?:\.[A-Za-z_]\w*)+(?![\w-])", code)  # not semel.dead-letter.reason


def resolves(name: str) -> bool:
    """As a module, or as attributes of one."""
    parts = name.split(".")
    value: Any = semel
    for number, part in enumerate(parts[1:], 2):
        module = ".".join(parts[:number])
        value = import_module(module) if _is_module(module) else getattr(value, part, None)
        if value is None:
            return False
    return True


def test_names_of_the_api_exist() -> None:
    assert wrong(api_names, resolves) == []


def calls(text: str) -> Iterator[str]:
    """`function option` for each keyword of a call of semel in a block of Python."""
    for language, block in blocks(text):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and re.fullmatch(r"semel(\.\w+)+", ast.unparse(node.func)):
                for keyword in node.keywords:
                    if keyword.arg is not None:
                        yield f"{ast.unparse(node.func)} {keyword.arg}"


def takes(call: str) -> bool:
    name, option = call.split()
    function: Any = semel
    for part in name.split(".")[1:]:
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    if name in ("semel.Producer", "semel.Consumer", "semel.Admin"):
        return option in parameters or option in {name.replace(".", "_") for name in _client_options(name)}
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _client_options(name: str) -> set[str]:
    import dataclasses

    from semel.client import settings

    kinds: dict[str, Any] = {
        "semel.Producer": settings.ProducerSettings,
        "semel.Consumer": settings.ConsumerSettings,
        "semel.Admin": settings.ClientSettings,
    }
    return {field.name for field in dataclasses.fields(kinds[name])}


def test_options_in_examples_exist() -> None:
    assert wrong(calls, takes) == []


# --- clients ---

CLIENTS_IN_TESTS = {
    "Java": ("tests/clients/test_java_tools.py", "kafka"),
    "C": ("tests/clients/test_foreign_clients.py", "import confluent_kafka"),  # librdkafka
    "Python": ("tests/clients/test_foreign_clients.py", "import aiokafka"),
    "Go": ("tests/clients/go/go.mod", "franz-go"),
    "JavaScript": ("tests/clients/javascript/package.json", "kafkajs"),
}


def test_clients_that_the_readme_names_are_used_by_tests() -> None:
    found = re.search(r"Kafka's clients in ([\w\s,]+);", TEXTS["README.md"])
    assert found is not None
    languages = re.findall(r"[A-Z]\w*", found[1])
    assert languages
    for language in languages:
        file, mark = CLIENTS_IN_TESTS[language]
        assert mark in (ROOT / file).read_text(encoding="utf-8")


# --- figures ---


def test_figures_of_the_readme_are_measured_ones() -> None:
    """`657 k/s` is in a table of the page of benchmarks, as `657 k` or `657 k/s`."""
    tables = "\n".join(line for line in TEXTS["benchmarks.md"].splitlines() if line.startswith("|"))
    measured = set(re.findall(r"[\d.,]*\d [kM]\b", tables))
    named = re.findall(r"([\d.,]*\d [kM])/s", TEXTS["README.md"])
    assert len(named) >= 6
    assert [figure for figure in named if figure not in measured] == []


# --- promises ---


def test_links_to_guarantees_lead_to_tests_of_the_guarantees_page() -> None:
    named = re.findall(r"\((tests/guarantees/\w+\.py)\)", TEXTS["README.md"])
    assert len(named) >= 6
    assert [file for file in named if f"../{file}" not in TEXTS["guarantees.md"]] == []


def test_every_promise_has_a_number_without_a_gap() -> None:
    numbers: dict[str, list[int]] = {}
    for letter, number in re.findall(r"^\| ([A-Z])(\d+) \|", TEXTS["guarantees.md"], re.MULTILINE):
        numbers.setdefault(letter, []).append(int(number))
    assert numbers
    beyond = numbers.pop("F")  # these are built one by one, in no order
    assert beyond == sorted(set(beyond))
    assert {letter: found for letter, found in numbers.items() if found != list(range(1, len(found) + 1))} == {}


# --- words ---

WORDS = re.compile(
    r"\b(?:time-outs?|heirs?|successors?|goodbye|borne|bears? with|(?:is|are|was) told|who asks|whoever)\b",
    re.IGNORECASE,
)
EVERYWHERE = re.compile(r"\b(?:time-outs?|heirs?|successors?|(?:is|are|was|were|be) told(?! apart))\b", re.IGNORECASE)
GENERATED = re.compile(r"<!-- generated.*?<!-- end of generated part -->", re.DOTALL)


def test_docs_and_client_speak_as_kafka_does() -> None:
    """docs/glossary.md has the words; these are the ones that readers do not search for."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    texts["README.md"] = TEXTS["README.md"]
    for package in ("client", "patterns"):
        for path in (ROOT / "src/semel" / package).glob("*.py"):
            texts[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    assert len(texts) > 60
    found = [(name, word) for name, text in texts.items() for word in WORDS.findall(GENERATED.sub("", text))]
    assert found == []


def test_code_and_tests_use_the_same_words() -> None:
    folders = ("src", "tests", "benchmarks", "examples", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    assert len(paths) > 500
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    assert [(name, word) for name, text in texts.items() for word in EVERYWHERE.findall(text)] == []


def test_a_class_of_the_client_is_the_only_one_of_its_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT / "src")))
    ours = {
        name: where
        for name, where in homes.items()
        if any(x.startswith(("semel/client/", "semel/patterns/")) for x in where)
    }
    assert len(ours) > 100
    assert {name: where for name, where in ours.items() if len(where) > 1} == {}


# --- drawings of call chains ---


def drawn_calls(chapter: str) -> list[tuple[int, str, str]]:
    """(indent, name, module) of each line of the drawing of a chapter."""
    text = TEXTS["architecture.md"].partition(f"## {chapter}\n")[2]
    drawing = next(text for _, text in blocks(text))
    lines = [re.fullmatch(r"( *)([\w.]+) +([\w/]+)\.py +\S.*", line) for line in drawing.splitlines()]
    assert all(lines), "each line is a function, its module and what it does"
    return [(len(line[1]), line[2], line[3].replace("/", ".")) for line in lines if line]


def function_of(name: str, module: str) -> Callable[..., Any]:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert inspect.isfunction(found), f"{name} in {module}"
    return found


@pytest.mark.parametrize(
    ("chapter", "package", "most_calls", "called_as"),
    [
        ("One micro-batch on the driver", "semel.spark", 13, {"WriteJob.__call__": "self.job"}),
        ("One Produce request in the broker", "semel", 15, {"produce": "served.handler"}),
    ],
)
def test_a_drawing_is_the_call_chain_of_the_code(
    chapter: str, package: str, most_calls: int, called_as: dict[str, str]
) -> None:
    """`called_as`: functions that are called by another name."""
    calls = drawn_calls(chapter)
    assert 0 < len(calls) <= most_calls
    above: list[tuple[int, Callable[..., Any]]] = []
    for indent, name, module in calls:
        while above and above[-1][0] >= indent:
            above.pop()
        called = called_as.get(name, name.rpartition(".")[2])
        if above:
            caller = above[-1][1]
            assert f"{called}(" in inspect.getsource(caller), f"{caller.__qualname__} does not call {name}"
        above.append((indent, function_of(name, f"{package}.{module}")))
