"""`swift-ft run`: flags -> LaunchPlan -> run. Nothing here imports torch before a job is run."""

import argparse
import copy
import enum
import importlib.util
import os
import re
import secrets
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from swift_ft import events
from swift_ft.cli_parser import Parser, argument, checkpoint_place, host_and_port, import_with_extra, number
from swift_ft.errors import SwiftError, UsageError
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.health_check import LIMIT_S_DEFAULT, HealthCheck
from swift_ft.launch.ranks import LaunchSettings, Output, RankProgram, Std, make_run_dir
from swift_ft.launch.rendezvous import LOOPBACK, Terms, seconds_of
from swift_ft.launch.standalone import Standalone
from swift_ft.planner.settings import LOST_SHARDS, QUICKEST, STRATEGIES, lost_shard_problem
from swift_ft.text import (
    ENV_ALLOW_INEXACT,
    ENV_SPARES,
    LAUNCHER_SETTINGS,
    job_called,
    scheme_of,
    tell,
    whole_number,
)

# The flags: swift's own in groups, then torchrun's.
#
# torchrun's parser is not used, because it imports torch: seconds, for a help text or a typing error. A test compares
# the flags here with those of the installed torch.

DESCRIPTION = "Starts the ranks of a training job, keeps warm spares, and replaces a rank that dies."
REPLACEMENTS_DEFAULT = 100
ON_OFF = ("on", "off")
START_METHODS = ("fork", "spawn")
GRACE_S_DEFAULT = 5.0
LAST_CHECKPOINT_S_DEFAULT = 15.0
"""With the grace period, less than the 30 s that schedulers leave between SIGTERM and SIGKILL."""
# Some of these are otherwise imported only at first use, which would delay a recovery.
PRELOAD_DEFAULT = (
    "torch,torch.distributed,torch.distributed.pipelining,torch.distributed.checkpoint,"
    "torch.utils.serialization.config,fsspec.core,grpc,grpc._channel,grpc.experimental,"
    "swift_ft.coordinator_client,swift_ft.train.session,swift_ft.comm.gloo"
)


class _Formatter(argparse.HelpFormatter):
    """Leaves torchrun's other spelling (--warm_up) out."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [flag for flag in action.option_strings if "_" not in flag]
        return super()._format_action_invocation(shown)


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"run: {message} (see swift-ft run --help)")


class _Group:
    """A group of flags. Each flag has torchrun's other spelling as well (--warm_up)."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, description: str | None = None) -> None:
        self._group = parser.add_argument_group(title, description)

    def add(self, *flags: str, **options: Any) -> None:
        other = [f"--{flag[2:].replace('-', '_')}" for flag in flags if "-" in flag[2:]]
        self._group.add_argument(*flags, *other, **options)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="swift-ft run",
        description=DESCRIPTION,
        allow_abbrev=True,  # as in torchrun
        usage="swift-ft run [FLAGS] SCRIPT [ARGUMENTS...]",
        formatter_class=_Formatter,
    )
    _add_job(_Group(parser, "the job"))
    _add_recovery(_Group(parser, "recovery"))
    _add_checkpoints(_Group(parser, "checkpoints"))
    _add_processes(_Group(parser, "processes and places"))
    _add_adaptive(_Group(parser, "going on with --strategy adaptive, or auto with --lost-shard reroute"))
    _add_torchrun(_Group(parser, "torchrun's flags"))
    _add_refused(_Group(parser, "torchrun's flags that are refused, with the way to go"))
    parser.add_argument(
        "training_script", metavar="SCRIPT", help="The script, or with -m the module, of the ranks."
    )
    parser.add_argument(
        "training_script_args",
        metavar="ARGUMENTS",
        nargs=argparse.REMAINDER,
        help="The script's own arguments.",
    )
    return parser


def _add_job(group: _Group) -> None:
    group.add(
        "--standalone",
        action="store_true",
        default=_is_set("standalone"),
        help="Run on this machine alone, with a coordinator and a log server of the job's own. They keep their files "
        "in ./swift-NAME and end with the job; the same command goes on there. Without --job, NAME is made from the "
        "script's name.",
    )
    group.add(
        "--coordinator",
        default=None,
        metavar="HOST:PORT,...",
        help="The job's coordinator, or all that share a store (default: $SWIFT_COORDINATOR; needed without "
        "--standalone).",
    )
    group.add(
        "--job",
        type=argument(job_called),
        metavar="NAME",
        help="The job's name: 1 to 64 letters, digits, '.', '_' and '-'; a '/' becomes '~'. Default: made from the "
        "rendezvous id; on one machine without one, from the script's name and six letters. A name that was made up is "
        "printed.",
    )
    group.add(
        "--failures",
        metavar="FILE|SPEC",
        help="Make these failures happen while the job runs: at coordinates (rank=2,step=17,phase=backward), drawn "
        "(every=weibull,shape=0.6,mtbf=40,until=200,seed=7), or by a trace. What was injected, and who noticed it "
        "after how long, is printed at the end and is in failures.json (docs/drills.md).",
    )


def _add_recovery(group: _Group) -> None:
    group.add(
        "--strategy",
        choices=STRATEGIES,
        help="How a lost rank's state is restored (docs/strategies.md), if the script does not say it. With 'shrink', "
        "'adaptive', 'rollback' and 'lossy-forward' the others go on without it; --max-restarts 0 leaves its place "
        "vacant.",
    )
    group.add(
        "--lost-shard",
        choices=(*LOST_SHARDS, QUICKEST),
        help="With --strategy shrink or rollback, and with auto if no process takes a lost rank's place: the others "
        "compute its batches ('redistribute'), or nobody does ('drop', not exact). With auto and a pipeline: its peers "
        "share its microbatches ('reroute'). With auto, 'quickest' is 'reroute' for pipelines, else 'redistribute'.",
    )
    group.add(
        "--snapshot-every",
        type=number(int, 1),
        metavar="K",
        help="With --strategy snapshot, and auto: steps between two copies of the state in host memory.",
    )
    group.add(
        "--allow-inexact",
        action="store_true",
        help="Allow strategies that do not lead to the bits of a run that never failed.",
    )
    group.add(
        "--require-exact",
        action="store_const",
        const="on",
        help="End the job once it is known to be not exact.",
    )
    group.add(
        "--rehearse",
        choices=("start", "always", "off"),
        help="A process that is no rank does some of a rank's steps again, from a checkpoint and the log, and compares "
        "them with what the rank has done: each rank twice at the 'start', or 'always' one after the other. What "
        "differs is named (docs/exactness.md). Default: start, if there is a spare.",
    )
    group.add(
        "--max-restarts",
        type=number(int, 0),
        default=os.environ.get("PET_MAX_RESTARTS"),
        metavar="N",
        help=f"How many dead processes this launcher replaces in total (default {REPLACEMENTS_DEFAULT}). If a process "
        "ends by itself three times before a new version is reached, the job ends in any case. For a script without a "
        "session, as in torchrun: how many times all ranks are restarted (default 0).",
    )
    group.add(
        "--retry-exceptions",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="How many times all ranks do a step again that has raised an exception (default 0: the job ends with the "
        "exception). The same exception twice in one step ends the job.",
    )


def _add_adaptive(group: _Group) -> None:
    group.add(
        "--exact-gradients",
        choices=ON_OFF,
        help="'off' adds the gradients of a lost rank's microbatches to a rank's own. That saves memory, and is not "
        "exact (default on).",
    )
    group.add(
        "--split-backward",
        choices=ON_OFF,
        help="While ranks are missing, gradients of weights are computed after those of inputs, if the first step "
        "shows that the bits are the same (default on).",
    )
    group.add(
        "--adaptive-memory",
        type=number(float, 1),
        metavar="FACTOR",
        help="How many times the activations of the schedule a rank may hold while others are missing (default 1; with "
        "2 hardly any gaps are left).",
    )
    group.add(
        "--staggered",
        choices=ON_OFF,
        help="A rank does not wait for other stages before it begins the next step. If the norm of all gradients then "
        "demands clipping, the step is taken back (default off).",
    )


def _add_checkpoints(group: _Group) -> None:
    group.add(
        "--checkpoint-dir",
        type=argument(checkpoint_place),
        metavar="DIR",
        help="The directory of the ranks' checkpoints, or s3://BUCKET/PREFIX, gs://…, az://… (default with "
        "--standalone: ./swift-NAME/checkpoints).",
    )
    group.add(
        "--from-job",
        type=argument(job_called),
        metavar="NAME",
        help="Begin with the newest complete checkpoint, and the step, of another job of the same coordinator, in the "
        "same --checkpoint-dir. A job that has checkpoints of its own goes on from those.",
    )
    group.add(
        "--from-version",
        type=number(int, 0),
        metavar="V",
        help="With --from-job: begin with the checkpoint of this version instead of the newest.",
    )
    group.add(
        "--from-checkpoints",
        type=argument(checkpoint_place),
        metavar="DIR",
        help="If the coordinator does not know the job, because its state was lost: go on at the newest complete "
        "checkpoint of the job in this directory (or s3://…), that of an earlier --checkpoint-dir."
        " See docs/operation.md.",
    )
    group.add(
        "--sigterm-checkpoint-s",
        type=number(float, 0, 86400),
        default=LAST_CHECKPOINT_S_DEFAULT,
        metavar="SECONDS",
        help="How long SIGTERM to a running job waits for a checkpoint before it ends the ranks "
        "(default %(default)g; 0: no checkpoint).",
    )


def _add_processes(group: _Group) -> None:
    spares = "Warm processes kept to replace a dead rank (default 1)."
    group.add("--spares", type=number(int, 0), default=1, help=spares)
    group.add(
        "--warm-up",
        action="store_true",
        help="Keep one more process for each rank, which runs the script before it is needed, as far as one forward "
        "and backward from logged tensors: kernels, allocators and imports are warm then. Meanwhile it takes as much "
        "memory as a rank (docs/operation.md).",
    )
    group.add(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE,MODULE...",
        help="Modules to import before a rank's script: once, in the process that ranks are forked from, or by each "
        f"spare while it waits. These are imported anyway: {PRELOAD_DEFAULT.replace(',', ', ')}.",
    )
    group.add(
        "--preload-only",
        metavar="MODULE,MODULE...",
        help="Import these modules only, in place of those that are imported anyway.",
    )
    group.add(
        "--start-method",
        choices=START_METHODS,
        default=os.environ.get("PET_START_METHOD", "fork"),
        help="How processes start: 'fork' takes milliseconds and shares the memory of imported modules; 'spawn' makes "
        "fresh interpreters, for modules of --preload that must not be forked. If a module starts a thread or keeps a "
        "file open, processes are spawned in any case (default fork).",
    )
    group.add(
        "--health-check",
        metavar="COMMAND",
        help="Run this for a place of this machine ($LOCAL_RANK) before any process gets it, at the start and after a "
        "loss. It is started without a shell. With an exit code other than 0, no process gets the place "
        "(docs/operation.md).",
    )
    group.add(
        "--health-check-s",
        type=float,
        default=LIMIT_S_DEFAULT,
        metavar="SECONDS",
        help="How long one health check may take (default %(default)g). It is ended then, and has failed.",
    )


# As in torchrun, each of its flags has a variable: $PET_NPROC_PER_NODE for --nproc-per-node.


def _is_set(name: str) -> bool:
    variable = f"PET_{name.upper()}"
    try:
        return bool(int(os.environ.get(variable, "0")))
    except ValueError:
        raise UsageError(f"run: {variable}={os.environ[variable]}: 0 or 1") from None


def _add_torchrun(group: _Group) -> None:
    def add(flag: str, metavar: str, words: str, default: Any = None, *short: str, **options: Any) -> None:
        default = os.environ.get(f"PET_{flag[2:].replace('-', '_').upper()}", default)
        group.add(*short, flag, metavar=metavar, default=default, help=words, **options)

    add("--nnodes", "N|MIN:MAX", "Number of machines, or how many at least and at most.", "1:1")
    add("--nproc-per-node", "N", "Ranks on each machine: a number, auto, cpu, gpu or xpu.", "1")
    as_module = "SCRIPT is a module's name, run as by 'python -m'."
    group.add("-m", "--module", action="store_true", default=_is_set("module"), help=as_module)
    add("--rdzv-id", "ID", "The job's id, the same on all machines.", "none")
    times = "join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, timeout"
    add("--rdzv-conf", "KEY=VALUE,...", f"Times of the meeting in seconds: {times}.", "")
    add("--rdzv-backend", "NAME", "static or c10d. Machines meet at the coordinator.", "static")
    add("--rdzv-endpoint", "HOST:PORT", "The first machine, where machines have numbers.", "")
    add("--node-rank", "N", "This machine's number. Without numbers, the coordinator decides.", type=int)
    add("--master-addr", "HOST", "The first machine, where machines have numbers.")
    add(
        "--master-port",
        "PORT",
        "Of the first machine's store for trainers (default 29500).",
        type=number(int, 0, 65535),
    )
    add("--local-addr", "HOST", "This machine's name or address, as others reach it.")
    add("--role", "NAME", "Name of the ranks' role.", "default")
    add("--log-dir", "DIR", "Directory for the ranks' redirected output.")
    streams = "1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2"
    add("--redirects", "WHICH", f"Write output of ranks to files: {streams}.", "0", "-r")
    add("--local-ranks-filter", "N,N...", "Show the output of these local ranks only.", "")
    add("--monitor-interval", "SECONDS", "Time between two looks at the job.", 0.1, type=float)
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    add("--signals-to-handle", "NAME,NAME...", "Signals that end the job (default %(default)s).", signals)
    grace = f"Time between SIGTERM and SIGKILL of a rank (default {GRACE_S_DEFAULT:g})."
    add("--shutdown-timeout", "SECONDS", grace, type=number(int, 0, SECONDS_MAX))


REFUSED = {
    "--no-python": "ranks start as warm Python processes, so the script must be Python",
    "--run-path": "the script is always run inside a warm interpreter; leave the flag out",
    "--logs-specs": "use --log-dir with --redirects",
    "--numa-binding": "start swift-ft run under numactl",
    "--duplicate-stdout-filters": "use --log-dir with --redirects",
    "--duplicate-stderr-filters": "use --log-dir with --redirects",
    "--tee": "use --log-dir with --redirects",
    "--event-log-handler": "the launcher's events go to $SWIFT_EVENTS",
    "--virtual-local-rank": "the script chooses its device by LOCAL_RANK",
}
"""Flags that make no sense with children of this launcher, or are not implemented; and what to do."""
_SWITCHES = ("--no-python", "--run-path", "--virtual-local-rank")
_NOTHING = {"--tee": "0", "--event-log-handler": "null"}
"""Values that ask for nothing, as scripts give them."""


def _add_refused(group: _Group) -> None:
    for flag, way in REFUSED.items():
        name = flag[2:].replace("-", "_")
        if flag in _SWITCHES:
            group.add(flag, action="store_true", default=_is_set(name), help=way)
        else:
            short = ("-t",) if flag == "--tee" else ()
            group.add(*short, flag, metavar="X", default=os.environ.get(f"PET_{name.upper()}"), help=way)


def _check_refused(args: argparse.Namespace) -> None:
    for flag, way in REFUSED.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value and value != _NOTHING.get(flag):
            raise UsageError(f"run: not supported: {flag}: {way}")


# The rendezvous of a job's machines, and the job's name, from the flags of `swift-ft run`.

STORE_PORT = 29500
STORE_TIMEOUT_S = 900.0
"""torchrun's."""
SECONDS_MAX = 86400.0 * 7
_TYPED = "abcdefghjkmnpqrstuvwxyz23456789"
"""Characters that are not mistaken for others."""
# torchrun's flags for the place where machines meet, or for this machine's number.
_PLACES = ("rdzv_endpoint", "node_rank", "master_addr", "master_port")


class Meeting(enum.Enum):
    ALONE = "alone"
    """One machine: its store listens on loopback only."""
    NUMBERED = "numbered"
    """By --node-rank."""
    COORDINATOR = "coordinator"
    """They meet at the coordinator."""


def job_name(args: argparse.Namespace) -> str:
    """Returns the job's name. Raises UsageError if only the rendezvous id is given, and is no name."""
    try:
        return args.job or job_called(args.rdzv_id)
    except UsageError as error:
        raise UsageError(f"run: --rdzv-id: {error}; or give another one with --job") from None


def name_of(script: str) -> str:
    name = os.path.basename(script).removesuffix(".py").rpartition(".")[2].lower()
    return re.sub("[^a-z0-9._-]", "-", name).lstrip("._-")[:40] or "job"


def made_up_name(script: str) -> str:
    """Returns a new random name, short enough to be typed: train-k7f3ab."""
    return f"{name_of(script)}-{''.join(secrets.choice(_TYPED) for _ in range(6))}"


def choose_meeting(args: argparse.Namespace) -> Meeting:
    """Returns how machines meet. Numbered machines use torchrun's static rendezvous. All others meet at the
    coordinator, because torch's own c10d would run on one of them, and end with it. Raises UsageError if the flags are
    insufficient."""
    max_nodes = machines_of(args.nnodes)[1]
    if args.rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"run: not supported: --rdzv-backend {args.rdzv_backend}: leave it out, machines meet at the coordinator"
        )
    static = args.rdzv_backend == "static"
    where = (args.rdzv_endpoint, args.master_addr, args.master_port)
    numbered = static and (args.node_rank is not None or any(where))
    if args.standalone or (max_nodes == 1 and not (numbered and any(where))):
        meeting = Meeting.ALONE
        if args.standalone:  # the same command goes on in the same directory
            args.rdzv_id = args.job or (
                name_of(args.training_script) if args.rdzv_id == "none" else args.rdzv_id
            )
        elif args.rdzv_id == "none" or args.job is not None:
            args.rdzv_id = args.job or made_up_name(args.training_script)
    elif args.rdzv_id == "none" and args.job is None:
        raise UsageError("run: name the job, the same on all machines: --job NAME or --rdzv-id ID")
    else:
        meeting = Meeting.NUMBERED if numbered else Meeting.COORDINATOR
        unneeded = [name for name in _PLACES if getattr(args, name) is not None and getattr(args, name) != ""]
        if meeting is Meeting.COORDINATOR and unneeded:
            flags = ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in unneeded)
            tell(f"machines meet at the coordinator: nobody needs {flags}")
    return meeting


def machines_of(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    found = whole_number(least), whole_number(most or least)
    if found[0] is None or found[1] is None or not 0 < found[0] <= found[1]:
        raise UsageError(f"run: --nnodes {text}: a number of machines, or MIN:MAX")
    return found[0], found[1]


def ranks_of(text: str) -> int:
    number = whole_number(text)
    if text in ("auto", "cpu", "gpu", "xpu"):
        run = import_with_extra("torch.distributed.run", "run", "train")
        try:
            number = run.determine_local_world_size(text)
        except ValueError as error:
            raise UsageError(f"run: --nproc-per-node {text}: {error}") from error
    if not number:
        raise UsageError(f"run: --nproc-per-node {text}: 1 or more, or auto, cpu, gpu or xpu")
    return number


def endpoint_of(args: argparse.Namespace) -> tuple[str, int]:
    if not args.rdzv_endpoint:
        return args.master_addr or LOOPBACK, args.master_port or STORE_PORT
    if ":" not in args.rdzv_endpoint:
        return args.rdzv_endpoint, STORE_PORT
    host, port = host_and_port(args.rdzv_endpoint, "run: --rdzv-endpoint")
    return host.strip("[]"), port


def configs_of(text: str) -> dict[str, str]:
    configs = {}
    for word in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in word.partition("="))
        if not key or not value:
            raise ValueError(f"--rdzv-conf {word}: write KEY=VALUE,KEY=VALUE...")
        configs[key] = value
    return configs


def signals_of(text: str) -> list[signal.Signals]:
    signals = []
    for name in map(str.strip, text.split(",")):
        if name not in signal.Signals.__members__:
            raise ValueError(f"--signals-to-handle: no signal {name!r}")
        signals.append(signal.Signals[name])
        if signals[-1] in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"--signals-to-handle: no process can handle {name}")
    return signals


def numbers_of(text: str) -> frozenset[int] | None:
    numbers = [whole_number(word) for word in text.split(",") if text]
    if None in numbers:
        raise UsageError(f"run: --local-ranks-filter {text}: numbers with commas between them, such as 0,1")
    return frozenset(number for number in numbers if number is not None) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    config: LaunchSettings
    made_up: bool
    """The job's name was not given explicitly."""
    meeting: Meeting
    terms: Terms
    job: RankProgram
    output: Output
    spare_count: int
    warms_up: bool
    """Spares run the script before they are needed."""
    preload: str
    fork: bool
    grace_s: float
    last_checkpoint_s: float
    health_check: HealthCheck | None
    around: Callable[[Callable[[], Outcome]], Outcome] | None
    """(--failures) Runs the job, with its failures."""
    standalone: Standalone | None
    """The services of the job's own."""


def make_plan(argv: Sequence[str]) -> LaunchPlan:
    args = make_parser().parse_args(argv)
    _check(args)
    meeting = choose_meeting(args)
    try:
        streams = Std.from_text(args.redirects)
        configs = configs_of(args.rdzv_conf)
        terms = Terms.of(configs)
        timeout_s = seconds_of({"timeout": STORE_TIMEOUT_S, **configs}, "timeout", SECONDS_MAX)
        signals = signals_of(args.signals_to_handle)
    except ValueError as error:
        raise UsageError(f"run: {error}") from error
    shown = numbers_of(args.local_ranks_filter)
    nodes = machines_of(args.nnodes)
    if meeting is Meeting.NUMBERED and not 0 <= (args.node_rank or 0) < nodes[1]:
        raise UsageError(f"run: --node-rank {args.node_rank}: 0 to {nodes[1] - 1}")
    name = job_name(args)
    standalone = Standalone.of(name) if args.standalone else None
    adopted = args.from_checkpoints or ""
    home = adopted.removesuffix(f"/{name}")  # it may name the job's own folder
    checkpoints = args.checkpoint_dir or (standalone and standalone.checkpoints) or home
    nproc = ranks_of(args.nproc_per_node)
    config = LaunchSettings(
        nproc_per_node=nproc,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        run_id=args.rdzv_id,
        role=args.role,
        endpoint=endpoint_of(args),
        node_rank=args.node_rank or 0,
        timeout_s=timeout_s,
        replacements=REPLACEMENTS_DEFAULT if args.max_restarts is None else args.max_restarts,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        local_addr=args.local_addr,
        signals=signals,
    )
    redirects = streams if isinstance(streams, dict) else dict.fromkeys(range(nproc), streams)
    _tell_ranks(args)
    failing = (
        import_with_extra("swift_ft.lab.failures.injector", "run: --failures", "lab")
        if args.failures
        else None
    )
    failures = failing.schedule_of(args, config) if failing else None
    run_dir = make_run_dir(args.log_dir, config.run_id) if args.log_dir or any(redirects.values()) else None
    job = RankProgram(
        script=args.training_script,
        module=args.module,
        args=args.training_script_args,
        cwd=os.getcwd(),
        coordinator=args.coordinator or "",
        name=name,
        checkpoint_dir=checkpoint_place(str(checkpoints)) if checkpoints else None,
        run=uuid.uuid4().hex[:16],
        retry_exceptions=args.retry_exceptions,
        from_job=args.from_job or "",
        from_version=args.from_version,
        from_checkpoints=adopted,
    )
    _check_preload([args.preload_only or "", *args.preload], job.sys_path0())
    if args.coordinator:
        _check_line(args.coordinator)
    return LaunchPlan(
        config=config,
        made_up=args.job is None,
        meeting=meeting,
        terms=terms,
        job=job,
        output=Output(redirects=redirects, shown=shown, run_dir=run_dir),
        spare_count=args.spares,
        warms_up=args.warm_up,
        preload=",".join(
            [PRELOAD_DEFAULT if args.preload_only is None else args.preload_only, *args.preload]
        ),
        fork=args.start_method == "fork",
        grace_s=GRACE_S_DEFAULT if args.shutdown_timeout is None else args.shutdown_timeout,
        last_checkpoint_s=args.sigterm_checkpoint_s,
        health_check=None
        if args.health_check is None
        else HealthCheck.parse(args.health_check, args.health_check_s),
        around=partial(failing.around, failing.planned(failures, run_dir, args.log_dir, job))
        if failing
        else None,
        standalone=standalone,
    )


def _tell_ranks(args: argparse.Namespace) -> None:
    """Writes the given flags to the environment, where `Session.from_env` reads them."""
    os.environ[ENV_SPARES] = str(args.spares)
    if args.allow_inexact:
        os.environ[ENV_ALLOW_INEXACT] = "1"
    for setting, variable in LAUNCHER_SETTINGS.items():
        value = getattr(args, setting)
        if value is not None:
            os.environ[variable] = str(value)
    if "OMP_NUM_THREADS" not in os.environ and args.nproc_per_node != "1":
        os.environ["OMP_NUM_THREADS"] = "1"


def _check(args: argparse.Namespace) -> None:
    _check_refused(args)
    if args.start_method not in START_METHODS:
        raise UsageError(f"run: --start-method {args.start_method}: {' or '.join(START_METHODS)}")
    if args.standalone and args.coordinator:
        raise UsageError("run: --standalone starts a coordinator of its own: leave one of the two flags out")
    if not args.standalone:
        args.coordinator = args.coordinator or os.environ.get("SWIFT_COORDINATOR")
        if not args.coordinator:
            raise UsageError(
                "run: --coordinator HOST:PORT is needed (or the variable SWIFT_COORDINATOR); --standalone starts one "
                "for a job of this machine alone"
            )
        for address in args.coordinator.split(","):
            host_and_port(address, "run: --coordinator")
    if not 0 < args.monitor_interval <= SECONDS_MAX:
        raise UsageError(
            f"run: --monitor-interval {args.monitor_interval}: seconds, more than 0, at most {SECONDS_MAX:g}"
        )
    if args.standalone and args.failures:
        raise UsageError(
            "run: --failures makes services fail as well: start a coordinator and a log server, and leave --standalone "
            "out"
        )
    if args.strategy and (problem := lost_shard_problem(args.strategy, args.lost_shard or "")):
        raise UsageError(f"run: --lost-shard {args.lost_shard} with --strategy {args.strategy}: {problem}")
    _check_origin(args)
    if args.module:
        top = args.training_script.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise UsageError(f"run: no module named {top}")
    elif not os.path.exists(args.training_script):
        raise UsageError(f"run: {args.training_script}: there is no such script")


def _check_line(coordinator: str) -> None:
    """Raises UsageError if no process of the job could connect, so that none is started. The coordinator need not
    answer yet."""
    from swift_ft.credentials import Credentials  # imported here because grpc takes long to import

    try:
        Credentials.from_environment().check(coordinator)
    except UsageError as error:
        raise UsageError(f"run: --coordinator: {error}") from None


def _check_preload(lists: Iterable[str], path0: str) -> None:
    """Raises UsageError for an unknown module. Otherwise a typing error would stay unnoticed and slow replacements
    down."""
    for name in filter(None, ",".join(lists).split(",")):
        top = name.partition(".")[0]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, [path0, *sys.path]) is None:
            raise UsageError(f"run: --preload {name}: there is no such module")


def _check_origin(args: argparse.Namespace) -> None:
    adopted = args.from_checkpoints
    if adopted and not scheme_of(adopted) and not os.path.isdir(adopted):
        raise UsageError(f"run: --from-checkpoints {adopted}: there is no such directory")
    if adopted and args.from_job:
        raise UsageError(
            "run: --from-checkpoints goes on with this job's own checkpoints, --from-job begins with another one's: "
            "leave one of the two flags out"
        )
    if args.from_version is not None and not args.from_job:
        raise UsageError(f"run: --from-version {args.from_version}: name the job as well, with --from-job")
    if args.from_job is not None and args.from_job == args.job:
        raise UsageError(
            f"run: --from-job {args.from_job}: a job goes on from its own checkpoints; leave the flag out, or name "
            "another job with --job"
        )


def main(argv: Sequence[str]) -> int:
    events.configure("launcher")
    try:
        plan = make_plan(argv)
        if plan.standalone is not None:
            plan = replace(plan, standalone=plan.standalone.locked())
        elif plan.made_up:
            tell(f"this is job {plan.job.name} (--job gives it another name)")
        elif "~" in plan.job.name:
            tell(
                f"this is job {plan.job.name} (a / in a name is written ~, because directories have the name, too)"
            )
        # torch and gRPC are imported here, after all usage errors.
        run = import_with_extra("swift_ft.launch.run", "run", "train").run
        outcome = run(plan) if plan.around is None else plan.around(lambda: run(plan))
    except SwiftError as error:
        tell(error)
        return error.exit_code
    if outcome.line:
        tell(outcome.line, who="")
    events.emit("launcher_end", code=outcome.exit_code)
    return outcome.exit_code
