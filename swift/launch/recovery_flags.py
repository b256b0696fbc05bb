"""`swift-ft run`: how a job recovers. What the flags say reaches the session of each rank by its environment."""

import argparse
import math
import os
from collections.abc import MutableMapping

from swift.errors import UsageError
from swift.names import ENV_ALLOW_INEXACT, LAUNCHER_SETTINGS
from swift.recovery.types import LOST_SHARDS, QUICKEST, STRATEGIES, lost_shard_problem

REPLACEMENTS_DEFAULT = 100
ON_OFF = ("on", "off")


def add(ours: "argparse._ArgumentGroup") -> None:
    """The flags."""
    ours.add_argument(
        "--paranoid",
        action="store_true",
        help="Compute the first step twice from one state and compare the results; do so after every recovery too.",
    )
    ours.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="How a lost rank's state is restored (docs/strategies.md), if the script does not say it. With 'shrink', "
        "'adaptive', 'rollback' and 'lossy-forward' the others go on without it; --max-restarts 0 leaves its place "
        "vacant.",
    )
    ours.add_argument(
        "--lost-shard",
        "--lost_shard",
        choices=(*LOST_SHARDS, QUICKEST),
        help="With --strategy shrink or rollback, and with auto if no process takes a lost rank's place: the others "
        "compute its batches ('redistribute'), or nobody does ('drop', not exact). With auto and a pipeline: its peers "
        "share its microbatches ('reroute'). With auto, 'quickest' is 'reroute' for pipelines, else 'redistribute'.",
    )
    ours.add_argument(
        "--snapshot-every",
        "--snapshot_every",
        type=int,
        metavar="K",
        help="With --strategy snapshot, and auto: steps between two copies of the state in host memory.",
    )
    _add_adaptive(ours)
    ours.add_argument(
        "--allow-inexact",
        "--allow_inexact",
        action="store_true",
        help="Allow strategies that do not lead to the bits of a run that never failed.",
    )
    ours.add_argument(
        "--max-restarts",
        "--max_restarts",
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
    ours.add_argument(
        "--exact-gradients",
        "--exact_gradients",
        choices=ON_OFF,
        help="With --strategy adaptive (or auto with --lost-shard reroute): 'off' adds the gradients of a lost rank's "
        "microbatches to a rank's own. That saves memory, and is not exact (default on).",
    )
    ours.add_argument(
        "--split-backward",
        "--split_backward",
        choices=ON_OFF,
        help="With the same: while ranks are missing, gradients of weights are computed after those of inputs, if the "
        "first step shows that the bits are the same (default on).",
    )
    ours.add_argument(
        "--adaptive-memory",
        "--adaptive_memory",
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
    ours.add_argument(
        "--move-losses",
        "--move_losses",
        choices=ON_OFF,
        help="With --strategy adaptive (or auto with --lost-shard reroute): where two ranks of one stage are lost, a "
        "rank of another stage on the same machine gives its place to one of them, once that pays (default off).",
    )
    ours.add_argument(
        "--fetch-batches",
        "--fetch_batches",
        choices=ON_OFF,
        help="With the same as --exact-gradients: loaders are made by ranks of their own pipeline alone; while one is "
        "lost, the others get its batches from a rank of its pipeline that is left (default off).",
    )


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for what cannot be."""
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


def tell(args: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    """Writes what was said for `Session.from_env` to read."""
    if args.paranoid:
        environment["SWIFT_PARANOID"] = "1"
    if args.allow_inexact:
        environment[ENV_ALLOW_INEXACT] = "1"
    for setting, variable in LAUNCHER_SETTINGS.items():
        value = getattr(args, setting)
        if value is not None:
            environment[variable] = str(value)
