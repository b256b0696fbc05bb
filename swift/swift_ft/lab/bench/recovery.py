"""`swift-ft bench recovery`: one of two ranks dies; its cost under torchrun, torchft, NVRx and swift's strategies.

Each system trains the same model on the same batches with two replicas, in steps of the same length, by a trainer as
its user would write it (`swift/swift_ft/lab/bench/peers`). A replica kills itself with SIGKILL at points (a step and a
place in it) that are drawn from a seed and equal for all systems. The trainers' marks show when the survivor left the
step, when the first step without the victim was done, which steps were repeated, whether the survivor kept its process,
and whether the final weights are bitwise those of the same trainer in a run without failure. Every round runs each
system once, in turn. Before the rounds each system trains once without a failure and without the wait in its steps,
which gives its cost in normal operation: the median step, and the peak memory of a replica without its helper
processes.

Peers have environments of their own, DIR/torchft and DIR/nvrx of --peers DIR. One that is not there is left out, with
the reason.
"""

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from swift_ft.cli_parser import Parser, write_json
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.peers import systems
from swift_ft.lab.bench.peers.systems import INEXACT, SYSTEMS
from swift_ft.lab.bench.peers.trial import PLACES, REPLICAS, SURVIVOR, Trial
from swift_ft.text import show, table, tell

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
    show([*intro(document["machine"], metadata.version("torch"), versions, settings), ""])
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
        for number, point in enumerate(points(settings["seed"], kills, settings["first"], settings["last"])):
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
                judged = judge(systems.run(name, trial, pythons[name]), undisturbed["digest"])
                rmtree(directory)
                rounds.setdefault(name, []).append(judged)
                lost = judged.get("failed") or f"{judged['lost_s']:.2f} s lost"
                tell(
                    f"{number + 1} of {kills}: {SYSTEMS[name].words}: step {point.step}, {point.place}: {lost}",
                    "",
                )
            cases = [summary(name, rounds[name], quiet[name]) for name in quiet]
            write_json(arguments.json, {"bench": "recovery", **document, "cases": cases})
    cases += [{"system": name, "missing": why} for name, why in missing.items()]
    reached = goals(cases)
    show(text(cases, reached))
    document |= {"cases": cases, "goals": reached}
    if any("failed" in case or case.get("went_on", 0) < case.get("kills", 0) for case in cases):
        return document | {"verdict": "INCOMPLETE"}
    return document | {"verdict": "FAIL" if any(found["met"] is False for found in reached) else ""}


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
    return {"step_s": step_s(found), "peak_mib": peak_mib, "digest": ended[0]["digest"]}


# Evaluation of a run's marks: how long its ranks stood still, which steps were repeated, who survived. Pure.

MEDIANS = (
    "next_step_s",
    "lost_s",
    "all_again_s",
    "detect_s",
    "steps_again",
    "steps_with_fewer",
    "restarted",
    "step_s",
)


class Point(NamedTuple):
    """A point at which the victim dies."""

    step: int
    place: str
    """Place in the step, one of `trial.PLACES`."""


def points(seed: int, count: int, first: int, last: int) -> list[Point]:
    """Draws the points, equal for every system. Steps are from `first` to `last`, both included."""
    chance = random.Random(seed)
    return [Point(chance.randint(first, last), chance.choice(PLACES)) for _ in range(count)]


def judge(marks: Sequence[dict[str, Any]], reference: str) -> dict[str, Any]:
    """Returns the figures of a run in which a replica died, or only ``failed`` if it never continued.

    `reference`: digest of the weights of the run without failure. Seconds are from the kill. ``next_step_s`` is until
    the first step is done in which the victim had no part. That is the step after the kill's: survivors can finish the
    kill's step without the victim if its gradients have reached them. ``lost_s`` is the same without the time of the
    new steps themselves.
    """
    kill = next((mark for mark in marks if mark["what"] == "killed"), None)
    if kill is None:
        return {"failed": "no replica has come to the step of the kill"}
    at, step = kill["at"], kill["step"]
    after = [mark for mark in marks if mark["what"] == "stepped" and mark["at"] > at]
    new: dict[int, list[float]] = {}
    for mark in after:
        if mark["step"] >= step:
            new.setdefault(mark["step"], []).append(mark["at"] - at)
    if step + 1 not in new:
        return {"failed": "no step was begun and done after the kill"}
    before = [
        mark["at"]
        for mark in marks
        if mark["what"] == "stepped" and mark["at"] < at and mark["replica"] == SURVIVOR
    ]
    # A process that returns after the others have ended starts from scratch: that is not part of the run.
    over = min((mark["at"] for mark in marks if mark["what"] == "ended"), default=float("inf"))
    together = [max(times) for number, times in new.items() if number > step and len(times) == REPLICAS]
    processes = [
        list(dict.fromkeys(mark["pid"] for mark in marks if mark["replica"] == replica))
        for replica in range(REPLICAS)
    ]
    digests = [mark["digest"] for mark in marks if mark["what"] == "ended"]
    step_s, next_step_s = statistics.median(b - a for a, b in pairwise(before)), min(new[step + 1])
    steps = sum(number in new for number in (step, step + 1))
    return {
        "step_s": step_s,
        "next_step_s": next_step_s,
        "lost_s": max(0.0, next_step_s - steps * step_s),
        "detect_s": _detected(marks, at),
        "all_again_s": min(together) if together else None,
        "steps_again": len({mark["step"] for mark in after if mark["step"] < step and mark["at"] < over}),
        "steps_with_fewer": sum(len(times) < REPLICAS for number, times in new.items() if number > step),
        "pids": processes,
        "restarted": sum(len(pids) > 1 for pids in processes),
        "survived": len(processes[SURVIVOR]) == 1
        and any(mark["what"] == "ended" and mark["replica"] == SURVIVOR for mark in marks),
        "same_bits": len(digests) == REPLICAS and set(digests) == {reference},
    }


def _detected(marks: Sequence[dict[str, Any]], at: float) -> float | None:
    """Returns the seconds until the survivor left its step; None if it was ended from outside or never noticed."""
    told = (mark["at"] - at for mark in marks if mark["what"] == "broken" and mark["replica"] == SURVIVOR)
    return min((seconds for seconds in told if seconds > 0), default=None)


def step_s(marks: Sequence[dict[str, Any]]) -> float:
    """Returns the survivor's median step, without the first tenth as a warm-up."""
    at: list[float] = [
        mark["at"] for mark in marks if mark["what"] == "stepped" and mark["replica"] == SURVIVOR
    ]
    return statistics.median(b - a for a, b in pairwise(at[len(at) // 10 :]))


def summary(system: str, rounds: Sequence[dict[str, Any]], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Computes medians over the kills after which the system continued. `undisturbed`: the run without failure."""
    done = [measured for measured in rounds if "failed" not in measured]
    about: dict[str, Any] = {
        "system": system,
        "rounds": list(rounds),
        "undisturbed": dict(undisturbed),
        "kills": len(rounds),
        "went_on": len(done),
        "survived": sum(bool(measured.get("survived")) for measured in rounds),
        "exact": sum(bool(measured.get("same_bits")) for measured in rounds),
    }
    if not done:
        return about | {"failed": rounds[0]["failed"] if rounds else "it was not killed"}
    for name in MEDIANS:
        values = [measured[name] for measured in done if measured[name] is not None]
        about[name] = statistics.median(values) if len(values) == len(done) else None
    about["lost_max_s"] = max(measured["lost_s"] for measured in done)
    about["same_bits"] = about["exact"] == len(rounds)
    return about


GOAL_TORCHRUN = 10.0
"""Lower limit of the time lost under torchrun with DCP over swift's."""
OURS = "swift"
HEAD = (
    *("", "detected", "next new step", "lost", "at most", "steps again", "with fewer"),
    *("step", "over torchrun", "memory", "survivor", "same bits"),
)


def row(case: Mapping[str, Any], base: Mapping[str, float] | None) -> list[str]:
    """Formats the cells of one system that went on. `base`: torchrun's run without a failure."""
    quiet, of = case["undisturbed"], case["kills"]
    words = SYSTEMS[case["system"]].words
    return [
        words if case["went_on"] == of else f"{words} ({case['went_on']} of {of} went on)",
        "-" if case["detect_s"] is None else _time(case["detect_s"]),
        *(_time(case[name]) for name in ("next_step_s", "lost_s", "lost_max_s")),
        *(f"{case[name]:g}" for name in ("steps_again", "steps_with_fewer")),
        f"{quiet['step_s'] * 1e3:.1f} ms",
        "-" if base is None else f"{(quiet['step_s'] - base['step_s']) * 1e3:+.1f} ms",
        "-" if base is None else f"{quiet['peak_mib'] - base['peak_mib']:+.0f} MiB",
        *(f"{case[name]} of {of}" for name in ("survived", "exact")),
    ]


def text(cases: Sequence[Mapping[str, Any]], goals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats all systems: figures, or why there are none, how the lost place was taken, and the goals."""
    base = next(
        (case["undisturbed"] for case in cases if case["system"] == "torchrun" and "kills" in case), None
    )
    done = [case for case in cases if "lost_s" in case]
    others = [case for case in cases if "lost_s" not in case]
    return [
        *table([HEAD, *(row(case, base) for case in done)]),
        *(f"{SYSTEMS[case['system']].words}: {case.get('missing') or case.get('failed')}" for case in others),
        "",
        *map(goal, goals),
    ]


def goals(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``what``, ``value`` and ``met`` of each goal; None if a system of the comparison is missing."""
    by = {case["system"]: case for case in cases if "lost_s" in case and case["went_on"] == case["kills"]}
    ours, torchrun = by.get(OURS), by.get("torchrun")
    torchft = {
        name: case["lost_s"]
        for name, case in by.items()
        if SYSTEMS[name].peer == "torchft" and not case["steps_again"]
    }
    spare = "" if any("spares" in SYSTEMS[name].settings for name in torchft) else " (it has no spare)"
    swift = [case for case in cases if "kills" in case and SYSTEMS[case["system"]].strategy]
    exact = [case for case in swift if case["system"] not in INEXACT]
    ratio = None
    if ours is not None and torchrun is not None:
        ratio = torchrun["lost_s"] / max(ours["lost_s"], 1e-9)
    found: list[tuple[str, float | None, bool | None]] = [
        (
            f"torchrun with DCP loses at least {GOAL_TORCHRUN:g} times as much time as swift",
            ratio,
            None if ratio is None else ratio >= GOAL_TORCHRUN,
        )
    ]
    for alone, which in ((False, "leaves no batch out"), (True, "goes on with half of the batches")):
        times = [lost_s for name, lost_s in torchft.items() if (name in INEXACT) is alone]
        over = ours["lost_s"] / min(times) if ours is not None and times else None
        what = f"swift over torchft's best that {which}{spare}, in time lost: at most 1"
        found.append((what, over, None if over is None else over <= 1))
    alive = all(case["survived"] == case["kills"] for case in swift) if swift else None
    same = all(case["exact"] == case["kills"] for case in exact) if exact else None
    found.append(("under swift the survivor keeps its process in all kills", None, alive))
    found.append(("under swift's exact strategies the final bits are the same", None, same))
    return [{"what": what, "value": value, "met": met} for what, value, met in found]


def goal(found: Mapping[str, Any]) -> str:
    """Formats a goal as a line of text."""
    how = {None: "not measured", True: "met", False: "missed"}[found["met"]]
    value = "" if found["value"] is None else f"{found['value']:.3g}, "
    return f"goal: {found['what']}: {value}{how}"


def intro(machine: str, torch: str, peers: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
    named = "".join(f"; {name} {words}" for name, words in peers.items())
    steps = f"a step from {settings['first']} to {settings['last']} of {settings['steps']}"
    return [
        f"{machine}; torch {torch}{named}",
        f"{REPLICAS} replicas, one dies in {steps}; a checkpoint every {settings['every']} steps; medians of "
        f"{settings['kills']} kills, at the same points for all (seed {settings['seed']})",
        "step and memory are those of a run without failures, whose steps do not wait "
        f"{settings['wait_ms']:g} ms",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"
