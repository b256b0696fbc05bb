"""`swift-ft doctor`: gathers, judges, prints a table. Exit code 0: nothing fails; 3: something does; 2: usage."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from swift.arguments import Parser, host_and_port
from swift.doctor import gather
from swift.doctor.facts import Facts
from swift.doctor.machine_checks import Finding, Status, examine, exit_code
from swift.errors import SwiftError, UsageError
from swift.words import show, tell

TIMEOUT_S_MAX = 3600.0


def parser() -> Parser:
    parser = Parser(
        prog="swift-ft doctor",
        description="Checks whether this machine is fit for swift, and whether the services answer.",
    )
    parser.add_argument(
        "--directory", type=Path, help="the log server's directory; 64 MiB are written there and removed"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="the number of ranks that will run on this machine"
    )
    for flag, what in (
        ("--listen", "must be free here"),
        ("--server", "a log server that must answer"),
        ("--coordinator", "a coordinator that must answer"),
    ):
        parser.add_argument(
            flag, action="append", default=[], metavar="HOST:PORT", help=f"{what}; may be repeated"
        )
    parser.add_argument(
        "--certificate-days",
        type=float,
        default=30.0,
        help="warn if a certificate expires within this many days",
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for each service"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write findings and facts as JSON, for programs"
    )
    return parser


def gathered(argv: Sequence[str]) -> tuple[Facts, Path | None]:
    """What the command line asks for. UsageError: before anything is touched."""
    options = parser().parse_args(argv)
    for flag in ("listen", "server", "coordinator"):
        for address in getattr(options, flag):
            host_and_port(address, f"--{flag}")
    for flag, least in (("ranks", 0), ("certificate_days", 0), ("timeout", 0.01)):
        if getattr(options, flag) < least:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: give at least {least}")
    if options.timeout > TIMEOUT_S_MAX:
        raise UsageError(f"--timeout {options.timeout:g}: give at most {TIMEOUT_S_MAX:g} s")
    if options.json is not None and not options.json.parent.is_dir():
        raise UsageError(f"--json: there is no directory {options.json.parent}")
    asked = [("log server", address) for address in options.server]
    asked += [("coordinator", address) for address in options.coordinator]
    facts = Facts(
        own_version=metadata.version("swift-ft"),
        software=gather.software(),
        machine=gather.machine(),
        ranks=options.ranks,
        certificate_days=options.certificate_days,
        directory=gather.directory(options.directory) if options.directory is not None else None,
        ports=[gather.port(address) for address in options.listen],
        peers=[gather.peer(kind, address, options.timeout) for kind, address in asked],
        certificates=gather.certificates(os.environ, time.time()),
        token=gather.token(os.environ, time.time()),
    )
    return facts, options.json


def table(findings: Sequence[Finding]) -> str:
    """One line each: status, check, what was found, and after a dash what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{finding.status:<4}  {finding.check:<{width}}  {finding.found}"
        + (f" - {finding.advice}" if finding.advice else "")
        for finding in findings
    ]
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    lines.append(f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        facts, json_path = gathered(sys.argv[1:] if argv is None else argv)
        findings = examine(facts)
        if json_path is not None:
            report = {
                "ok": exit_code(findings) == 0,
                "findings": [asdict(finding) for finding in findings],
                "facts": asdict(facts),
            }
            json_path.write_text(json.dumps(report, indent=1, default=sorted) + "\n")
        show(table(findings).splitlines())
        return exit_code(findings)
    except SwiftError as error:
        tell(error)
        return error.exit_code
    except OSError as error:
        tell(error)
        return 3
