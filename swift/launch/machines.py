"""How the machines of a job know of each other, and what the job is called: from the flags of `swift-ft run`."""

import argparse
import enum
import os
import re
import secrets

from swift.errors import UsageError
from swift.launch.rendezvous import LOOPBACK
from swift.launch.torch_names import parse_min_max_nnodes
from swift.words import tell

_TYPED = "abcdefghjkmnpqrstuvwxyz23456789"
"""What nobody takes for something else."""
# torchrun's flags that say where machines meet, or which one this is.
_PLACES = ("rdzv_endpoint", "node_rank", "master_addr", "master_port")


class Meeting(enum.Enum):
    """How the machines of a job know of each other."""

    ALONE = "alone"
    """There is one: its store listens on loopback only."""
    NUMBERED = "numbered"
    """By --node-rank."""
    COORDINATOR = "coordinator"
    """They meet there."""


def job_name(run_id: str) -> str:
    """A job name made from a rendezvous id: what the grammar does not allow becomes a dash."""
    return re.sub(r"[^a-z0-9._-]", "-", run_id.lower()).lstrip("._-")[:64] or "job"


def made_up_name(script: str) -> str:
    """Another one each time, and short enough to be typed: train-k7f3ab."""
    stem = job_name(os.path.basename(script).removesuffix(".py").rpartition(".")[2])
    return f"{stem[:40]}-{''.join(secrets.choice(_TYPED) for _ in range(6))}"


def choose_meeting(args: argparse.Namespace) -> Meeting:
    """Machines with numbers are torchrun's static rendezvous. All others meet at the coordinator: torch's own c10d
    would be on one of them, and end with it. Raises UsageError for flags that do not say where to meet."""
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
    if not static:  # else torch warns of them, whether they were given or not
        del args.node_rank, args.master_addr
    return meeting
