"""`semel completion`: completion of commands and options for a shell."""

from __future__ import annotations

import argparse
import shlex
from importlib import import_module
from typing import NamedTuple

HELP = "Prints a script that completes commands, actions and options of semel in a shell."
EXAMPLE = """source <(semel completion bash)                               # in ~/.bashrc
source <(semel completion zsh)                                # in ~/.zshrc, after compinit
semel completion fish > ~/.config/fish/completions/semel.fish"""


class Words(NamedTuple):
    """What may follow a command, and what may follow each of its actions."""

    options: list[str]
    actions: dict[str, list[str]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    from semel.cli import available_commands

    summaries = available_commands()
    words = {name: _words(name) for name in summaries}
    print(_fish(words, summaries) if args.shell == "fish" else _bash(words, args.shell), end="")
    return 0


def _words(name: str) -> Words:
    parser = argparse.ArgumentParser(prog=name)
    import_module(f"semel.cli.{name}").configure(parser)
    actions: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions |= {choice: _options(inner) for choice, inner in action.choices.items()}
        elif action.choices and not action.option_strings:
            actions |= {str(choice): [] for choice in action.choices}
    return Words(_options(parser), actions)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(text for action in parser._actions for text in action.option_strings if text.startswith("--"))


def _bash(words: dict[str, Words], shell: str) -> str:
    cases = []
    for name, (options, actions) in words.items():
        for action, own in actions.items():
            cases.append(f"    {shlex.quote(f'{name} {action}')}) words={shlex.quote(' '.join(own or options))} ;;")
        cases.append(f"    {shlex.quote(name + ' ')}*) words={shlex.quote(' '.join([*actions, *options]))} ;;")
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    body = "\n".join(cases)
    return f"""{zsh}_semel() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={shlex.quote(" ".join([*words, "--help", "--version"]))}
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{body}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _semel semel
"""


def _fish(words: dict[str, Words], summaries: dict[str, str]) -> str:
    lines = [
        f"complete -c semel -n __fish_use_subcommand -f -a {name} -d {shlex.quote(summary)}"
        for name, summary in summaries.items()
    ]
    for name, (options, actions) in words.items():
        seen = shlex.quote(f"__fish_seen_subcommand_from {name}")
        if actions:
            lines.append(f"complete -c semel -n {seen} -a {shlex.quote(' '.join(actions))}")
        every = sorted({*options, *(option for own in actions.values() for option in own)})
        lines += [f"complete -c semel -n {seen} -l {option[2:]}" for option in every]
    return "\n".join(lines) + "\n"
