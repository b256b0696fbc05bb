"""`swift-ft drill`: flags -> DrillConfig -> two runs -> report."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from swift.arguments import Parser
from swift.drill import faults, html, regroup, report, run
from swift.drill.config import (
    DATA_PARALLEL,
    IMPLEMENTATIONS,
    MODELS,
    OPTIMIZERS,
    REDUCTIONS,
    UNDOS,
    UPDATES,
    DrillConfig,
)
from swift.drill.console import LiveProgress, show
from swift.drill.topology import SCHEDULES, Topology, schedule_name
from swift.errors import ServiceError, SwiftError, UsageError
from swift.recovery import STRATEGIES
from swift.recovery.groups import RecoveryGroups

DESCRIPTION = "Kills ranks of a real training run and compares every bit with a run that did not fail."
EPILOG = """\
what --kill takes (several are carried out in the order in which the run meets them; several with the same step
make victims at once):
  rank=2,step=17,microbatch=3,phase=backward    SIGKILL of a rank by itself, exactly there; phases: forward,
                                                backward, reduce, update, optimizer, idle, replay, copy
  rank=2,phase=replay                           at the first replay that runs while rank 2 lives
  rank=2,phase=copy                             while rank 2 sends or receives a replica's state for the first time
  service=logserver,step=12                     SIGKILL of the log server; it is started again
  log=0,step=12                                 SIGKILL of that log server for good (needs --log-servers 2 or more),
                                                together with the ranks that are killed in that step
  log=0,phase=replay                            the same at the first replay
  service=coordinator,state=recovering          the coordinator kills itself there: fencing, planning,
                                                recovering, running
  corrupt=copy,rank=3                           a bit of the state that a replica gives to that rank
  corrupt=log,step=17[,stream=s1.F]             a bit of the live log, before the rank killed at that step dies

--model paced is tiny with stages that sleep for a fixed time, as if each had a device of its own.
reduce is the middle of a step's gradient reduction (needs --replicas); update the middle of a wait-free update
(needs --updates wait_free); optimizer the middle of optimizer.step(). Rank = pipeline rank * replicas + replica.

exit codes: 0 PASS, 1 FAIL, 2 usage, 3 INCONCLUSIVE or the environment, 130 interrupted
"""
DEFAULT_KILL = "rank=2,step=17,microbatch=3,phase=backward"
SPACE_NEEDED_MB = {"tiny": 64, "default": 512, "paced": 64}


class Stopped(BaseException):
    """A signal asked the drill to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft drill",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--stages", type=int, default=4, metavar="P", help="pipeline ranks (default %(default)s)")
    add("--replicas", type=int, default=1, metavar="D", help="of every stage (default %(default)s)")
    add("--steps", type=int, default=30, metavar="N", help="optimizer steps (default %(default)s)")
    add("--microbatches", type=int, default=8, metavar="M", help="per step and replica (default %(default)s)")
    add("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default %(default)s)")
    add("--kill", action="append", metavar="SPEC", help=f"a fault, see below (default: {DEFAULT_KILL})")
    add("--random-kills", type=int, metavar="N", help="that many ranks, at coordinates that --seed decides")
    add("--strategy", default="auto", metavar="NAME", help=f"{', '.join(STRATEGIES)} (default %(default)s)")
    add(
        "--groups",
        default="",
        metavar="RUNS",
        help="stages that recover together, between which alone the log is kept, such as 0-1,2-3 (default: none)",
    )
    add(
        "--regroup",
        action="append",
        metavar="SPEC",
        help="other ones from a step on: step=8,groups=0-1,2-3 or step=8,storage-cap=BYTES (by a plan); with until=12 "
        "or by=12 behind the step training waits there until they are asked for, or in force",
    )
    add("--seed", type=int, default=0, metavar="S", help="of everything random (default %(default)s)")
    add("--log-servers", type=int, default=1, metavar="N", help="as if on N machines (default %(default)s)")
    add("--copies", type=int, default=1, metavar="C", help="of every record (default %(default)s)")
    add("--spares", type=int, default=1, metavar="N", help="warm spare processes (default %(default)s)")
    add("--helpers", type=int, default=0, metavar="N", help="ranks that share a replay (default %(default)s)")
    add("--model", default="default", metavar="NAME", help=f"{', '.join(MODELS)} (default %(default)s)")
    add("--checkpoint-every", type=int, default=10, metavar="K", help="steps (default %(default)s)")
    _add_updates(parser)
    add(
        "--paranoid",
        action="store_true",
        help="compute the first step, and the one after every recovery, twice from one state, and compare",
    )
    add("--secure", action="store_true", help="over mutual TLS, with tokens, all made for this drill")
    add("--json", type=Path, metavar="PATH", help="write the report there")
    add("--html", type=Path, metavar="PATH", help="write the report as a page there")
    add("--directory", type=Path, metavar="DIR", help="keep everything of both runs there (must be empty)")
    add("--keep", action="store_true", help="keep the temporary directory (it is kept if the drill fails)")
    add(
        "--twin",
        type=Path,
        metavar="DIR",
        help="the failure-free run to compare with: used if it is finished there, else made there",
    )
    return parser


def _add_updates(parser: Parser) -> None:
    """From gradients to parameters, and back."""
    group = parser.add_argument_group("updates")
    for flag, default, known, what in (
        ("--updates", "after_backward", UPDATES, "when buckets of gradients are applied"),
        ("--data-parallel", "session", DATA_PARALLEL, "who averages gradients over replicas"),
        ("--reduction", "auto", REDUCTIONS, "order of additions; auto: by replica from three replicas on"),
        ("--undo", "exact", UNDOS, "how a half-applied step is taken back"),
        (
            "--optimizer",
            "adamw",
            tuple(OPTIMIZERS),
            "amsgrad is AdamW with amsgrad, sgd has Nesterov momentum",
        ),
        (
            "--optimizer-implementation",
            "",
            IMPLEMENTATIONS,
            "torch's version of it (default: torch's choice)",
        ),
    ):
        shown = f"{what}: {', '.join(known)}" + (" (default %(default)s)" if default else "")
        group.add_argument(flag, default=default, metavar="NAME", help=shown)


def parse(argv: Sequence[str]) -> DrillConfig:
    """The drill that is asked for. UsageError, in one line, for whatever cannot be."""
    args = make_parser().parse_args(argv)
    topology = Topology(
        pipeline_ranks=args.stages,
        replicas=args.replicas,
        steps=args.steps,
        microbatches=args.microbatches,
        schedule=schedule_name(args.schedule),
        checkpoint_every=args.checkpoint_every,
    )
    updates = args.updates.lower().replace("-", "_")
    return DrillConfig(
        topology=topology,
        faults=_faults(args, topology, updates),
        strategy=args.strategy.lower(),
        groups=_groups(args.groups),
        regroups=tuple(regroup.parse(spec) for spec in args.regroup or ()),
        seed=args.seed,
        spares=args.spares,
        helpers=args.helpers,
        log_servers=args.log_servers,
        copies=args.copies,
        model=args.model.lower(),
        updates=updates,
        data_parallel=args.data_parallel.lower(),
        optimizer=args.optimizer.lower(),
        optimizer_implementation=args.optimizer_implementation.lower(),
        undo=args.undo.lower(),
        reduction=args.reduction.lower(),
        paranoid=args.paranoid,
        secure=args.secure,
        json_path=args.json,
        html_path=args.html,
        directory=args.directory,
        keep=args.keep,
        twin=args.twin,
    )


def _groups(text: str) -> RecoveryGroups:
    try:
        return RecoveryGroups.parse(text)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def _faults(args: argparse.Namespace, topology: Topology, updates: str) -> tuple[faults.Fault, ...]:
    """Those that were given, and the random ones; without either, the default."""
    given = tuple(faults.parse(spec) for spec in args.kill or ())
    if args.random_kills is None:
        return given or (default_kill(topology),)
    if args.random_kills < 1:
        raise UsageError(f"--random-kills must be at least 1, not {args.random_kills}")
    return given + faults.random_kills(args.random_kills, topology, args.seed, updates, given)


def default_kill(topology: Topology) -> faults.RankFault:
    """`DEFAULT_KILL`, or what is most like it in a smaller drill: late, and not right behind a checkpoint."""
    step = min(17, topology.steps * 17 // 30)
    if step > 1 and step % topology.checkpoint_every == 0:
        step -= 1
    return faults.RankFault(
        rank=min(2, topology.ranks - 1),
        step=step,
        microbatch=min(3, topology.microbatches - 1),
        phase="backward",
    )


def check_paths(config: DrillConfig) -> None:
    """Everything that will be written can be, before anything runs."""
    for flag, path in (("--json", config.json_path), ("--html", config.html_path)):
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: give a file in a directory that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{flag} {path}: no permission to write there")
    for flag, directory in (("--directory", config.directory), ("--twin", config.twin)):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if flag == "--directory" and any(directory.iterdir()):
                raise UsageError(f"--directory {directory}: not empty; give a new one")
        except OSError as error:
            raise UsageError(f"{flag} {directory}: {error.strerror}") from None
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise UsageError(f"{flag} {directory}: no permission to read and write there")
    place = config.directory or Path(tempfile.gettempdir())
    free_mb = shutil.disk_usage(place).free >> 20
    if free_mb < SPACE_NEEDED_MB[config.model]:
        raise UsageError(
            f"{place}: {free_mb} MB free, the drill needs {SPACE_NEEDED_MB[config.model]}; "
            "make room, or give another --directory"
        )
    if config.twin is not None:
        run.stored_twin(config, config.twin)


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP; `check` acts on them where it is safe to."""

    def __init__(self) -> None:
        self.signum = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signum = number

    def check(self) -> None:
        if self.signum:
            raise Stopped(self.signum)


@contextlib.contextmanager
def work_directory(config: DrillConfig) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(where the runs lie, a call that keeps it). A temporary one is removed at the end unless it is kept."""
    if config.directory is not None:
        yield config.directory.resolve(), lambda: None
        return
    place = Path(tempfile.mkdtemp(prefix="swift-drill-"))
    kept = config.keep
    try:

        def keep() -> None:
            nonlocal kept
            kept = True

        yield place, keep
    finally:
        if kept:
            print(f"everything of this drill is in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)


def drill(config: DrillConfig, check_stop: Callable[[], None]) -> int:
    """Runs it and shows the report; the exit code."""
    with work_directory(config) as (place, keep), LiveProgress() as progress:
        outputs: list[str] = []

        def twin() -> run.Twin:
            stored = run.stored_twin(config, config.twin) if config.twin is not None else None
            if stored is not None:
                return stored
            made = run.run_twin(config, place / "twin", progress, check_stop)
            outputs.append(made.output)
            if config.twin is not None:
                run.store_twin(config, made, config.twin)
            return made

        faulted = run.FaultedRun(config, place / "run", progress, check_stop)
        evidence = faulted.run(twin)
        result = report.build(config, evidence)
        progress.close()
        write(config, result)
        show(result)
        if result["verdict"] != report.PASS:
            keep()
            for output in filter(None, [faulted.output, *outputs]):
                print(output, file=sys.stderr)
        return report.EXIT_CODES[result["verdict"]]


def write(config: DrillConfig, result: dict[str, Any]) -> None:
    """The files that were asked for; each appears whole or not at all."""
    try:
        if config.json_path is not None:
            replace_file(config.json_path, json.dumps(result, indent=2) + "\n")
        if config.html_path is not None:
            replace_file(config.html_path, html.page(result))
    except OSError as error:
        raise ServiceError(f"{error.filename}: {error.strerror}") from None


def replace_file(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    signals = _Signals()
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        check_paths(config)
        return drill(config, signals.check)
    except SwiftError as error:
        print(f"swift: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"swift: {error.filename or 'the drill'}: {error.strerror or error}", file=sys.stderr)
        return ServiceError.exit_code
    except Stopped as stopped:
        name = signal.Signals(stopped.signum).name
        print(f"swift: {name}: the drill was ended, nothing of it is left running", file=sys.stderr)
        return 128 + stopped.signum


if __name__ == "__main__":
    sys.exit(main())
