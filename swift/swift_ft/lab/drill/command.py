"""`swift-ft drill`: flags -> DrillConfig -> two runs -> report."""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft import fault_grammar
from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.fault_grammar import MICROBATCH_PHASES, RECOVERY_PHASES, Fault, RankFault
from swift_ft.files import write_whole
from swift_ft.lab.drill import options, page, report, run
from swift_ft.lab.drill.config import OPTIONS, DrillConfig
from swift_ft.lab.drill.console import LiveProgress, show
from swift_ft.lab.drill.facts import Facts, check_directory, check_file, until_stopped, work_directory
from swift_ft.lab.drill.faults import phases_of
from swift_ft.lab.drill.topology import Topology
from swift_ft.planner import quickest
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.settings import QUICKEST

# Kills of ranks at seeded coordinates (``--random-kills``).

RANDOM_GAP = 4
"""Least distance in steps between two random kills, so that a recovery ends long before the next kill."""
_SPREAD_ATTEMPTS = 20


def kills_of(
    count: int, topology: Topology, seed: int, updates: str, beside: Sequence[Fault] = ()
) -> tuple[RankFault, ...]:
    """Returns `count` kills of ranks at seeded coordinates, by step. They are at least `RANDOM_GAP` steps from each
    other and from the kills in `beside`. Raises UsageError if there are too few steps."""
    taken = [fault.step for fault in beside if isinstance(fault, RankFault) and fault.step is not None]
    generator = random.Random(f"kills {seed}")
    free = [step for step in range(1, topology.steps) if all(abs(step - t) >= RANDOM_GAP for t in taken)]
    steps = _spread(free, count, generator)
    if steps is None:
        raise UsageError(
            f"--random-kills {count}: {topology.steps} steps have no room for them, {RANDOM_GAP} steps apart; "
            "give more --steps"
        )
    left_out = ("save", "weights", *RECOVERY_PHASES)  # some microbatches have no separate weight gradients
    phases = [phase for phase in phases_of(topology, updates) if phase not in left_out]
    kills = []
    for step in steps:
        phase = generator.choice(phases)
        microbatch = generator.randrange(topology.microbatches)
        rank = generator.randrange(topology.ranks)
        kills.append(
            RankFault(
                rank=rank,
                step=step,
                phase=phase,
                microbatch=microbatch if phase in MICROBATCH_PHASES else 0,
            )
        )
    return tuple(kills)


def _spread(free: Sequence[int], count: int, generator: random.Random) -> list[int] | None:
    """Returns `count` of the ascending `free`, at least `RANDOM_GAP` apart, ascending. None: they do not fit."""
    for attempt in range(_SPREAD_ATTEMPTS + 1):
        order = list(free)
        if attempt < _SPREAD_ATTEMPTS:  # the last attempt packs them, which succeeds if any choice fits
            generator.shuffle(order)
        chosen: list[int] = []
        for step in order:
            if len(chosen) < count and all(abs(step - other) >= RANDOM_GAP for other in chosen):
                chosen.append(step)
        if len(chosen) == count:
            return sorted(chosen)
    return None


DESCRIPTION = "Kills ranks of a real training run and compares every bit with a run that did not fail."
EPILOG = """\
--kill takes one of these (several are carried out in the order in which the run reaches them; several with the same
step kill at once):
  rank=2,step=17,microbatch=3,phase=backward    SIGKILL of a rank by itself, exactly there; phases: forward,
                                                backward, reduce, update, optimizer, idle, save, replay, copy
  rank=2,phase=replay                           SIGKILL at the first replay that runs while rank 2 lives
  rank=2,phase=finish                           SIGKILL in a step that is finished after another loss (--strategy
                                                lossy-forward)
  rank=2,phase=copy                             SIGKILL while rank 2 first sends or receives a replica's state
  service=logserver,step=12                     SIGKILL of the log server; it is started again
  log=0,step=12                                 SIGKILL of that log server for good (needs --log-servers 2 or more),
                                                together with the ranks that are killed in that step
  log=0,phase=replay                            the same at the first replay
  service=coordinator,state=recovering          the coordinator kills itself in this state: fencing, planning,
                                                recovering, running
  corrupt=checkpoint,rank=1,step=17             flips a bit of that rank's newest checkpoint, before the rank killed
                                                at step 17 dies (needs --strategy checkpoint)
  corrupt=copy,rank=3                           flips a bit of the state that a replica gives to that rank
  corrupt=log,step=17[,stream=s1.F]             flips a bit of the live log, before the rank killed at that step dies

--model paced is the tiny model with stages that sleep for a fixed time, as if each had a device of its own.
The phase reduce is the middle of a step's gradient reduction (needs --replicas), update is the middle of a wait-free
update (needs --updates wait_free), optimizer is the middle of optimizer.step(). A rank's number is
pipeline rank * replicas + replica.

exit codes: 0 PASS, 1 FAIL, 2 usage, 3 INCONCLUSIVE or an error of the environment, 130 interrupted
"""
SPACE_NEEDED_MB = {"tiny": 64, "default": 512, "paced": 64}


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft drill",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_to(parser, OPTIONS)
    what = "kill this many ranks, at coordinates that --seed decides"
    parser.add_argument("--random-kills", type=int, metavar="N", help=what)
    return parser


def parse(argv: Sequence[str]) -> DrillConfig:
    """Returns the drill's configuration. Raises UsageError, in one line, for invalid options."""
    given = vars(make_parser().parse_args(argv))
    topology = Topology(
        **{each.attribute: given.pop(each.attribute) for each in options.options_of(Topology)}
    )
    if given["lost_shard"] == QUICKEST and given["strategy"] == "auto":
        given["lost_shard"] = quickest(topology.pipeline_ranks, topology.replicas)
    given["groups"] = _groups(str(given["groups"]))
    given["faults"] = _faults(given["faults"], given.pop("random_kills"), topology, given)
    return DrillConfig(topology=topology, **given)


def _groups(text: str) -> RecoveryGroups:
    try:
        return RecoveryGroups.parse(text)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def _faults(
    specs: Sequence[str], random_kills: int | None, topology: Topology, given: Mapping[str, Any]
) -> tuple[fault_grammar.Fault, ...]:
    """Returns the given faults and the random ones; without either, the default kill."""
    chosen = tuple(fault_grammar.parse(spec) for spec in specs)
    if random_kills is None:
        return chosen or (default_kill(topology),)
    if random_kills < 1:
        raise UsageError(f"--random-kills must be at least 1, not {random_kills}")
    return chosen + kills_of(random_kills, topology, given["seed"], given["updates"], chosen)


def default_kill(topology: Topology) -> fault_grammar.RankFault:
    """Returns `options.DEFAULT_KILL`, or its equivalent in a smaller drill: late, and not right after a checkpoint."""
    step = min(17, topology.steps * 17 // 30)
    if step > 1 and step % topology.checkpoint_every == 0:
        step -= 1
    return fault_grammar.RankFault(
        rank=min(2, topology.ranks - 1),
        step=step,
        microbatch=min(3, topology.microbatches - 1),
        phase="backward",
    )


def check_paths(config: DrillConfig) -> None:
    """Checks before the run that all results can be written. Raises UsageError for a path that cannot be written or has
    too little space."""
    check_file("--json", config.json_path)
    check_file("--html", config.html_path)
    check_directory("--directory", config.directory, empty=True)
    check_directory("--twin", config.twin, empty=False)
    place = config.directory or Path(tempfile.gettempdir())
    free_mb = shutil.disk_usage(place).free >> 20
    if free_mb < SPACE_NEEDED_MB[config.model]:
        raise UsageError(
            f"{place}: {free_mb} MB free, the drill needs {SPACE_NEEDED_MB[config.model]}; "
            "make room, or give another --directory"
        )
    if config.twin is not None:
        run.stored_twin(config, config.twin)


def drill(config: DrillConfig, check_stop: Callable[[], None]) -> int:
    """Runs the drill, shows the report and returns the exit code."""
    with (
        work_directory(config.directory, keep=config.keep, name="drill") as (place, keep),
        LiveProgress() as progress,
    ):
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
        result = report.build(Facts.of(config, evidence))
        progress.close()
        write(config, result)
        show(result)
        if result["verdict"] != report.PASS:
            keep()
            for output in filter(None, [faulted.output, *outputs]):
                print(output, file=sys.stderr)
        return report.EXIT_CODES[result["verdict"]]


def write(config: DrillConfig, result: dict[str, Any]) -> None:
    """Writes the requested files; each appears whole or not at all. Raises ServiceError if one cannot be written."""
    try:
        if config.json_path is not None:
            write_whole(config.json_path, json.dumps(result, indent=2) + "\n", mode=None)
        if config.html_path is not None:
            write_whole(config.html_path, page.page(result), mode=None)
    except OSError as error:
        raise ServiceError(f"{error.filename}: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv

    def run_it(check_stop: Callable[[], None]) -> int:
        config = parse(given)
        check_paths(config)
        return drill(config, check_stop)

    return until_stopped("drill", run_it)


if __name__ == "__main__":
    sys.exit(main())
