"""Command line parser of all programs: help begins with a description, errors are one line with exit code 2."""

import argparse
import errno
import importlib
import importlib.util
import io
import ipaddress
import json
import math
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.files import write_whole
from swift_ft.text import scheme_of, split_address, tell

T = TypeVar("T")
Number = TypeVar("Number", int, float)


class ParserMade(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


_only_made = False


def parser_of(program: Callable[[], object]) -> argparse.ArgumentParser | None:
    """Returns the parser with which a program would parse its arguments; None if it would not get that far."""
    global _only_made
    _only_made = True
    try:
        program()
    except ParserMade as made:
        return made.parser
    except SwiftError:
        return None
    finally:
        _only_made = False
    return None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError. `description` is the first line of its help."""

    def __init__(self, *, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, **{"allow_abbrev": False} | options)
        self.register("type", float, _finite)
        self._first_line = description

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        if _only_made:
            raise ParserMade(self)
        return super().parse_known_args(*args, **options)

    def format_help(self) -> str:
        return f"{self._first_line}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _finite(text: str) -> float:
    """Parses a number of a flag with ``type=float``; no range check would reject nan."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Makes an argparse ``type`` of a function that raises UsageError. The message of the parser names the flag."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def number(kind: type[Number], least: float, most: float = math.inf) -> Callable[[str], Number]:
    """Makes an argparse ``type`` for a finite number from `least` to `most`. `kind`: int or float."""
    allowed = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"

    def parsed(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text[:40]}: {allowed}")
        return value

    parsed.__name__ = kind.__name__
    return parsed


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def local_directory(text: str) -> Path:
    """Parses the name of a directory. Raises UsageError for a URL: as a path it would name a folder such as
    ``./s3:``."""
    if _URL.match(text):
        raise UsageError(f"{text[:80]} is a URL, and this takes only directories: name one, local or mounted")
    return Path(text)


def checkpoint_place(text: str) -> str:
    """Parses the place of checkpoints. Returns the absolute path of a directory, or the URL of an object store. Raises
    UsageError."""
    return object_store(text) if scheme_of(text) else os.path.abspath(local_directory(text))


def object_store(text: str) -> str:
    """Parses the URL of a bucket, or of a prefix in it. Returns it without a slash at its end. Raises UsageError, also
    if obstore is not installed."""
    scheme, _, place = text.partition("://")
    bucket, _, prefix = place.partition("/")
    words = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not scheme_of(text) or not bucket or set("?#") & set(text) or {"", ".", ".."} & set(words):
        raise UsageError(f"{text[:80]} names no object store: give s3://BUCKET/PREFIX, gs://… or az://…")
    if importlib.util.find_spec("obstore") is None:
        raise UsageError(f"{text[:80]}: obstore is not installed: pip install 'swift-ft[objects]'")
    return "/".join([f"{scheme}://{bucket}", *words])


def host_and_port(text: str, flag: str) -> tuple[str, int]:
    place = split_address(text)
    if place is None:
        raise UsageError(f"{flag} {text[:80]!r} is not HOST:PORT, such as 127.0.0.1:0")
    return place


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-listen",
        default="",
        metavar="HOST:PORT",
        help="show Prometheus metrics over HTTP at this address; port 0 takes any free one; default: no metrics",
    )
    parser.add_argument(
        "--metrics-address-file", type=Path, help="host:port is written to this file once metrics are shown"
    )


def metrics_address(text: str, *, insecure: bool, flag: str = "--metrics-listen") -> tuple[str, int] | None:
    """Returns the address for metrics; None if there is none. Raises UsageError off loopback without `insecure`."""
    if not text:
        return None
    host, port = host_and_port(text, flag)
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"{flag} {text}: not a loopback address, and metrics are neither encrypted nor authenticated; give "
            "127.0.0.1:PORT" + (", or --insecure if the network is trusted" if flag.startswith("--") else "")
        )
    return host, port


def write_address(path: Path, address: str, flag: str = "--address-file") -> None:
    """Writes the address atomically. Raises UsageError if the file cannot be written."""
    try:
        write_whole(path, f"{address}\n", mode=0o644)  # clients may run as another user
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the whole result as JSON, for programs"
    )


def write_json(path: Path | None, document: object) -> None:
    write(path, json.dumps(document, indent=2) + "\n")


_CANNOT_REPLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def write(path: Path | None, content: str) -> None:
    """Writes a regular file atomically where it can be replaced, and keeps its mode and owner; writes directly to
    anything else: /dev/stdout, a link, a file that is mounted by itself, a file in a folder without permission. Raises
    ServiceError if that fails."""
    if path is None:
        return
    try:
        if not path.is_symlink() and (path.is_file() or not path.exists()):
            there = path.stat() if path.exists() else None
            try:
                if there is None:
                    write_whole(path, content, mode=None)
                else:
                    write_whole(path, content, stat.S_IMODE(there.st_mode), (there.st_uid, there.st_gid))
                return
            except OSError as error:
                if there is None or error.errno not in _CANNOT_REPLACE:
                    raise
        path.write_text(content)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}; give another place") from None


def check_file(flag: str, path: Path | None) -> None:
    """Raises UsageError if the file cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: give a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def command(run: Callable[..., int]) -> Callable[..., int]:
    """(decorator) Makes a command's ``main``: its errors become one line and an exit code. The first argument is the
    command line, by default this process's."""

    @wraps(run)
    def main(argv: Sequence[str] | None = None, *more: Any) -> int:
        try:
            return run(sys.argv[1:] if argv is None else argv, *more)
        except SwiftError as error:
            tell(error)
            return error.exit_code
        except BrokenPipeError:
            raise  # for `end_quietly`
        except OSError as error:
            tell(f"{error.filename}: {error.strerror}" if error.filename else error)
            return ServiceError.exit_code

    return main


def end_quietly(program: Callable[[], int]) -> int:
    """Runs a program of the command line and returns its exit code: 130 after Ctrl-C, and 141 once nobody reads what it
    prints, as a shell has them for SIGINT and SIGPIPE."""
    _prepare_streams()
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_unread():  # another pipe: a bug
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # Python flushes them once more when it ends
            os.dup2(nowhere, stream)
        return 141


def end_process(program: Callable[[], int]) -> NoReturn:
    """Runs a program and ends the process without waiting for its threads. Python's own end would take a thread that is
    within torch's C++ (a launcher's asks a TCPStore) for an unhandled exception there, and abort the process (SIGABRT)
    in place of its exit code."""
    os._exit(end_quietly(program))


def _prepare_streams() -> None:
    """Opens standard streams that are closed (``2>&-``), to nowhere. Otherwise the next file that this process or a
    child of it opens gets the stream's number, and what a library says there goes into that file. Makes stdout print
    characters that the locale lacks, or that are none (in names of files), as stderr does: escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_unread() -> bool:
    streams = select.poll()
    for stream in (1, 2):
        streams.register(stream, 0)
    return any(event & select.POLLERR for _, event in streams.poll(0))


def import_with_extra(module: str, who: str, extra: str) -> Any:
    """Imports a module of swift that needs libraries of an extra. Raises UsageError if one of these is not
    installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("swift_ft", "swift_ft_services"):
            raise  # a damaged installation: no extra would help
        raise UsageError(f"{who}: {error.name} is not installed: pip install 'swift-ft[{extra}]'") from None
