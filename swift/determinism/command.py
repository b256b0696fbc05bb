"""`swift-ft verify-determinism`: flags -> Config -> runs -> verdict."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from swift.arguments import Parser
from swift.determinism import report
from swift.determinism.config import RUN, Config
from swift.determinism.runs import ScriptRuns, SessionRuns
from swift.determinism.verify import verify
from swift.drill.place import Signals, Stopped, check_directory, check_file, replace_file, work_directory
from swift.errors import ServiceError, SwiftError, UsageError
from swift.failures import grammar
from swift.recovery.types import LOST_SHARDS, STRATEGIES
from swift.words import show, tell

DESCRIPTION = (
    "Compares an interrupted and resumed run of a training script with an uninterrupted one, bit by bit."
)
EPILOG = f"""\
Everything that is needed is started here, on 127.0.0.1. The script is not changed.

With --own-checkpoints it is started as torchrun does it, in an empty working directory for each run, killed, and
started again with the same command. It must write its checkpoints there, or to a directory that its arguments name
by {RUN}.

exit codes: 0 equal, 1 differs, 2 usage, 3 inconclusive or an error of the environment, 130 interrupted
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft verify-determinism",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks (default %(default)s)"
    )
    parser.add_argument(
        "--own-checkpoints",
        action="store_true",
        help="the script has no swift.Session: it is started again, and resumes from checkpoints of its own",
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="how a lost rank's state is restored (as swift-ft run)"
    )
    parser.add_argument("--lost-shard", choices=LOST_SHARDS, help="as swift-ft run; not quickest")
    parser.add_argument("--snapshot-every", type=int, metavar="K", help="as swift-ft run")
    parser.add_argument("--allow-inexact", action="store_true", help="as swift-ft run")
    parser.add_argument(
        "--kill",
        metavar="SPEC",
        help="rank=R,step=S[,microbatch=M][,phase=P]: the interruption (default: chosen by --seed, in the second "
        "half); phases as swift-ft drill has them, in the middle of the update by default",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="chooses the interruption (default 0)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the verdict there, with all differences"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="run there, and leave everything there")
    parser.add_argument(
        "--keep", action="store_true", help="keep the temporary directory also if all is equal"
    )
    parser.add_argument(
        "--patience-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give a run up of which nothing is heard for so long (default %(default)g)",
    )
    parser.add_argument("script", type=Path, metavar="TRAIN_SCRIPT", help="the training script")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help=f"its arguments; {RUN} in one of them is a directory of the run's own",
    )
    return parser


def parse(argv: Sequence[str]) -> Config:
    """Raises UsageError, in one line, for whatever cannot be."""
    given = make_parser().parse_args(argv)
    check_file("--json", given.json)
    config = Config(
        script=given.script,
        arguments=given.arguments,
        ranks=given.nproc_per_node,
        own_checkpoints=given.own_checkpoints,
        strategy=given.strategy,
        lost_shard=given.lost_shard,
        snapshot_every=given.snapshot_every,
        allow_inexact=given.allow_inexact,
        kill=None if given.kill is None else _kill(given.kill, own=given.own_checkpoints),
        seed=given.seed,
        patience_s=given.patience_s,
        json_path=given.json,
        directory=given.directory,
        keep=given.keep,
    )
    check_directory("--directory", given.directory, empty=True)
    return config


def _kill(spec: str, *, own: bool) -> grammar.RankFault:
    has_phase = "phase=" in spec.replace(" ", "").lower()
    if own and (has_phase or "microbatch=" in spec):
        raise UsageError(f"--kill {spec}: with --own-checkpoints write rank=R,step=S")
    fault = grammar.parse(spec if has_phase else f"{spec},phase=optimizer")
    if not isinstance(fault, grammar.RankFault) or fault.step is None:
        raise UsageError(f"--kill {spec}: write rank=R,step=S[,microbatch=M][,phase=P]")
    return fault


def run(config: Config, check_stop: Callable[[], None]) -> int:
    """Does all of it; the exit code."""
    made = ScriptRuns if config.own_checkpoints else SessionRuns
    with work_directory(config.directory, keep=config.keep, name="verification") as (place, keep):
        try:
            verdict = verify(made(config, place, check_stop))
        except ServiceError:
            keep()
            raise
        if config.json_path is not None:
            replace_file(config.json_path, json.dumps(report.as_json(verdict), indent=2) + "\n")
        show(report.lines(verdict))
        if verdict.exit_code:
            keep()
        return verdict.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    signals = Signals()
    try:
        return run(parse(sys.argv[1:] if argv is None else argv), signals.check)
    except SwiftError as error:
        first, *rest = str(error).splitlines()
        tell(first)
        print("\n".join(rest), end="\n" if rest else "", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        tell(f"{error.filename or 'verify-determinism'}: {error.strerror or error}")
        return ServiceError.exit_code
    except Stopped as stopped:
        name = signal.Signals(stopped.signum).name
        tell(f"{name}: the verification was ended, nothing of it is left running")
        return 128 + stopped.signum


if __name__ == "__main__":
    sys.exit(main())
