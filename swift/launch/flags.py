"""The flags of `swift-ft run`: torchrun's, and swift's own beside them."""

import argparse
import os
from typing import NoReturn

from swift.arguments import only_finite
from swift.errors import UsageError
from swift.launch import failing, recovery_flags
from swift.launch.health import LIMIT_S_DEFAULT
from swift.launch.torch_names import get_args_parser

DESCRIPTION = "Starts the ranks of a training job, keeps warm spares, and replaces a rank that dies."
START_METHODS = ("fork", "spawn")
GRACE_S_DEFAULT = 5.0
LAST_CHECKPOINT_S_DEFAULT = 15.0
"""With the grace, less than the 30 s that schedulers leave between SIGTERM and SIGKILL."""
# Some of these are imported only at first use, which would fall into a recovery.
PRELOAD_DEFAULT = (
    "torch,torch.distributed,torch.distributed.pipelining,torch.distributed.checkpoint,"
    "torch.utils.serialization.config,fsspec.core,grpc,grpc._channel,grpc.experimental,"
    "swift.control.client,swift.runtime.session"
)


class _Parser(argparse.ArgumentParser):
    """Help that begins with what the command does; errors of one line."""

    def format_help(self) -> str:
        return f"{DESCRIPTION}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"run: {message} (see swift-ft run --help)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="swift-ft run", parents=[get_args_parser()], conflict_handler="resolve")
    only_finite(parser)
    ours = parser.add_argument_group("swift")
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
    ours.add_argument(
        "--warm-up",
        "--warm_up",
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
        f"spare while it waits. These are imported anyway: {PRELOAD_DEFAULT.replace(',', ', ')}, and what the script "
        "imports before anything else, if it is installed and safe before a fork.",
    )
    ours.add_argument(
        "--preload-only",
        "--preload_only",
        metavar="MODULE,MODULE...",
        help="Import these modules only, in place of those that are imported anyway.",
    )
    ours.add_argument(
        "--start-method",
        "--start_method",
        choices=START_METHODS,
        default=os.environ.get("PET_START_METHOD", "fork"),
        help="How processes start: 'fork' takes milliseconds and shares the memory of imported modules; 'spawn' makes "
        "fresh interpreters, for modules of --preload that must not be forked. If a module starts a thread or keeps a "
        "file open, processes are spawned in any case (default fork).",
    )
    recovery_flags.add(ours)
    _add_health_check(ours)
    _add_checkpoints(ours)
    failing.add_arguments(ours)
    return parser


def _add_health_check(ours: "argparse._ArgumentGroup") -> None:
    ours.add_argument(
        "--health-check",
        "--health_check",
        metavar="COMMAND",
        help="Run this for a place of this machine ($LOCAL_RANK) before any process gets it, at the start and after a "
        "loss: a command (not a shell's), or python:MODULE:FUNCTION. With an exit code other than 0, an exception or "
        "False, no process gets the place (docs/operation.md).",
    )
    ours.add_argument(
        "--health-check-s",
        "--health_check_s",
        type=float,
        default=LIMIT_S_DEFAULT,
        metavar="SECONDS",
        help="How long one health check may take (default %(default)g). It is ended then, and has failed.",
    )


def _add_checkpoints(ours: "argparse._ArgumentGroup") -> None:
    ours.add_argument("--checkpoint-dir", metavar="DIR", help="The directory of the ranks' checkpoints.")
    ours.add_argument(
        "--from-job",
        "--from_job",
        metavar="NAME",
        help="Begin with the newest complete checkpoint, and the step, of another job of the same coordinator, in the "
        "same --checkpoint-dir. A job that has checkpoints of its own goes on from those.",
    )
    ours.add_argument(
        "--from-version",
        "--from_version",
        type=int,
        metavar="V",
        help="With --from-job: begin with the checkpoint of this version instead of the newest.",
    )
    ours.add_argument(
        "--sigterm-checkpoint-s",
        "--sigterm_checkpoint_s",
        type=float,
        default=LAST_CHECKPOINT_S_DEFAULT,
        metavar="SECONDS",
        help="How long SIGTERM to a running job waits for a checkpoint before it ends the ranks "
        "(default %(default)g; 0: no checkpoint).",
    )
