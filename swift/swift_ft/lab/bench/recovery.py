"""`swift-ft bench recovery`: one of two ranks dies; its cost under torchrun, torchft, NVRx and swift's strategies.

Each system trains the same model on the same batches with two replicas, in steps of the same length, by a trainer as
its user would write it (`swift/swift_ft/lab/bench/peers`). A replica kills itself with SIGKILL at points (a step and a
place in it) that are drawn from a seed and equal for all systems. The trainers' marks show when the survivor left the
step, when the first step without the victim was done, which steps were repeated, which processes were replaced, and
whether the final weights are bitwise those of the same trainer in a run without failure. Every round runs each system
once, in turn. Before the rounds each system trains once without a failure and without the wait in its steps, which
gives its cost in normal operation: the median step, and the peak memory of a replica without its helper processes.

Peers have environments of their own, DIR/torchft and DIR/nvrx of --peers DIR. One that is not there is left out, with
the reason.
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.peers import report, systems
from swift_ft.lab.bench.peers.systems import SYSTEMS
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial
from swift_ft.lab.commands import write_json
from swift_ft.text import show, tell

WAIT_S = 0.01
"""Wait in each step of a run in which a replica dies."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--system", choices=SYSTEMS, action="append", help="may be repeated (default: all)")
    add("--kills", type=int, default=20, metavar="N", help="of each system; default %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the points; default %(default)s")
    add("--steps", type=int, default=300, metavar="N", help="default %(default)s")
    add("--checkpoint-every", type=int, default=50, metavar="N", help="default %(default)s")
    add(
        "--peers",
        type=Path,
        default=Path("peers"),
        metavar="DIR",
        help="their environments; default %(default)s",
    )


def run(arguments: Any) -> dict[str, Any]:
    """The verdict is FAIL if a goal is missed, INCOMPLETE if a system did not continue after each kill."""
    every, steps, kills = arguments.checkpoint_every, arguments.steps, arguments.kills
    if every < 3 or steps < 3 * every or kills < 1:
        raise UsageError(
            "bench recovery: give 1 kill or more, --checkpoint-every of 3 or more, and --steps of at least 3 times that"
        )
    settings = {
        "kills": kills,
        "seed": arguments.seed,
        "steps": steps,
        "every": every,
        "wait_ms": 1e3 * WAIT_S,
    }
    settings |= {"first": every, "last": steps - every - 1}
    pythons, versions, missing = _peers(list(dict.fromkeys(arguments.system or SYSTEMS)), arguments.peers)
    document: dict[str, Any] = {"machine": output.machine(), "peers": versions, "settings": settings}
    show([*report.intro(document["machine"], metadata.version("torch"), versions, settings), ""])
    quiet: dict[str, dict[str, Any]] = {}
    rounds: dict[str, list[dict[str, Any]]] = {}
    with output.place(None) as place:
        for name, python in pythons.items():
            trial = Trial(directory=str(Path(place, f"{name}.calm")), steps=steps, every=every, wait_s=0.0)
            try:
                quiet[name] = _calm(name, trial, python)
            except ServiceError as error:
                if not SYSTEMS[name].peer:
                    raise
                # A peer failed: the others can be compared without it.
                missing[name] = f"left out: {' '.join(str(error).split())[:200]}"
        for number, point in enumerate(
            report.points(settings["seed"], kills, settings["first"], settings["last"])
        ):
            for name, undisturbed in quiet.items():
                directory = Path(place, f"{name}.{number}")
                trial = Trial(
                    directory=str(directory),
                    steps=steps,
                    every=every,
                    wait_s=WAIT_S,
                    kill_step=point.step,
                    kill_place=point.place,
                )
                judged = report.judge(systems.run(name, trial, pythons[name]), undisturbed["digest"])
                rmtree(directory)
                rounds.setdefault(name, []).append(judged)
                lost = judged.get("failed") or f"{judged['lost_s']:.2f} s lost"
                tell(
                    f"{number + 1} of {kills}: {SYSTEMS[name].words}: step {point.step}, {point.place}: {lost}",
                    "",
                )
            cases = [report.summary(name, rounds[name], quiet[name]) for name in quiet]
            write_json(arguments.json, {"bench": "recovery", **document, "cases": cases})
    cases = [report.summary(name, rounds[name], quiet[name]) for name in quiet]
    cases += [{"system": name, "missing": why} for name, why in missing.items()]
    goals = report.goals(cases)
    show(report.text(cases, goals))
    document |= {"cases": cases, "goals": goals}
    if any("failed" in case or case.get("went_on", 0) < case.get("kills", 0) for case in cases):
        return document | {"verdict": "INCOMPLETE"}
    return document | {"verdict": "FAIL" if any(found["met"] is False for found in goals) else ""}


def _peers(names: Sequence[str], place: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Returns the interpreter by system, the version by peer, and the reason for a missing system by system."""
    pythons, versions, missing = dict[str, str](), dict[str, str](), dict[str, str]()
    for name in names:
        peer = SYSTEMS[name].peer
        pythons[name] = sys.executable
        if peer:
            try:
                pythons[name], versions[peer] = systems.peer_in(peer, place)
            except ServiceError as error:
                missing[name] = f"left out: {error}"
                del pythons[name]
    return pythons, versions, missing


def _calm(name: str, trial: Trial, python: str) -> dict[str, Any]:
    """Runs the system without a failure. Raises ServiceError if it does not come to its end."""
    found = systems.run(name, trial, python)
    ended = [mark for mark in found if mark["what"] == "ended"]
    if len(ended) != REPLICAS:
        said = systems.tail(trial)
        raise ServiceError(f"{SYSTEMS[name].words} did not come to its end without a failure\n{said}")
    rmtree(trial.directory)
    peak_mib = max(mark["peak_mib"] for mark in ended)
    return {"step_s": report.step_s(found), "peak_mib": peak_mib, "digest": ended[0]["digest"]}
