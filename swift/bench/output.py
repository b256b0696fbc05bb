"""What all benchmarks say alike: the machine in words, and the result as JSON."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift.arguments import Parser
from swift.errors import ServiceError, UsageError


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "unknown")


def machine() -> str:
    """The machine in words; its load, too: whoever else computes meanwhile disturbs what is measured."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({cpu_model()}), {memory} GiB, loopback, load {os.getloadavg()[0]:.1f}"


def place(directory: Path | None) -> "TemporaryDirectory[str]":
    """Where a benchmark works, removed after it: within ``--directory``, which UsageError names if it cannot be."""
    try:
        return TemporaryDirectory(prefix="swift-bench-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"--directory {directory or '(none given)'}: {error.strerror}; give one that can be written"
        ) from None


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")


def check_json(path: Path | None, option: str = "--json") -> None:
    """Before anything is measured: UsageError if the result could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{option} {path}: give a file in a directory that exists")


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    if path is not None:
        write_text(path, json.dumps(result, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all. ServiceError if that cannot be."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error
