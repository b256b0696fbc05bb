"""`swift-ft run`: flags -> LaunchPlan -> run."""

import argparse
import enum
import importlib.util
import math
import os
import re
import secrets
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from typing import NoReturn

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import Std

from swift_ft import events
from swift_ft.cli_parser import import_with_extra, local_directory, only_finite
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.launch.agent import ReplacingAgent
from swift_ft.launch.children import Nursery, SignalGate, Signalled
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.health_check import LIMIT_S_DEFAULT, HealthCheck
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.ranks import Output, RankProgram, make_run_dir
from swift_ft.launch.rendezvous import (
    LOOPBACK,
    LoopbackRendezvous,
    MetRendezvous,
    NotNeeded,
    PlacedRendezvous,
    Rendezvous,
    Terms,
)
from swift_ft.planner.settings import LOST_SHARDS, QUICKEST, STRATEGIES, lost_shard_problem
from swift_ft.text import ENV_ALLOW_INEXACT, ENV_SPARES, JOB_GRAMMAR, JOB_PATTERN, LAUNCHER_SETTINGS, tell

try:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes
except ImportError as error:  # none of these is promised
    raise ServiceError(
        f"torch {torch.__version__}: {error}: install a version of docs/compatibility.md, such as 2.13"
    ) from error

# Recovery flags of `swift-ft run`, which reach the session of each rank through its environment.

REPLACEMENTS_DEFAULT = 100
ON_OFF = ("on", "off")


def _adder(ours: "argparse._ArgumentGroup") -> Callable[..., object]:
    """Returns a function that adds a flag, also in torchrun's other spelling (--warm_up)."""
    return lambda flag, **options: ours.add_argument(flag, f"--{flag[2:].replace('-', '_')}", **options)


def add_recovery_flags(ours: "argparse._ArgumentGroup") -> None:
    add = _adder(ours)
    ours.add_argument(
        "--rehearse",
        choices=("start", "always", "off"),
        help="A process that is no rank does some of a rank's steps again, from a checkpoint and the log, and compares "
        "them with what the rank has done: each rank twice at the 'start', or 'always' one after the other. What "
        "differs is named (docs/rehearsals.md). Default: start, if there is a spare.",
    )
    add(
        "--require-exact",
        action="store_const",
        const="on",
        help="End the job once it is known to be not exact.",
    )
    ours.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="How a lost rank's state is restored (docs/strategies.md), if the script does not say it. With 'shrink', "
        "'adaptive', 'rollback' and 'lossy-forward' the others go on without it; --max-restarts 0 leaves its place "
        "vacant.",
    )
    add(
        "--lost-shard",
        choices=(*LOST_SHARDS, QUICKEST),
        help="With --strategy shrink or rollback, and with auto if no process takes a lost rank's place: the others "
        "compute its batches ('redistribute'), or nobody does ('drop', not exact). With auto and a pipeline: its peers "
        "share its microbatches ('reroute'). With auto, 'quickest' is 'reroute' for pipelines, else 'redistribute'.",
    )
    add(
        "--snapshot-every",
        type=int,
        metavar="K",
        help="With --strategy snapshot, and auto: steps between two copies of the state in host memory.",
    )
    _add_adaptive(ours)
    add(
        "--allow-inexact",
        action="store_true",
        help="Allow strategies that do not lead to the bits of a run that never failed.",
    )
    add(
        "--max-restarts",
        type=int,
        default=int(os.environ.get("PET_MAX_RESTARTS", REPLACEMENTS_DEFAULT)),
        metavar="N",
        help="How many dead processes this launcher replaces in total (default %(default)s). If a process ends by "
        "itself three times before a new version is reached, the job ends in any case.",
    )
    ours.add_argument(
        "--retry-exceptions",
        type=int,
        default=0,
        metavar="N",
        help="How many times all ranks do a step again that has raised an exception (default 0: the job ends with the "
        "exception). The same exception twice in one step ends the job.",
    )


def _add_adaptive(ours: "argparse._ArgumentGroup") -> None:
    add = _adder(ours)
    add(
        "--exact-gradients",
        choices=ON_OFF,
        help="With --strategy adaptive (or auto with --lost-shard reroute): 'off' adds the gradients of a lost rank's "
        "microbatches to a rank's own. That saves memory, and is not exact (default on).",
    )
    add(
        "--split-backward",
        choices=ON_OFF,
        help="With the same: while ranks are missing, gradients of weights are computed after those of inputs, if the "
        "first step shows that the bits are the same (default on).",
    )
    add(
        "--adaptive-memory",
        type=float,
        metavar="FACTOR",
        help="With the same: how many times the activations of the schedule a rank may hold while others are missing "
        "(default 1; with 2 hardly any gaps are left).",
    )
    ours.add_argument(
        "--staggered",
        choices=ON_OFF,
        help="With --strategy adaptive: a rank does not wait for other stages before it begins the next step. If the "
        "norm of all gradients then demands clipping, the step is taken back (default off).",
    )


def check_recovery_flags(args: argparse.Namespace) -> None:
    for flag, count in (("max-restarts", args.max_restarts), ("retry-exceptions", args.retry_exceptions)):
        if count < 0:
            raise UsageError(f"run: --{flag} {count}: 0 or more")
    if args.snapshot_every is not None and args.snapshot_every < 1:
        raise UsageError(f"run: --snapshot-every {args.snapshot_every}: 1 or more")
    memory = args.adaptive_memory
    if memory is not None and not (math.isfinite(memory) and memory >= 1):
        raise UsageError(f"run: --adaptive-memory {memory}: 1 or more")
    if args.strategy and (problem := lost_shard_problem(args.strategy, args.lost_shard or "")):
        raise UsageError(f"run: --lost-shard {args.lost_shard} with --strategy {args.strategy}: {problem}")


def tell_sessions(args: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    """Writes the given flags to the environment, where `Session.from_env` reads them."""
    environment[ENV_SPARES] = str(args.spares)
    if args.allow_inexact:
        environment[ENV_ALLOW_INEXACT] = "1"
    for setting, variable in LAUNCHER_SETTINGS.items():
        value = getattr(args, setting)
        if value is not None:
            environment[variable] = str(value)


# The flags of `swift-ft run`: torchrun's, and swift's own in addition.

DESCRIPTION = "Starts the ranks of a training job, keeps warm spares, and replaces a rank that dies."
START_METHODS = ("fork", "spawn")
GRACE_S_DEFAULT = 5.0
LAST_CHECKPOINT_S_DEFAULT = 15.0
"""With the grace period, less than the 30 s that schedulers leave between SIGTERM and SIGKILL."""
# Some of these are otherwise imported only at first use, which would delay a recovery.
PRELOAD_DEFAULT = (
    "torch,torch.distributed,torch.distributed.pipelining,torch.distributed.checkpoint,"
    "torch.utils.serialization.config,fsspec.core,grpc,grpc._channel,grpc.experimental,"
    "swift_ft.rpc.client,swift_ft.train.session"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose help begins with a description of the command, and whose errors have one line."""

    def format_help(self) -> str:
        return f"{DESCRIPTION}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"run: {message} (see swift-ft run --help)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="swift-ft run", parents=[get_args_parser()], conflict_handler="resolve")
    only_finite(parser)
    ours = parser.add_argument_group("swift")
    add = _adder(ours)
    ours.add_argument(
        "--coordinator",
        default=os.environ.get("SWIFT_COORDINATOR"),
        metavar="HOST:PORT",
        help="The job's coordinator (required; default: $SWIFT_COORDINATOR).",
    )
    ours.add_argument(
        "--job",
        metavar="NAME",
        help="The job's name. Default: made from the rendezvous id; on one machine without one, from the script's name "
        "and six letters. A name that was made up is printed.",
    )
    ours.add_argument(
        "--spares", type=int, default=1, help="Warm processes kept to replace a dead rank (default 1)."
    )
    add(
        "--warm-up",
        action="store_true",
        help="Keep one more process for each rank, which runs the script before it is needed, as far as one forward "
        "and backward from logged tensors: kernels, allocators and imports are warm then. Meanwhile it takes as much "
        "memory as a rank (docs/operation.md).",
    )
    ours.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE,MODULE...",
        help="Modules to import before a rank's script: once, in the process that ranks are forked from, or by each "
        f"spare while it waits. These are imported anyway: {PRELOAD_DEFAULT.replace(',', ', ')}.",
    )
    add(
        "--preload-only",
        metavar="MODULE,MODULE...",
        help="Import these modules only, in place of those that are imported anyway.",
    )
    add(
        "--start-method",
        choices=START_METHODS,
        default=os.environ.get("PET_START_METHOD", "fork"),
        help="How processes start: 'fork' takes milliseconds and shares the memory of imported modules; 'spawn' makes "
        "fresh interpreters, for modules of --preload that must not be forked. If a module starts a thread or keeps a "
        "file open, processes are spawned in any case (default fork).",
    )
    add_recovery_flags(ours)
    _add_health_check(ours)
    _add_checkpoints(ours)
    _add_failures(ours)
    return parser


def _add_failures(ours: "argparse._ArgumentGroup") -> None:
    ours.add_argument(
        "--failures",
        metavar="FILE|SPEC",
        help="Make these failures happen while the job runs: at coordinates (rank=2,step=17,phase=backward), drawn "
        "(every=weibull,shape=0.6,mtbf=40,until=200,seed=7), or by a trace. What was injected, and who noticed it "
        "after how long, is printed at the end and is in failures.json (docs/failures.md).",
    )


def _add_health_check(ours: "argparse._ArgumentGroup") -> None:
    add = _adder(ours)
    add(
        "--health-check",
        metavar="COMMAND",
        help="Run this for a place of this machine ($LOCAL_RANK) before any process gets it, at the start and after a "
        "loss. It is started without a shell. With an exit code other than 0, no process gets the place "
        "(docs/operation.md).",
    )
    add(
        "--health-check-s",
        type=float,
        default=LIMIT_S_DEFAULT,
        metavar="SECONDS",
        help="How long one health check may take (default %(default)g). It is ended then, and has failed.",
    )


def _add_checkpoints(ours: "argparse._ArgumentGroup") -> None:
    add = _adder(ours)
    ours.add_argument(
        "--checkpoint-dir",
        type=local_directory,
        metavar="DIR",
        help="The directory of the ranks' checkpoints.",
    )
    add(
        "--from-job",
        metavar="NAME",
        help="Begin with the newest complete checkpoint, and the step, of another job of the same coordinator, in the "
        "same --checkpoint-dir. A job that has checkpoints of its own goes on from those.",
    )
    add(
        "--from-version",
        type=int,
        metavar="V",
        help="With --from-job: begin with the checkpoint of this version instead of the newest.",
    )
    add(
        "--sigterm-checkpoint-s",
        type=float,
        default=LAST_CHECKPOINT_S_DEFAULT,
        metavar="SECONDS",
        help="How long SIGTERM to a running job waits for a checkpoint before it ends the ranks "
        "(default %(default)g; 0: no checkpoint).",
    )


# The rendezvous of a job's machines, and the job's name, from the flags of `swift-ft run`.

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


def job_name(run_id: str) -> str:
    """Returns a job name derived from a rendezvous id: characters that the grammar forbids become dashes."""
    return re.sub(r"[^a-z0-9._-]", "-", run_id.lower()).lstrip("._-")[:64] or "job"


def made_up_name(script: str) -> str:
    """Returns a new random name, short enough to be typed: train-k7f3ab."""
    stem = job_name(os.path.basename(script).removesuffix(".py").rpartition(".")[2])
    return f"{stem[:40]}-{''.join(secrets.choice(_TYPED) for _ in range(6))}"


def choose_meeting(args: argparse.Namespace) -> Meeting:
    """Returns how machines meet. Numbered machines use torchrun's static rendezvous. All others meet at the
    coordinator, because torch's own c10d would run on one of them, and end with it. Raises UsageError if the flags are
    insufficient."""
    try:
        max_nodes = parse_min_max_nnodes(args.nnodes)[1]
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"run: --nnodes {args.nnodes}: a number, or MIN:MAX") from error
    if args.rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"run: not supported: --rdzv-backend {args.rdzv_backend}: leave it out, machines meet at the coordinator"
        )
    static = args.rdzv_backend == "static"
    where = (args.rdzv_endpoint, args.master_addr, args.master_port)
    numbered = static and (args.node_rank is not None or any(where))
    if args.standalone or (max_nodes == 1 and not (numbered and any(where))):
        meeting = Meeting.ALONE
        if args.standalone or args.rdzv_id == "none" or args.job is not None:
            args.rdzv_id = args.job or made_up_name(args.training_script)
    elif args.rdzv_id == "none" and args.job is None:
        raise UsageError("run: name the job, the same on all machines: --job NAME or --rdzv-id ID")
    else:
        meeting = Meeting.NUMBERED if numbered else Meeting.COORDINATOR
        unneeded = [name for name in _PLACES if getattr(args, name) is not None and getattr(args, name) != ""]
        if meeting is Meeting.COORDINATOR and unneeded:
            flags = ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in unneeded)
            tell(f"machines meet at the coordinator: nobody needs {flags}")
    args.node_rank = args.node_rank or 0
    args.master_addr = args.master_addr or LOOPBACK
    args.master_port = args.master_port or 29500
    if not static:  # otherwise torch warns of them, whether they were given or not
        del args.node_rank, args.master_addr
    return meeting


# torchrun's flags that make no sense with children of this launcher, or are not implemented.
_UNSUPPORTED = {
    "no_python": "--no-python: ranks start as warm Python processes, so the script must be Python",
    "run_path": "--run-path: the script is always run inside a warm interpreter; leave the flag out",
    "logs_specs": "--logs-specs: use --log-dir with --redirects",
    "numa_binding": "--numa-binding: start swift-ft run under numactl",
    "duplicate_stdout_filters": "--duplicate-stdout-filters: use --log-dir with --redirects",
    "duplicate_stderr_filters": "--duplicate-stderr-filters: use --log-dir with --redirects",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    config: LaunchConfig
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
    signals: list[signal.Signals]
    around: Callable[[Callable[[], Outcome]], Outcome] | None
    """(--failures) Runs the job, with its failures."""


def make_plan(argv: Sequence[str]) -> LaunchPlan:
    parser = make_parser()
    # Machines are numbered only if these were given; torch 2.11 has a port by default.
    unset = {
        name: os.environ.get(f"PET_{name.upper()}") for name in ("node_rank", "master_addr", "master_port")
    }
    parser.set_defaults(**unset)
    args = parser.parse_args(argv)
    _check(args)
    meeting = choose_meeting(args)
    # torch's own log handling would create an unused directory.
    log_dir, args.log_dir = args.log_dir, os.devnull
    _tell_ranks(args)
    try:
        config, _, _ = config_from_args(args)
        streams = Std.from_str(args.redirects)
        local_ranks = range(config.nproc_per_node)
        redirects = streams if isinstance(streams, dict) else dict.fromkeys(local_ranks, streams)
        terms = Terms.of(config.rdzv_configs)
        float(config.rdzv_configs["timeout"])  # validates the timeout of a later rendezvous
        signals = [signal.Signals[name.strip()] for name in config.signals_to_handle.split(",")]
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(f"run: {error}") from error
    except KeyError as error:
        raise UsageError(f"run: --signals-to-handle: no signal {error}") from error
    if config.nproc_per_node < 1:
        raise UsageError(f"run: --nproc-per-node {args.nproc_per_node}: 1 or more")
    failing = (
        import_with_extra("swift_ft.lab.failures.injector", "run: --failures", "lab")
        if args.failures
        else None
    )
    failures = failing.schedule_of(args, config) if failing else None
    shown = None
    if args.local_ranks_filter:
        shown = frozenset(int(rank) for rank in args.local_ranks_filter.split(","))
    run_dir = make_run_dir(log_dir, config.run_id) if log_dir or any(redirects.values()) else None
    job = RankProgram(
        script=args.training_script,
        module=args.module,
        args=args.training_script_args,
        cwd=os.getcwd(),
        coordinator=args.coordinator,
        name=args.job or job_name(config.run_id),
        checkpoint_dir=None if args.checkpoint_dir is None else os.path.abspath(args.checkpoint_dir),
        run=uuid.uuid4().hex[:16],
        retry_exceptions=args.retry_exceptions,
        from_job=args.from_job or "",
        from_version=args.from_version,
    )
    _check_preload([args.preload_only or "", *args.preload], job.sys_path0())
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
        # torch 2.11 lacks the flag (`scripts/gpu --overlay`).
        grace_s=GRACE_S_DEFAULT if (asked := getattr(args, "shutdown_timeout", None)) is None else asked,
        last_checkpoint_s=args.sigterm_checkpoint_s,
        health_check=None
        if args.health_check is None
        else HealthCheck.parse(args.health_check, args.health_check_s),
        signals=signals,
        around=partial(failing.around, failing.planned(failures, run_dir, log_dir, job)) if failing else None,
    )


def _tell_ranks(args: argparse.Namespace) -> None:
    tell_sessions(args, os.environ)
    if "OMP_NUM_THREADS" not in os.environ and args.nproc_per_node != "1":
        os.environ["OMP_NUM_THREADS"] = "1"


def _check(args: argparse.Namespace) -> None:
    for name, message in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise UsageError(f"run: not supported: {message}")
    if args.start_method not in START_METHODS:
        raise UsageError(f"run: --start-method {args.start_method}: {' or '.join(START_METHODS)}")
    if args.event_log_handler != "null":
        raise UsageError("run: not supported: --event-log-handler: the launcher's events go to $SWIFT_EVENTS")
    if args.tee != "0":
        raise UsageError("run: not supported: --tee: use --log-dir with --redirects")
    if not args.coordinator:
        raise UsageError("run: --coordinator HOST:PORT is needed (or the variable SWIFT_COORDINATOR)")
    if not re.fullmatch(r"\S+:\d{1,5}", args.coordinator):
        raise UsageError(f"run: --coordinator {args.coordinator}: write HOST:PORT")
    _check_line(args.coordinator)
    if not 0 <= args.sigterm_checkpoint_s < 86400:
        raise UsageError(f"run: --sigterm-checkpoint-s {args.sigterm_checkpoint_s}: seconds, 0 or more")
    if args.spares < 0:
        raise UsageError(f"run: --spares {args.spares}: 0 or more")
    if args.monitor_interval <= 0:
        raise UsageError(f"run: --monitor-interval {args.monitor_interval}: seconds, more than 0")
    if args.job is not None and not JOB_PATTERN.fullmatch(args.job):
        raise UsageError(f"run: --job {args.job}: {JOB_GRAMMAR}")
    check_recovery_flags(args)
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
    if args.from_version is not None and not args.from_job:
        raise UsageError(f"run: --from-version {args.from_version}: name the job as well, with --from-job")
    if args.from_version is not None and args.from_version < 0:
        raise UsageError(f"run: --from-version {args.from_version}: 0 or more")
    if args.from_job is not None and not JOB_PATTERN.fullmatch(args.from_job):
        raise UsageError(f"run: --from-job {args.from_job}: {JOB_GRAMMAR}")
    if args.from_job is not None and args.from_job == args.job:
        raise UsageError(
            f"run: --from-job {args.from_job}: a job goes on from its own checkpoints; leave the flag out, or name "
            "another job with --job"
        )


def _make_rendezvous(plan: LaunchPlan, wake: Callable[[], None]) -> Rendezvous:
    config = plan.config
    ranks = config.nproc_per_node
    match plan.meeting:
        case Meeting.ALONE:
            return LoopbackRendezvous(ranks, float(config.rdzv_configs["timeout"]))
        case Meeting.COORDINATOR:
            return MetRendezvous(
                plan.job,
                nodes=(config.min_nodes, config.max_nodes),
                ranks=ranks,
                address=config.local_addr or socket.getfqdn(),
                terms=plan.terms,
                wake=wake,
                say=tell,
            )
    place = int(config.rdzv_configs["rank"])
    try:
        address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)
        return PlacedRendezvous(ranks, place, config.max_nodes, address, port)
    except ValueError as error:
        raise UsageError(f"run: {' '.join(str(error).split())}") from error


def _say_unfit(reason: str) -> None:
    tell(
        f"run: --preload: {reason}: ranks are not forked but spawned (--start-method spawn says so beforehand)"
    )


def run(plan: LaunchPlan) -> Outcome:
    """Runs the job's local ranks to the end. Raises ServiceError if the trainers' store fails."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = plan.config.signals_to_handle
    events.emit("launcher_start", job=plan.job.name)
    asked = plan.preload != PRELOAD_DEFAULT
    nursery = Nursery(
        dict(os.environ),
        plan.job.sys_path0(),
        plan.preload,
        fork=plan.fork,
        on_unfit=_say_unfit if asked else lambda reason: None,
    )
    gate = SignalGate(plan.signals, nursery.wake)
    link = CoordinatorLink(plan.job.coordinator, plan.job.name, nursery.wake)
    rendezvous: Rendezvous | None = None
    try:
        with gate.raising():
            rendezvous = _make_rendezvous(plan, nursery.wake)
        agent = ReplacingAgent(
            plan.config,
            machines=rendezvous,
            job=plan.job,
            output=plan.output,
            spare_count=plan.spare_count,
            warms_up=plan.warms_up,
            grace_s=plan.grace_s,
            nursery=nursery,
            link=link,
            gate=gate,
            last_checkpoint_s=plan.last_checkpoint_s,
            health_check=plan.health_check,
        )
        agent.run()
    except NotNeeded as reason:
        return Outcome(exit_code=0, line=f"swift: this machine is not needed: {reason}")
    except Signalled as error:
        link.stop(plan.job.run, f"{error.signal.name} on {socket.gethostname()}")
        return Outcome(exit_code=128 + error.signal, line=f"swift: stopped by {error.signal.name}")
    except DistError as error:
        raise ServiceError(f"run: the store for trainers: {' '.join(str(error).split())}") from error
    finally:
        link.close()
        if rendezvous is not None:
            rendezvous.leave()
    assert agent.outcome is not None
    return agent.outcome


def main(argv: Sequence[str]) -> int:
    events.configure("launcher")
    try:
        plan = make_plan(argv)
        if plan.made_up:
            tell(f"this is job {plan.job.name} (--job gives it another name)")
        outcome = run(plan) if plan.around is None else plan.around(lambda: run(plan))
    except SwiftError as error:
        tell(error)
        return error.exit_code
    if outcome.line:
        tell(outcome.line, who="")
    events.emit("launcher_end", code=outcome.exit_code)
    return outcome.exit_code
