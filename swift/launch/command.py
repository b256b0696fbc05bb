"""`swift-ft run`: flags -> LaunchPlan -> run."""

import argparse
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder

from torch.distributed import DistError

from swift import events
from swift.errors import ServiceError, SwiftError, UsageError
from swift.launch import failing, recovery_flags
from swift.launch.agent import ReplacingAgent
from swift.launch.children import Nursery
from swift.launch.decisions import Outcome
from swift.launch.flags import GRACE_S_DEFAULT, PRELOAD_DEFAULT, START_METHODS, make_parser
from swift.launch.health import HealthCheck
from swift.launch.imports import imports_of, script_of
from swift.launch.link import CoordinatorLink
from swift.launch.machines import Meeting, choose_meeting, job_name
from swift.launch.meeting import MetRendezvous, NotNeeded, Terms
from swift.launch.ranks import Output, RankProgram, make_run_dir
from swift.launch.rendezvous import LoopbackRendezvous, PlacedRendezvous, Rendezvous
from swift.launch.signals import SignalGate
from swift.launch.torch_names import (
    AGENT_LOGGER,
    LaunchConfig,
    SignalException,
    Std,
    WorkerSpec,
    config_from_args,
    parse_rendezvous_endpoint,
    to_map,
)
from swift.names import JOB_GRAMMAR, JOB_PATTERN
from swift.words import tell

# torchrun's flags that make no sense with children of our own, or are not built.
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
    """Everything that the flags say, checked."""

    config: LaunchConfig
    made_up: bool
    """The job's name was not given in so many letters."""
    meeting: Meeting
    terms: Terms
    job: RankProgram
    output: Output
    spare_count: int
    warms_up: bool
    """Spares run the script before they are needed."""
    preload: str
    imports: str
    """What the script imports first."""
    fork: bool
    grace_s: float
    last_checkpoint_s: float
    health_check: HealthCheck | None
    signals: list[signal.Signals]
    failures: failing.Planned | None


def make_plan(argv: Sequence[str]) -> LaunchPlan:
    """Parses and checks. UsageError says what is wrong."""
    parser = make_parser()
    # Whether these were given says whether machines have numbers.
    unset = {name: os.environ.get(f"PET_{name.upper()}") for name in ("node_rank", "master_addr")}
    parser.set_defaults(**unset)
    args = parser.parse_args(argv)
    _check(args)
    meeting = choose_meeting(args)
    # torch's own log handling would make a directory that nobody uses.
    log_dir, args.log_dir = args.log_dir, os.devnull
    _tell_ranks(args)
    try:
        config, _, _ = config_from_args(args)
        redirects = to_map(Std.from_str(args.redirects), config.nproc_per_node)
        terms = Terms.of(config.rdzv_configs)
        float(config.rdzv_configs["timeout"])  # of a rendezvous that is made later
        signals = [signal.Signals[name.strip()] for name in config.signals_to_handle.split(",")]
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(f"run: {error}") from error
    except KeyError as error:
        raise UsageError(f"run: --signals-to-handle: no signal {error}") from error
    if config.nproc_per_node < 1:
        raise UsageError(f"run: --nproc-per-node {args.nproc_per_node}: 1 or more")
    failures = failing.schedule_of(args, config)
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
    path0 = job.sys_path0()
    _check_preload([args.preload_only or "", *args.preload], path0)
    imports = imports_of(script_of(job.script, job.module, path0), path0) if args.preload_only is None else []
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
        imports=",".join(imports),
        fork=args.start_method == "fork",
        grace_s=GRACE_S_DEFAULT if args.shutdown_timeout is None else args.shutdown_timeout,
        last_checkpoint_s=args.sigterm_checkpoint_s,
        health_check=None
        if args.health_check is None
        else HealthCheck.parse(args.health_check, args.health_check_s, path0),
        signals=signals,
        failures=failing.planned(failures, run_dir, log_dir, job),
    )


def _tell_ranks(args: argparse.Namespace) -> None:
    """What a session takes from its environment."""
    recovery_flags.tell(args, os.environ)
    if "OMP_NUM_THREADS" not in os.environ and args.nproc_per_node != "1":
        os.environ["OMP_NUM_THREADS"] = "1"


def _check(args: argparse.Namespace) -> None:
    for name, message in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise UsageError(f"run: not supported: {message}")
    if args.start_method not in START_METHODS:
        raise UsageError(f"run: --start-method {args.start_method}: {' or '.join(START_METHODS)}")
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
    recovery_flags.check(args)
    _check_origin(args)
    if args.module:
        top = args.training_script.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise UsageError(f"run: no module named {top}")
    elif not os.path.exists(args.training_script):
        raise UsageError(f"run: {args.training_script}: there is no such script")


def _check_line(coordinator: str) -> None:
    """UsageError: no process of the job could connect, so none is started. Nobody need answer yet."""
    from swift.security.channel import Credentials  # only here: grpc takes a while

    try:
        Credentials.from_environment().check(coordinator)
    except UsageError as error:
        raise UsageError(f"run: --coordinator: {error}") from None


def _check_preload(lists: Iterable[str], path0: str) -> None:
    """A name that is mistyped would be noticed by nobody: it makes a replacement slow, and nothing else."""
    for name in filter(None, ",".join(lists).split(",")):
        top = re.split(r"[.:]", name)[0]
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
            return LoopbackRendezvous(config.run_id, ranks, float(config.rdzv_configs["timeout"]))
        case Meeting.COORDINATOR:
            return MetRendezvous(
                config.run_id,
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
        return PlacedRendezvous(config.run_id, ranks, place, config.max_nodes, address, port)
    except ValueError as error:
        raise UsageError(f"run: {' '.join(str(error).split())}") from error


def _make_spec(plan: LaunchPlan, rendezvous: Rendezvous) -> WorkerSpec:
    config = plan.config
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=plan.job.script,
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        virtual_local_rank=config.virtual_local_rank,
    )


def _say_unfit(reason: str) -> None:
    tell(
        f"run: --preload: {reason}: ranks are not forked but spawned (--start-method spawn says so beforehand)"
    )


def run(plan: LaunchPlan) -> Outcome:
    """Runs the job's local ranks to the end. Raises ServiceError if the trainers' store fails."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = plan.config.signals_to_handle
    # Its warnings on signals and closed rendezvous say less than our own lines.
    logging.getLogger(AGENT_LOGGER).setLevel(os.environ.get("LOGLEVEL", "ERROR"))
    events.emit("launcher_start", job=plan.job.name)
    asked = plan.preload != PRELOAD_DEFAULT
    nursery = Nursery(
        dict(os.environ),
        plan.job.sys_path0(),
        plan.preload,
        imports=plan.imports,
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
            _make_spec(plan, rendezvous),
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
    except SignalException as error:
        link.stop(plan.job.run, f"{error.sigval.name} on {socket.gethostname()}")
        return Outcome(exit_code=128 + error.sigval, line=f"swift: stopped by {error.sigval.name}")
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
        outcome = failing.around(plan.failures, lambda: run(plan))
    except SwiftError as error:
        tell(error)
        return error.exit_code
    if outcome.line:
        tell(outcome.line, who="")
    events.emit("launcher_end", code=outcome.exit_code)
    return outcome.exit_code
