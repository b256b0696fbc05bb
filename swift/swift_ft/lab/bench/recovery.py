"""`swift-ft bench recovery`: one of two ranks dies; its cost under torchrun, torchft, NVRx and swift's strategies.

Each system trains the same model on the same batches with two replicas, in steps of the same length, by a trainer as
its user would write it (`swift/swift_ft/lab/bench/peers`). A replica kills itself with SIGKILL at points (a step and a
place in it) that are drawn from a seed and equal for all systems. The trainers' marks show when the survivor left the
step, when the first step without the victim was done, which steps were repeated, which processes were replaced, and
whether the final weights are bitwise those of the same trainer in a run without failure. Every round runs each system
once, in turn. Before the rounds each system trains once without a failure and without the wait in its steps, which
gives its cost in normal operation: the median step, and the peak memory of a replica without its helper processes.

Peers are installed in separate environments, in --peers. One that cannot be installed is left out, with the reason.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.peers import report, systems
from swift_ft.lab.bench.peers.systems import SYSTEMS, tail
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial
from swift_ft.text import show


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--plot", type=Path, metavar="PATH", help="draw the time lost as an SVG file")
    add("--system", choices=SYSTEMS, action="append", help="may be repeated (default: all)")
    add("--kills", type=int, default=20, metavar="N", help="of each system; default %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the points; default %(default)s")
    add("--steps", type=int, default=300, metavar="N", help="default %(default)s")
    add("--checkpoint-every", type=int, default=50, metavar="N", help="default %(default)s")
    add("--wait-ms", type=float, default=10.0, metavar="MS", help="in each step; default %(default)s")
    add("--peers", type=Path, metavar="DIR", help="their environments, made there once (default: temporary)")
    add("--directory", type=Path, metavar="DIR", help="of the runs (default: temporary)")


def run(arguments: Any) -> dict[str, Any]:
    """The verdict is FAIL if a goal is missed, INCOMPLETE if a system did not continue after each kill."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the child processes are ended, too
    every, steps = arguments.checkpoint_every, arguments.steps
    if every < 3 or steps < 3 * every or arguments.kills < 1 or arguments.wait_ms < 0:
        raise UsageError(
            "bench recovery: give 1 kill or more, a wait of 0 ms or more, --checkpoint-every of 3 or more, and "
            "--steps of at least 3 times that"
        )
    output.check_json(arguments.plot, "--plot")
    with output.place(arguments.directory) as place:
        names = list(dict.fromkeys(arguments.system or SYSTEMS))
        pythons, versions, missing = _peers(names, arguments.peers or Path(place, "peers"))
        settings = {
            "kills": arguments.kills,
            "seed": arguments.seed,
            "steps": steps,
            "every": every,
            "wait_ms": arguments.wait_ms,
            "first": every,
            "last": steps - every - 1,
        }
        machine = output.machine()
        print(report.intro(machine, metadata.version("torch"), versions, settings) + "\n", flush=True)
        document: dict[str, Any] = {"bench": "recovery", "machine": machine}
        document |= {"peers": versions, "settings": settings}
        cases = _Measuring(Path(place), pythons, settings, missing, document, arguments.json).cases()
    goals = report.goals(cases)
    show(report.text(cases, goals))
    document |= {"cases": cases, "goals": goals}
    if arguments.plot is not None:
        output.write_text(arguments.plot, report.draw_kills(document))
    if any("failed" in case or case.get("went_on", 0) < case.get("kills", 0) for case in cases):
        return document | {"verdict": "INCOMPLETE"}
    return document | {"verdict": "FAIL" if any(found["met"] is False for found in goals) else ""}


def _peers(names: Sequence[str], place: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Returns the interpreter by system, the version by peer, and the reason for a missing system by system."""
    pythons, versions, missing = dict[str, str](), dict[str, str](), dict[str, str]()
    place.mkdir(parents=True, exist_ok=True)
    found: dict[str, str | systems.Missing] = {"": sys.executable}
    for name in names:
        peer = SYSTEMS[name].peer
        if peer not in found:
            try:
                found[peer] = systems.python_of(peer, place)
                versions[peer] = systems.version_of(peer, str(found[peer]))
            except systems.Missing as why:
                found[peer] = why
        which = found[peer]
        if isinstance(which, str):
            pythons[name] = which
        else:
            missing[name] = f"left out: {which}"
    return pythons, versions, missing


class _Measuring:
    """Rounds of all systems. The results so far are written after each round."""

    def __init__(
        self,
        place: Path,
        pythons: Mapping[str, str],
        settings: Mapping[str, Any],
        missing: Mapping[str, str],
        document: Mapping[str, Any],
        json: Path | None,
    ) -> None:
        self._place, self._settings, self._document, self._json = place, settings, document, json
        self._pythons, self._missing = dict(pythons), dict(missing)
        self._digests: dict[str, str] = {}
        self._undisturbed: dict[str, dict[str, float]] = {}
        self._rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
        self._began = time.monotonic()
        self._done = 0

    def cases(self) -> list[dict[str, Any]]:
        """Runs everything and returns the summary of each system."""
        for name in list(self._pythons):
            try:
                self._calm(name)
            except ServiceError as error:
                if not SYSTEMS[name].peer:
                    raise
                # A peer failed: the others can be compared without it.
                self._missing[name] = f"left out: {' '.join(str(error).split())[:200]}"
                del self._pythons[name]
        settings = self._settings
        drawn = report.points(settings["seed"], settings["kills"], settings["first"], settings["last"])
        for number, point in enumerate(drawn):
            for name in self._pythons:
                self._killed(name, number, point)
            output.write_json(self._json, {**self._document, "cases": self._summaries()})
        return self._summaries()

    def _summaries(self) -> list[dict[str, Any]]:
        found = [
            report.summary(name, rounds, self._undisturbed[name])
            for name, rounds in self._rounds.items()
            if rounds
        ]
        return found + [{"system": name, "missing": why} for name, why in self._missing.items()]

    def _calm(self, name: str) -> None:
        trial = self._trial(f"{name}.calm", None, 0.0)
        found = systems.run(name, trial, self._pythons[name])
        ended = [mark for mark in found if mark["what"] == "ended"]
        if len(ended) != REPLICAS:
            raise ServiceError(
                f"{SYSTEMS[name].words} did not come to its end without a failure\n{tail(trial)}"
            )
        self._digests[name] = ended[0]["digest"]
        peak = max(mark["peak_mib"] for mark in ended)
        self._undisturbed[name] = {"step_s": report.step_s(found), "peak_mib": peak}
        self._over(name, trial, "without a failure")

    def _killed(self, name: str, number: int, point: report.Point) -> None:
        trial = self._trial(f"{name}.{number}", point, self._settings["wait_ms"] / 1e3)
        judged = report.judge(systems.run(name, trial, self._pythons[name]), self._digests[name])
        self._rounds[name].append(judged)
        lost = judged.get("failed") or f"{judged['lost_s']:.2f} s lost"
        self._over(name, trial, f"step {point.step}, {point.place}: {lost}")

    def _trial(self, name: str, point: report.Point | None, wait_s: float) -> Trial:
        return Trial(
            directory=str(self._place / name),
            steps=self._settings["steps"],
            every=self._settings["every"],
            kill_step=None if point is None else point.step,
            kill_place="" if point is None else point.place,
            wait_s=wait_s,
        )

    def _over(self, name: str, trial: Trial, what: str) -> None:
        rmtree(trial.directory)
        self._done += 1
        left = len(self._pythons) * (self._settings["kills"] + 1) - self._done
        took = (time.monotonic() - self._began) / self._done
        print(
            f"{SYSTEMS[name].words}: {what} ({self._done} runs done, about {left * took / 60:.0f} min left)",
            file=sys.stderr,
            flush=True,
        )
