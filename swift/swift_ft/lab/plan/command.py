"""`swift-ft plan`: chooses which boundaries to log, from a profile of the job: a file, or measured by a running job.
With --adaptive, predicts the throughput of a job with replicas after losses (`swift_ft.lab.plan.adaptive`). With
--goodput, predicts the share of time that is training (`swift_ft.lab.goodput`)."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.files import read_given, write_whole
from swift_ft.lab.goodput import command
from swift_ft.lab.goodput.ways import Request
from swift_ft.lab.plan import adaptive, rerouted
from swift_ft.lab.plan.profile import Cap, Profile, parse
from swift_ft.text import flag_of, show, tell

# A running job's profile: assumptions, and the interface that supplies the measurements.

DEFAULT_RATE = 1e9
"""Assumed bytes per second of a log whose rate was not measured."""
DEFAULT_MTBF_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Operator's values for a running job. None: the measured value, else a default, which the plan then names."""

    log_read_bytes_per_s: float | None = None
    log_write_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    """Rate between two ranks. None: replay without helpers."""
    machine_mtbf_s: float | None = None
    fixed_s: float | None = None
    machine_per_rank: bool = False
    """Plans as if each rank had a machine of its own."""


class RunningJob(Protocol):
    """Connection to a running job."""

    def profile(self, given: Given) -> tuple[Profile, list[str]]:
        """Returns the profile that the job's ranks have measured, and the assumptions in it as text.

        Raises ServiceError if not all ranks have measured yet, UsageError if such a job cannot be planned.
        """

    def close(self) -> None: ...


EXIT_NOT_MET = 1
SOURCE = "measured by the job's ranks"
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A running job that supplies the profile."""

    coordinator: str
    job: str
    given: Given
    save: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    """Checked command line of --adaptive or --goodput."""

    request: rerouted.Request | Request
    json: Path | None
    svg: Path | None


_OF_A_JOB = (
    *("job", "save_profile", "machine_per_rank", "log_read_rate", "log_write_rate"),
    *("network_rate", "machine_mtbf", "fixed"),
)
_ALONE = ("coordinator", "profile", "storage_cap", "recovery_cap", "worst_recovery_cap")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Checked command line."""

    profile: Path | None
    running: Running | None
    """Set if `profile` is None."""
    cap: Cap | None
    """None: the profile's cap, if it has one."""
    json: Path | None
    svg: Path | None

    def __post_init__(self) -> None:
        save = self.running.save if self.running is not None else None
        _check_places({"--json": self.json, "--svg": self.svg, "--save-profile": save})


def _check_places(places: Mapping[str, Path | None]) -> None:
    for flag, path in places.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag}: there is no directory {path.absolute().parent}")


def _bytes(text: str, flag: str) -> int:
    """Parses a number of bytes with an optional unit, such as 800GB."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            f"{flag} {text}: write bytes, such as 800GB; units: {', '.join(filter(None, _UNITS))}"
        )
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _seconds(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: write seconds, such as 30") from None


def _parser() -> Parser:
    parser = Parser(
        prog="swift-ft plan",
        description="Chooses which boundaries to log: bytes, overhead and recovery time of every choice worth having.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 1 the cap cannot be met, 2 usage, 3 the environment does not allow it",
    )
    parser.add_argument(
        "profile", type=Path, nargs="?", metavar="PROFILE", help="JSON; docs/planning.md lists its fields"
    )
    job = parser.add_argument_group("a running job, instead of PROFILE")
    job.add_argument(
        "--machine-per-rank",
        action="store_true",
        help="plan as if each rank had a machine; default: one for each host",
    )
    for flag, unit, words in (
        ("--coordinator", "HOST:PORT", "take the profile that the ranks of a running job have measured"),
        ("--job", "NAME", "of the job"),
        ("--log-read-rate", "BYTES", "per second; default: as measured in a replay, else 1GB"),
        ("--log-write-rate", "BYTES", "per second; default: as measured, else 1GB"),
        ("--network-rate", "BYTES", "per second, between two ranks; default: nobody helps a replay"),
        ("--machine-mtbf", "SECONDS", "mean time between two failures of a machine; default: 30 days"),
        ("--fixed", "SECONDS", "fixed part of every recovery (detect, plan, rebuild); default: 0"),
    ):
        job.add_argument(flag, metavar=unit, help=words)
    job.add_argument("--save-profile", type=Path, metavar="PATH", help="write what was measured as JSON")
    adaptive.add_arguments(parser)
    command.add_arguments(parser)
    caps = parser.add_mutually_exclusive_group()
    for flag, unit, words in (
        ("--storage-cap", "BYTES", "limit of the log's size until the next checkpoint, such as 800GB"),
        ("--recovery-cap", "SECONDS", "limit of the recovery time that is expected over all failures"),
        ("--worst-recovery-cap", "SECONDS", "limit of the recovery time, whichever machine fails"),
    ):
        caps.add_argument(flag, metavar=unit, help=words)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything as JSON, for programs")
    parser.add_argument(
        "--svg", type=Path, metavar="PATH", help="draw the frontier, or shares by the cluster's size"
    )
    return parser


def config_of(argv: Sequence[str]) -> PlanConfig | Other:
    """Parses and checks the command line. Raises UsageError for an invalid value or contradicting flags."""
    options = _parser().parse_args(argv)
    if options.adaptive or options.goodput:
        return _other(options)
    _refuse(options, adaptive.FLAGS, "{} is for replicas that lose ranks: give --adaptive")
    _refuse(options, command.OWN, "{} is for the share of useful time: give --goodput")
    return PlanConfig(
        profile=options.profile,
        running=_running(options),
        cap=_cap(options),
        json=options.json,
        svg=options.svg,
    )


def _refuse(options: argparse.Namespace, names: Iterable[str], words: str) -> None:
    """Raises UsageError if one of these flags is given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            raise UsageError(words.format("PROFILE" if name == "profile" else flag_of(name)))


def _cap(options: argparse.Namespace) -> Cap | None:
    if options.storage_cap is not None:
        return Cap(kind="storage_bytes", value=_bytes(options.storage_cap, "--storage-cap"))
    for kind in ("recovery", "worst_recovery"):
        text = getattr(options, f"{kind}_cap")
        if text is not None:
            return Cap(kind=f"{kind}_s", value=_seconds(text, flag_of(f"{kind}_cap")))
    return None


def _other(options: argparse.Namespace) -> Other:
    """Checks the modes that need no profile: --adaptive and --goodput."""
    if options.adaptive and options.goodput:
        raise UsageError("give --adaptive or --goodput, not both")
    mode = "--adaptive" if options.adaptive else "--goodput"
    foreign = command.OWN if options.adaptive else [f for f in adaptive.FLAGS if f not in command.SHARED]
    _refuse(options, [*_ALONE, *foreign], f"{mode} plans with the flags of its own: leave out {{}}")
    _check_places({"--json": options.json, "--svg": options.svg})
    request = adaptive.config_of(options) if options.adaptive else command.config_of(options)
    return Other(request=request, json=options.json, svg=options.svg)


def _running(options: argparse.Namespace) -> Running | None:
    if options.coordinator is None:
        _refuse(options, _OF_A_JOB, "{} is for a running job: give --coordinator HOST:PORT and --job NAME")
        if options.profile is None:
            raise UsageError(
                "give a PROFILE, or --coordinator HOST:PORT and --job NAME, or --adaptive, or --goodput"
            )
        return None
    if options.profile is not None:
        raise UsageError(f"give PROFILE ({options.profile}) or --coordinator, not both")
    if options.job is None:
        raise UsageError("--coordinator needs --job NAME")

    def rate(name: str) -> float | None:
        text = getattr(options, name)
        return None if text is None else float(_bytes(text, flag_of(name)))

    def seconds(name: str) -> float | None:
        text = getattr(options, name)
        return None if text is None else _seconds(text, flag_of(name))

    given = Given(
        log_read_bytes_per_s=rate("log_read_rate"),
        log_write_bytes_per_s=rate("log_write_rate"),
        network_bytes_per_s=rate("network_rate"),
        machine_mtbf_s=seconds("machine_mtbf"),
        fixed_s=seconds("fixed"),
        machine_per_rank=options.machine_per_rank,
    )
    return Running(coordinator=options.coordinator, job=options.job, given=given, save=options.save_profile)


def read(path: Path) -> Profile:
    """Reads a profile. Raises UsageError if the file cannot be read or is no valid profile."""
    content = read_given(path, str(path))
    try:
        return parse(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def measured(running: Running, connect: Callable[[str, str], RunningJob]) -> Profile:
    """Returns the profile of a running job, and saves it if requested. Raises ServiceError if not all ranks have
    measured yet, or the job does not answer."""
    with contextlib.closing(connect(running.coordinator, running.job)) as job:
        profile, assumed = job.profile(running.given)
    profile = replace(profile, source="; ".join([SOURCE, *(f"assumed: {what}" for what in assumed)]))
    if running.save is not None:
        _write(running.save, json.dumps(profile.document(), indent=2) + "\n")
    show([*profile.source.split("; "), ""])
    return profile


def _write(path: Path, content: str) -> None:
    """Writes a regular file atomically; writes directly to anything else (/dev/stdout). Raises UsageError on an
    OSError."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(content)
            return
        write_whole(path, content, mode=None)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another place") from None


def run_other(config: Other) -> int:
    """Executes --adaptive or --goodput. Raises UsageError for a job that cannot be planned."""
    request = config.request
    if isinstance(request, rerouted.Request):
        contents = adaptive.run(request)
    else:
        contents = command.run(request, written=config.json is not None, drawn=config.svg is not None)
    for name, path in (("json", config.json), ("svg", config.svg)):
        if path is not None:
            _write(path, contents[name])
    return 0


def run(config: PlanConfig, connect: Callable[[str, str], RunningJob]) -> int:
    """Executes the command. Returns the exit code: `EXIT_NOT_MET` if no groups keep within the cap.

    Raises UsageError for an invalid profile; ServiceError if numpy is missing or the job does not answer.
    """
    running = config.running
    if running is not None:
        profile = measured(running, connect)
    else:
        assert config.profile is not None
        profile = read(config.profile)
    try:
        from swift_ft.lab.plan import plot, report
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ServiceError("numpy is missing here: pip install 'swift-ft[lab]'") from None
    document = report.build(profile, config.cap or profile.cap)
    if config.json is not None:
        _write(config.json, json.dumps(document) + "\n")
    if config.svg is not None:
        _write(config.svg, plot.draw(document))
    show(report.text(document).splitlines())
    if not document["met"]:
        tell(document["problem"])
        return EXIT_NOT_MET
    return 0


def _connect(coordinator: str, job: str) -> RunningJob:
    from swift_ft.lab.plan.running_job import MeasuredJob  # imports gRPC only if a job is queried

    return MeasuredJob(coordinator, job)


def main(argv: Sequence[str] | None = None, connect: Callable[[str, str], RunningJob] = _connect) -> int:
    """`connect(coordinator, job)` returns the connection to a running job."""
    try:
        config = config_of(sys.argv[1:] if argv is None else argv)
        return run(config, connect) if isinstance(config, PlanConfig) else run_other(config)
    except SwiftError as error:
        tell(error)
        return error.exit_code
    except OSError as error:
        tell(error)
        return ServiceError.exit_code
