"""`swift-ft drill`: flags -> DrillConfig -> two runs -> report."""

import argparse
import sys
from collections.abc import Sequence

from swift_ft import fault_grammar
from swift_ft.cli_parser import Parser, check_file, write, write_json
from swift_ft.errors import UsageError
from swift_ft.lab.command_line import check_directory, until_stopped, work_directory
from swift_ft.lab.drill import options, report, run
from swift_ft.lab.drill.config import OPTIONS, DrillConfig
from swift_ft.lab.drill.console import page, show
from swift_ft.lab.drill.topology import Topology
from swift_ft.planner import quickest
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.settings import QUICKEST

DESCRIPTION = "Kills ranks of a real training run and compares every bit with a run that did not fail."
EPILOG = f"""\
--kill takes one of these, and may be given several times (docs/drills.md has all phases and what they need):
  rank=2,step=17,microbatch=3,phase=backward    SIGKILL of a rank by itself, exactly there
  rank=2,phase=replay                           the same at the first replay (copy, finish) while rank 2 lives
  service=logserver,step=12                     SIGKILL of the log server; it is started again
  service=coordinator,state=recovering          the coordinator kills itself in this state
  log=0,step=12 (phase=replay)                  SIGKILL of that log server for good
  corrupt=log,step=17                           one bit is flipped, before the rank killed at that step dies;
  corrupt=checkpoint,rank=1,step=17             here in that rank's newest checkpoint
  corrupt=copy,rank=3                           one bit of the state that another rank gives to that rank

Phases: {", ".join(fault_grammar.PHASES)}.
A rank's number is pipeline rank * replicas + replica. --model paced is the tiny model with stages that sleep.

exit codes: 0 PASS, 1 FAIL, 2 usage, 3 INCONCLUSIVE or an error of the environment, 130 interrupted
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft drill",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in OPTIONS:
        option.add_to(parser)
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
    given["faults"] = tuple(map(fault_grammar.parse, given["faults"])) or (default_kill(topology),)
    return DrillConfig(topology=topology, **given)


def _groups(text: str) -> RecoveryGroups:
    try:
        return RecoveryGroups.parse(text)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


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


def check_device(device: str) -> None:
    """Checks that this machine has a device of that type. Raises UsageError."""
    if device == "cpu":
        return
    import torch  # takes a second

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or device.partition(":")[0] != found.type:
        raise UsageError(f"--device {device}: torch finds {found or 'no device'} here")


def check_paths(config: DrillConfig) -> None:
    """Checks before the run that all results can be written. Raises UsageError for a path that cannot be written."""
    check_file("--json", config.json_path)
    check_file("--html", config.html_path)
    check_directory("--directory", config.directory, empty=True)
    check_directory("--twin", config.twin, empty=False)
    if config.twin is not None:
        run.stored_twin(config, config.twin)


def drill(config: DrillConfig) -> int:
    with work_directory(config.directory, keep=config.keep, name="drill") as (place, keep):
        faulted = run.FaultedRun(config, place / "run")
        evidence = faulted.run(place / "twin")
        result = report.build(config, evidence)
        if result["verdict"] != report.PASS:
            keep()
        try:
            write_json(config.json_path, result)
            if config.html_path is not None:
                write(config.html_path, page(result))
        finally:  # what cannot be written is shown at least
            show(result)
        if result["verdict"] != report.PASS and faulted.output:
            print(faulted.output, file=sys.stderr)
        return report.EXIT_CODES[result["verdict"]]


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv

    def run_it() -> int:
        config = parse(given)
        check_paths(config)
        check_device(config.device)
        return drill(config)

    return until_stopped("drill", run_it)


if __name__ == "__main__":
    sys.exit(main())
