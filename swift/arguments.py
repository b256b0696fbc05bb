"""Command lines, the same for every program: help begins with what it does, errors are one line, exit code 2."""

import argparse
from typing import Any, NoReturn

from swift.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError. `description` is the first line of its help."""

    def __init__(self, *, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)
        self._first_line = description

    def format_help(self) -> str:
        return f"{self._first_line}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")
