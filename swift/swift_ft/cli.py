"""The command `swift-ft`: dispatches to the program of each subcommand."""

import os
import sys
from importlib import metadata
from typing import Any

from swift_ft.cli_parser import end_quietly, import_with_extra
from swift_ft.errors import UsageError
from swift_ft.text import tell

# Programs that replace this process (exec), so that they keep its pid and get its signals.
PROGRAMS = {
    "run": ("swift_ft.launch", "start the ranks of a training job; a rank that dies is replaced"),
    "logserver": ("swift_ft_services.logserver", "keep the tensors that cross boundaries, durably"),
    "coordinator": ("swift_ft_services.coordinator", "watch the ranks, decide on recoveries"),
}
OTHERS = {
    "drill": (
        "lab.drill.command",
        "kill ranks of a real run, and compare its bits with an undisturbed one's",
    ),
    "study": ("lab.study.command", "train two small tasks under failures: each strategy's time and accuracy"),
    "failures": ("lab.failures.schedule", "show which failures swift-ft run --failures would make happen"),
    "verify-determinism": ("lab.determinism.command", "name what differs once a script is interrupted"),
    "plan": ("lab.plan.command", "choose which boundaries to log: bytes, overhead and recovery time"),
    "bench": ("lab.bench.command", "measure one part against the limit of the machine: log, recovery, ..."),
    "credentials": ("tools.credentials", "make a cluster's certificates, signing key and tokens"),
    "token": ("tools.token", "make signing keys, and job tokens signed with them"),
    "inspect": ("tools.inspect", "show and verify what is in the log; drop a job's log"),
    "export": ("tools.export", "write a version that torch.distributed.checkpoint opens without swift-ft"),
    "status": ("tools.status", "show what a job does now: its state, each rank's version, a replay's pace"),
    "events": ("tools.status:events", "show a job's history: each generation's cause, plan and times"),
    "jobs": ("tools.status:jobs", "list a coordinator's jobs: state, version, newest checkpoint"),
    "logs": ("tools.status:logs", "show where a job's log is kept; give a log server up, or add one"),
    "watch": ("tools.watch", "serve a live page of a coordinator's jobs, for a browser"),
    "completion": ("tools.completion", "print what bash or zsh needs to complete commands and flags"),
    "doctor": ("tools.doctor", "check whether this machine is fit, and whether the services answer"),
}


def _parsers() -> dict[str, tuple[str, str]]:
    """Returns name -> (module that makes the parser, what it does) of each command."""
    flags = {"run": "swift_ft.launch.command"}
    return {
        name: (flags.get(name, f"{module}.__main__"), what) for name, (module, what) in PROGRAMS.items()
    } | {name: (f"swift_ft.{module}", what) for name, (module, what) in OTHERS.items()}


def usage() -> str:
    named = {**PROGRAMS, **OTHERS, "version": ("", "print the version")}
    rows = [(name, what) for name, (_, what) in named.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {what}" for name, what in rows]
    head = "Exact recovery for PyTorch training with pipeline and data parallelism."
    return "\n".join(
        [head, "", "usage: swift-ft COMMAND [ARGS...]", "", *lines, "", "swift-ft COMMAND --help says more."]
    )


def main(argv: list[str] | None = None) -> int:
    return end_quietly(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # see `swift_ft.launch`
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in PROGRAMS:
        module = PROGRAMS[command][0]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
    if command in OTHERS:
        name, _, one_of_several = OTHERS[command][0].partition(":")
        more: list[Any] = [_parsers()] if command == "completion" else [*filter(None, [one_of_several])]
        module = f"swift_ft.{name}"
        try:
            program = import_with_extra(module, command, "lab" if ".lab." in module else "train")
            if os.environ.get("SWIFT_CREDENTIALS"):
                from swift_ft.credentials import act_as  # imported here because grpc takes long to import

                act_as("operators")
        except UsageError as error:
            tell(error)
            return 2
        return int(program.main(rest, *more))
    if command in ("version", "--version"):
        print(f"swift-ft {metadata.version('swift-ft')}")
        return 0
    if command in ("help", "-h", "--help"):
        print(usage())
        return 0
    known = ", ".join([*PROGRAMS, *OTHERS, "version"])
    problem = f"there is no command {command!r}" if command else "a command is needed"
    tell(f"{problem}; there are: {known}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
