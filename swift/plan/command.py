"""`swift-ft plan`: which boundaries to log, out of a profile of the job."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from swift.arguments import Parser
from swift.errors import ServiceError, SwiftError, UsageError
from swift.plan.profile import DOCUMENT_BYTES_MAX, Cap, Profile, parse

EXIT_NOT_MET = 1
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """What the command line says, checked."""

    profile: Path
    cap: Cap | None
    """None: the profile's own, if it has one."""
    json: Path | None
    svg: Path | None

    def __post_init__(self) -> None:
        for flag, path in (("--json", self.json), ("--svg", self.svg)):
            if path is not None and not path.absolute().parent.is_dir():
                raise UsageError(f"{flag}: there is no directory {path.absolute().parent}")


def _bytes(text: str) -> int:
    """800GB, or a plain number."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise UsageError(
            f"--storage-cap {text}: write bytes, such as 800GB; units: {', '.join(filter(None, _UNITS))}"
        )
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _seconds(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: write seconds, such as 30") from None


def config_of(argv: Sequence[str]) -> PlanConfig:
    parser = Parser(
        prog="swift-ft plan",
        description="Chooses which boundaries to log: bytes, overhead and recovery time of every choice worth having.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 1 the cap cannot be met, 2 usage, 3 the environment is not able to",
    )
    parser.add_argument(
        "profile", type=Path, metavar="PROFILE", help="JSON; docs/planning.md lists its fields"
    )
    caps = parser.add_mutually_exclusive_group()
    caps.add_argument(
        "--storage-cap", metavar="BYTES", help="the log's size until the next checkpoint: 800GB"
    )
    caps.add_argument(
        "--recovery-cap", metavar="SECONDS", help="the recovery time expected over all failures"
    )
    caps.add_argument(
        "--worst-recovery-cap", metavar="SECONDS", help="the recovery time whichever machine fails"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="everything, for programs")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="a drawing of the frontier")
    options = parser.parse_args(argv)
    cap = None
    if options.storage_cap is not None:
        cap = Cap(kind="storage_bytes", value=_bytes(options.storage_cap))
    elif options.recovery_cap is not None:
        cap = Cap(kind="recovery_s", value=_seconds(options.recovery_cap, "--recovery-cap"))
    elif options.worst_recovery_cap is not None:
        cap = Cap(kind="worst_recovery_s", value=_seconds(options.worst_recovery_cap, "--worst-recovery-cap"))
    return PlanConfig(profile=options.profile, cap=cap, json=options.json, svg=options.svg)


def read(path: Path) -> Profile:
    """UsageError: it cannot be read, or is no profile."""
    try:
        with path.open("rb") as file:
            text = file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def run(config: PlanConfig) -> int:
    profile = read(config.profile)
    try:
        from swift.plan import plot, report
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ServiceError("numpy is missing here: pip install 'swift-ft[plan]'") from None
    document = report.build(profile, config.cap or profile.cap)
    for path, content in ((config.json, report.dumps), (config.svg, plot.draw)):
        if path is not None:
            try:
                path.write_text(content(document))
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror}; give another place") from None
    print(report.text(document))
    if not document["met"]:
        print(f"swift: {document['problem']}", file=sys.stderr)
        return EXIT_NOT_MET
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(config_of(sys.argv[1:] if argv is None else argv))
    except SwiftError as error:
        print(f"swift: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"swift: {error}", file=sys.stderr)
        return ServiceError.exit_code
