"""`swift-ft completion SHELL`: prints the completions of all commands and their flags, made by shtab."""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser, command, import_with_extra, parser_of

SHELLS = ("bash", "zsh")
OF_IT = """\
Prints what a shell needs to complete swift-ft's commands and flags. For this shell:
    eval "$(swift-ft completion bash)"      (zsh: after compinit)
for all: put it where the shell looks, such as ~/.local/share/bash-completion/completions/swift-ft."""


def parser(commands: Mapping[str, tuple[str, str]]) -> argparse.ArgumentParser:
    """Returns the parser of `swift-ft` with all commands. `commands`: name -> (module, what it does). A command whose
    libraries are not installed is completed without its flags."""
    top = argparse.ArgumentParser(prog="swift-ft")
    known = top.add_subparsers()
    for name, (module, what) in commands.items():
        known.add_parser(name, prog=f"swift-ft {name}", description=what, help=what)
        own = _own(module)
        if own is not None:
            known.choices[name] = own
            own.prog, own.description = f"swift-ft {name}", what
    return top


def _own(module: str) -> argparse.ArgumentParser | None:
    name, _, one_of_several = module.partition(":")
    try:
        program = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    found: Any = getattr(program, "make_parser", None)  # where main does more than to parse
    if found is None:
        return parser_of(lambda: program.main([], *filter(None, [one_of_several])))
    made: argparse.ArgumentParser = found()
    return made


def _name_files(shtab: Any, parser: argparse.ArgumentParser) -> None:
    """Lets the shell complete the names of files where a flag takes one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                _name_files(shtab, own)
        elif action.type is Path or action.dest in ("training_script", "script"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


@command
def main(argv: Sequence[str], commands: Mapping[str, tuple[str, str]] | None = None) -> int:
    own = Parser(prog="swift-ft completion", description=OF_IT)
    own.add_argument("shell", choices=SHELLS)
    given = own.parse_args(argv)
    shtab = import_with_extra("shtab", "completion", "completion")
    top = parser(commands or {})
    _name_files(shtab, top)
    print(shtab.complete(top, shell=given.shell))
    return 0
