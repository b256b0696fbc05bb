"""`swift-ft plan`: chooses which boundaries to log, from a profile of the job: a file, or measured by a running job.

--adaptive (`swift_ft.lab.plan.rerouted`) and --goodput (`swift_ft.lab.goodput`) plan something else, with flags of
their own.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import (
    Parser,
    add_json,
    argument,
    check_file,
    command,
    import_with_extra,
    write,
    write_json,
)
from swift_ft.errors import UsageError
from swift_ft.lab.command_line import duration, size
from swift_ft.lab.plan import running_job
from swift_ft.lab.plan.profile import Cap, Profile, read
from swift_ft.text import flag_of, job_called, show, tell

OTHERS = {"--adaptive": "swift_ft.lab.plan.rerouted", "--goodput": "swift_ft.lab.goodput.command"}
EXIT_NOT_MET = 1
SOURCE = "measured by the job's ranks"
OF_A_JOB = (
    *("job", "save_profile", "machine_per_rank", "log_read_rate", "log_write_rate"),
    *("network_rate", "machine_mtbf", "fixed"),
)


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft plan",
        description="Chooses which boundaries to log: bytes, overhead and recovery time of every choice worth having.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="With --adaptive it predicts the throughput of a job with replicas after losses, with --goodput the\n"
        "share of time that is training: --adaptive --help and --goodput --help list their flags.\n\n"
        "exit codes: 0 done, 1 the cap cannot be met, 2 usage, 3 the environment does not allow it",
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
    for flag, kind, unit, words in (
        ("--coordinator", str, "HOST:PORT", "take the profile that the ranks of a running job have measured"),
        ("--job", argument(job_called), "NAME", "of the job"),
        ("--log-read-rate", size, "BYTES", "per second; default: as measured in a replay, else 1GB"),
        ("--log-write-rate", size, "BYTES", "per second; default: as measured, else 1GB"),
        ("--network-rate", size, "BYTES", "per second, between two ranks; default: nobody helps a replay"),
        ("--machine-mtbf", duration, "TIME", "between two failures of a machine, on average; default: 30d"),
        ("--fixed", duration, "TIME", "fixed part of every recovery (detect, plan, rebuild); default: 0"),
        ("--save-profile", Path, "PATH", "write what was measured as JSON"),
    ):
        job.add_argument(flag, type=kind, metavar=unit, help=words)
    caps = parser.add_mutually_exclusive_group()
    for flag, kind, unit, words in (
        ("--storage-cap", size, "BYTES", "limit of the log's size until the next checkpoint, such as 800GB"),
        ("--recovery-cap", duration, "TIME", "limit of the recovery time that is expected over all failures"),
        ("--worst-recovery-cap", duration, "TIME", "limit of the recovery time, whichever machine fails"),
    ):
        caps.add_argument(flag, type=kind, metavar=unit, help=words)
    add_json(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line. Raises UsageError for an invalid value or contradicting flags."""
    options = make_parser().parse_args(argv)
    check_file("--json", options.json)
    check_file("--save-profile", options.save_profile)
    if options.coordinator is None:
        for name in OF_A_JOB:
            if getattr(options, name) not in (None, False):
                flag = flag_of(name)
                raise UsageError(f"{flag} is for a running job: give --coordinator HOST:PORT and --job NAME")
        if options.profile is None:
            raise UsageError(
                "give a PROFILE, or --coordinator HOST:PORT and --job NAME, or --adaptive, or --goodput"
            )
    elif options.profile is not None:
        raise UsageError(f"give PROFILE ({options.profile}) or --coordinator, not both")
    elif options.job is None:
        raise UsageError("--coordinator needs --job NAME")
    options.cap = None
    for kind, value in (
        ("storage_bytes", options.storage_cap),
        ("recovery_s", options.recovery_cap),
        ("worst_recovery_s", options.worst_recovery_cap),
    ):
        if value is not None:
            options.cap = Cap(kind=kind, value=value)
    return options


def measured(options: argparse.Namespace, reply: pb.MeasurementsReply) -> Profile:
    """Returns the profile of a running job, and saves it if requested. Raises ServiceError if not all ranks have
    measured yet."""
    profile, assumed = running_job.profile_of(options.job, reply, options)
    profile = replace(profile, source="; ".join([SOURCE, *(f"assumed: {what}" for what in assumed)]))
    write_json(options.save_profile, profile.document())
    show([*profile.source.split("; "), ""])
    return profile


def run(options: argparse.Namespace, ask: Callable[[str, str], pb.MeasurementsReply]) -> int:
    """Executes the command. Returns the exit code: `EXIT_NOT_MET` if no groups keep within the cap.

    Raises UsageError for an invalid profile, ServiceError if the job does not answer.
    """
    report = import_with_extra("swift_ft.lab.plan.report", "plan", "lab")
    if options.profile is not None:
        profile = read(options.profile)
    else:
        profile = measured(options, ask(options.coordinator, options.job))
    document = report.build(profile, options.cap or profile.cap)
    write(options.json, json.dumps(document) + "\n")
    show(report.text(document))
    if not document["met"]:
        tell(document["problem"])
        return EXIT_NOT_MET
    return 0


@command
def main(argv: Sequence[str], ask: Callable[[str, str], pb.MeasurementsReply] = running_job.ask) -> int:
    """`ask(coordinator, job)` returns what the job's ranks have measured."""
    for flag, module in OTHERS.items():
        if flag in argv:
            others = [word for word in argv if word != flag]
            return int(import_with_extra(module, "plan", "lab").main(others))
    return run(parse(argv), ask)
