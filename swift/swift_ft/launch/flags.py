"""The flags of `swift-ft run`: swift's own in groups, then torchrun's.

torchrun's parser is not used, because it imports torch: seconds, for a help text or a typing error. A test compares the
flags here with those of the installed torch.
"""

import argparse
import copy
import os
from typing import Any, NoReturn

from swift_ft.cli_parser import Parser, argument, checkpoint_place
from swift_ft.errors import UsageError
from swift_ft.launch.health_check import LIMIT_S_DEFAULT
from swift_ft.planner.settings import LOST_SHARDS, QUICKEST, STRATEGIES
from swift_ft.text import job_called

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
    "swift_ft.rpc.client,swift_ft.train.session,swift_ft.comm.gloo"
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
        type=int,
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
        type=int,
        default=os.environ.get("PET_MAX_RESTARTS"),
        metavar="N",
        help=f"How many dead processes this launcher replaces in total (default {REPLACEMENTS_DEFAULT}). If a process "
        "ends by itself three times before a new version is reached, the job ends in any case. For a script without a "
        "session, as in torchrun: how many times all ranks are restarted (default 0).",
    )
    group.add(
        "--retry-exceptions",
        type=int,
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
        type=float,
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
        type=int,
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
        type=float,
        default=LAST_CHECKPOINT_S_DEFAULT,
        metavar="SECONDS",
        help="How long SIGTERM to a running job waits for a checkpoint before it ends the ranks "
        "(default %(default)g; 0: no checkpoint).",
    )


def _add_processes(group: _Group) -> None:
    group.add("--spares", type=int, default=1, help="Warm processes kept to replace a dead rank (default 1).")
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
    return bool(int(os.environ.get(f"PET_{name.upper()}", "0")))


def _add_torchrun(group: _Group) -> None:
    def add(*flags: str, default: Any = None, **options: Any) -> None:
        name = flags[-1][2:].replace("-", "_")
        group.add(*flags, default=os.environ.get(f"PET_{name.upper()}", default), **options)

    def switch(*flags: str, help: str) -> None:
        name = flags[-1][2:].replace("-", "_")
        group.add(*flags, action="store_true", default=_is_set(name), help=help)

    add(
        "--nnodes",
        default="1:1",
        metavar="N|MIN:MAX",
        help="Number of machines, or how many at least and at most.",
    )
    add(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="Ranks on each machine: a number, auto, cpu, gpu or xpu.",
    )
    switch("-m", "--module", help="SCRIPT is a module's name, run as by 'python -m'.")
    add("--rdzv-id", default="none", metavar="ID", help="The job's id, the same on all machines.")
    add(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="Times of the meeting in seconds: join_timeout, last_call_timeout, keep_alive_interval, "
        "keep_alive_max_attempt, timeout.",
    )
    add(
        "--rdzv-backend",
        default="static",
        metavar="NAME",
        help="static or c10d. Machines meet at the coordinator.",
    )
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="The first machine, where machines have numbers.",
    )
    add(
        "--node-rank",
        type=int,
        metavar="N",
        help="This machine's number. Without numbers, the coordinator decides.",
    )
    add("--master-addr", metavar="HOST", help="The first machine, where machines have numbers.")
    add(
        "--master-port",
        type=int,
        metavar="PORT",
        help="Of the first machine's store for trainers (default 29500).",
    )
    add("--local-addr", metavar="HOST", help="This machine's name or address, as others reach it.")
    add("--role", default="default", metavar="NAME", help="Name of the ranks' role.")
    add("--log-dir", metavar="DIR", help="Directory for the ranks' redirected output.")
    add(
        "-r",
        "--redirects",
        default="0",
        metavar="WHICH",
        help="Write output of ranks to files: 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2.",
    )
    add(
        "--local-ranks-filter",
        default="",
        metavar="N,N...",
        help="Show the output of these local ranks only.",
    )
    add(
        "--monitor-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="Time between two looks at the job.",
    )
    add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAME,NAME...",
        help="Signals that end the job (default %(default)s).",
    )
    add(
        "--shutdown-timeout",
        type=int,
        metavar="SECONDS",
        help=f"Time between SIGTERM and SIGKILL of a rank (default {GRACE_S_DEFAULT:g}).",
    )


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


def check_refused(args: argparse.Namespace) -> None:
    for flag, way in REFUSED.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value and value != _NOTHING.get(flag):
            raise UsageError(f"run: not supported: {flag}: {way}")
