"""`swift-ft verify-determinism`: flags -> Config -> runs -> verdict."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_ft import fault_grammar
from swift_ft.cli_parser import Parser, check_file, write_json
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.command_line import check_directory, until_stopped, work_directory
from swift_ft.lab.determinism.runs import RUN, Config, ScriptRuns, SessionRuns
from swift_ft.lab.determinism.verify import (
    DIFFERS,
    EQUAL,
    GENERATOR,
    INCONCLUSIVE,
    NOT_DETERMINISTIC,
    Verdict,
    verify,
)
from swift_ft.planner.settings import LOST_SHARDS, STRATEGIES
from swift_ft.planner.strategies import may_finish
from swift_ft.text import show

# A verdict in words, and as JSON.

_SHOWN_MAX = 5


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.word}: {_summary(verdict)}"
    if verdict.found is not None:
        record, named = verdict.found.record, _named(verdict)
        where = "the state at the end" if record.last else f"step {record.step}"
        yield f"first difference: {where}, rank {record.rank}: {named[0] if named else 'the step itself'}"
        for number, cause in enumerate(verdict.causes):
            yield f"{'likely cause' if number == 0 else 'and'}: {cause.words} ({cause.name})"
            yield from (f"  {words}" for words in cause.evidence)
        if named[1:]:
            yield f"also different there: {len(named[1:])}"
            yield from (f"  {each}" for each in named[1 : 1 + _SHOWN_MAX])
    if verdict.apart:
        names = ", ".join(name.removeprefix(GENERATOR) for name in verdict.apart)
        yield (
            f"note: {names} begin with other states in each run (not seeded), and nothing that was recorded depends on "
            "them"
        )


def _named(verdict: Verdict) -> list[str]:
    differences = verdict.found.differences if verdict.found is not None else ()
    return [difference.seen.what().rstrip(",") for difference in differences]


def _summary(verdict: Verdict) -> str:
    steps, ranks = verdict.base.num_steps, len(verdict.base.ranks)
    killed = f"killed in step {verdict.interrupted.step}"
    at = verdict.interrupted.resumed_at
    resumed = (
        f"{killed}, resumed at step {at}" if at is not None else f"{killed}, gone on without the lost rank"
    )
    size = f"{steps} steps of {ranks} rank{'s' if ranks > 1 else ''}"
    return {
        EQUAL: f"{size}, {resumed}: every recorded bit is that of an uninterrupted run",
        DIFFERS: f"{size}, {resumed}: the run is not resumed exactly",
        NOT_DETERMINISTIC: f"{size}: two runs differ without any interruption",
        INCONCLUSIVE: f"{size}, {killed}: {_nothing_shown(at)} (--kill rank=R,step=S chooses another step)",
    }[verdict.word]


def _nothing_shown(resumed_at: int | None) -> str:
    if resumed_at is None:
        return "the script, started again, had nothing left to do"
    return "the script began again at step 0; it has found no checkpoint, or has saved none by then"


def as_json(verdict: Verdict) -> dict[str, Any]:
    found = verdict.found
    return {
        "verdict": verdict.word,
        "steps": verdict.base.num_steps,
        "killed_in_step": verdict.interrupted.step,
        "resumed_at_step": verdict.interrupted.resumed_at,
        "first_difference": None if found is None else {"step": found.record.step, "rank": found.record.rank},
        "differences": _named(verdict),
        "causes": [{**asdict(cause), "words": cause.words} for cause in verdict.causes],
        "unseeded_unused": list(verdict.apart),
    }


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
# The other strategies do not promise equal bits.
_STRATEGIES = [strategy for strategy in STRATEGIES if not may_finish(strategy)]
_LOST_SHARDS = [lost_shard for lost_shard in LOST_SHARDS if lost_shard != "drop"]


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft verify-determinism",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc-per-node", dest="ranks", type=int, default=1, metavar="N", help="ranks (default 1)")
    own = "the script has no swift_ft.Session: it is started again, and resumes from checkpoints of its own"
    add("--own-checkpoints", action="store_true", help=own)
    add("--strategy", choices=_STRATEGIES, help="how a lost rank's state is restored (as swift-ft run)")
    add("--lost-shard", choices=_LOST_SHARDS, help="as swift-ft run")
    add("--snapshot-every", type=int, metavar="K", help="as swift-ft run")
    kill = (
        "rank=R,step=S[,microbatch=M][,phase=P]: the interruption (default: chosen by --seed, in the second half); "
        "phases as swift-ft drill has them, in the middle of the update by default"
    )
    add("--kill", metavar="SPEC", help=kill)
    add("--seed", type=int, default=0, metavar="S", help="chooses the interruption (default 0)")
    json_path = "write the verdict there, with all differences"
    add("--json", dest="json_path", type=Path, metavar="PATH", help=json_path)
    add("--directory", type=Path, metavar="DIR", help="run there, and leave everything there")
    add("--keep", action="store_true", help="keep the temporary directory also if all is equal")
    patience = "give a run up of which nothing is heard for so long (default %(default)g)"
    add("--patience-s", type=float, default=600.0, metavar="SECONDS", help=patience)
    add("script", type=Path, metavar="TRAIN_SCRIPT", help="the training script")
    arguments = f"its arguments; {RUN} in one of them is a directory of the run's own"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=arguments)
    return parser


def parse(argv: Sequence[str]) -> Config:
    """Parses and checks the arguments. Raises UsageError, in one line."""
    given = make_parser().parse_args(argv)
    check_file("--json", given.json_path)
    if given.kill is not None:
        given.kill = _kill(given.kill, own=given.own_checkpoints)
    config = Config(**vars(given))
    check_directory("--directory", given.directory, empty=True)
    return config


def _kill(spec: str, *, own: bool) -> fault_grammar.RankFault:
    has_phase = "phase=" in spec.replace(" ", "").lower()
    if own and (has_phase or "microbatch=" in spec):
        raise UsageError(f"--kill {spec}: with --own-checkpoints write rank=R,step=S")
    fault = fault_grammar.parse(spec if has_phase else f"{spec},phase=optimizer")
    if not isinstance(fault, fault_grammar.RankFault) or fault.step is None:
        raise UsageError(f"--kill {spec}: write rank=R,step=S[,microbatch=M][,phase=P]")
    return fault


def run(config: Config) -> int:
    made = ScriptRuns if config.own_checkpoints else SessionRuns
    with work_directory(config.directory, keep=config.keep, name="verification") as (place, keep):
        try:
            verdict = verify(made(config, place))
        except ServiceError:
            keep()
            raise
        if verdict.exit_code:
            keep()
        try:
            write_json(config.json_path, as_json(verdict))
        finally:  # what cannot be written is shown at least
            show(verdict_lines(verdict))
        return verdict.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    return until_stopped("verification", lambda: run(parse(given)))


if __name__ == "__main__":
    sys.exit(main())
