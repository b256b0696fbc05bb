"""The command `swift-ft`: hands over to the program that does the work."""

import importlib
import os
import sys
from importlib import metadata
from typing import Any

from swift.words import tell

# Programs: the process becomes them, so that pids and signals are theirs.
PROGRAMS = {
    "run": ("swift.launch", "start the ranks of a training job; a rank that dies is replaced"),
    "logserver": ("services.logserver", "keep the tensors that cross boundaries, durably"),
    "coordinator": ("services.coordinator", "watch the ranks, decide on recoveries"),
}
OTHERS = {
    "drill": "kill ranks of a real training run and compare the recovered bits with a run that did not fail",
    "study": "train two small tasks under failures: what each strategy costs in time and accuracy",
    "failures": "show which failures swift-ft run --failures would make happen; convert traces of failures",
    "verify-determinism": "compare an interrupted run of a script with an uninterrupted one, and name what differs",
    "token": "make signing keys, and job tokens signed with them",
    "plan": "choose which boundaries to log: bytes, overhead and recovery time of every choice worth having",
    "inspect": "show, verify and export what is in the log; drop a job's log",
    "export": "write a version of a job so that torch.distributed.checkpoint opens it without swift-ft",
    "status": "show what a job does now: its state, each rank's version, how long a replay will still take",
    "jobs": "list a coordinator's jobs: state, version, newest checkpoint of each",
    "logs": "show where a job's log is kept; give a log server up, or name another one",
    "doctor": "check whether this machine is fit, and whether the services answer",
    "bench": "measure one part against the limit of the machine: log, replay, undo, ...; soak the log",
    "version": "print the version",
}


def usage() -> str:
    rows = [(name, what) for name, (_, what) in PROGRAMS.items()] + list(OTHERS.items())
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {what}" for name, what in rows]
    head = "Exact recovery for PyTorch training with pipeline and data parallelism."
    return "\n".join(
        [head, "", "usage: swift-ft COMMAND [ARGS...]", "", *lines, "", "swift-ft COMMAND --help says more."]
    )


def _running_job(coordinator: str, job: str) -> Any:
    return importlib.import_module("swift.control.profile").MeasuredJob(coordinator, job)


def main(argv: list[str] | None = None) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        return 130  # as a shell shows it


def _main(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in PROGRAMS:
        module = PROGRAMS[command][0]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
    if command == "drill":
        return int(importlib.import_module("swift.drill.command").main(rest))
    if command == "verify-determinism":
        return int(importlib.import_module("swift.determinism.command").main(rest))
    if command == "bench":
        return int(importlib.import_module("swift.bench.command").main(rest))
    if command == "study":
        return int(importlib.import_module("swift.study.command").main(rest))
    if command == "failures":
        return int(importlib.import_module("swift.failures.command").main(rest))
    if command == "token":
        return int(importlib.import_module("swift.security.command").main(rest))
    if command == "inspect":
        return int(importlib.import_module("swift.inspect.command").main(rest))
    if command == "plan":
        return int(importlib.import_module("swift.plan.command").main(rest, _running_job))
    if command == "doctor":
        return int(importlib.import_module("swift.doctor.command").main(rest))
    if command == "export":
        return int(importlib.import_module("swift.checkpoint.command").main(rest))
    if command == "status":
        return int(importlib.import_module("swift.control.status").main(rest))
    if command == "jobs":
        return int(importlib.import_module("swift.control.jobs").main(rest))
    if command == "logs":
        return int(importlib.import_module("swift.control.logs").main(rest))
    if command in ("version", "--version"):
        print(f"swift-ft {metadata.version('swift-ft')}")
        return 0
    if command in ("help", "-h", "--help"):
        print(usage())
        return 0
    known = ", ".join([*PROGRAMS, *OTHERS])
    problem = f"there is no command {command!r}" if command else "a command is needed"
    tell(f"{problem}; there are: {known}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
