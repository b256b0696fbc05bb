"""What the marks of a run say: how long its ranks stood still, what was done again, who survived. Pure."""

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from swift.bench.peers.trial import PLACES, REPLICAS, SURVIVOR, VICTIM

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
    """Where the victim dies."""

    step: int
    place: str
    """In the step: one of `trial.PLACES`."""


def points(seed: int, count: int, first: int, last: int) -> list[Point]:
    """The same for every system. Steps from `first` to `last`, both included."""
    chance = random.Random(seed)
    return [Point(chance.randint(first, last), chance.choice(PLACES)) for _ in range(count)]


def judge(marks: Sequence[dict[str, Any]], reference: str) -> dict[str, Any]:
    """The figures of a run in which a replica died. ``failed`` in their place: it never went on.

    `reference`: digest of the weights of the run that did not fail. Seconds are from the kill. ``next_step_s`` is until
    the first step is done in which the victim had no part: the one behind the step of the kill, which survivors can
    finish without it if its gradients have reached them. ``lost_s`` is the same without the time of the new steps
    themselves.
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
    # A process that comes back when the others have ended begins from nothing: that is no part of the run.
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
        "replacement_s": _way(marks, kill),
    }


def _detected(marks: Sequence[dict[str, Any]], at: float) -> float | None:
    """Until the survivor has left what it was in. None: it was ended from outside, or never noticed."""
    told = (mark["at"] - at for mark in marks if mark["what"] == "broken" and mark["replica"] == SURVIVOR)
    return min((seconds for seconds in told if seconds > 0), default=None)


def step_s(marks: Sequence[dict[str, Any]]) -> float:
    """The median step of the survivor, behind the first tenth, which warms up."""
    at: list[float] = [
        mark["at"] for mark in marks if mark["what"] == "stepped" and mark["replica"] == SURVIVOR
    ]
    return statistics.median(b - a for a, b in pairwise(at[len(at) // 10 :]))


def _way(marks: Sequence[dict[str, Any]], kill: dict[str, Any]) -> dict[str, float]:
    """The way of the process that takes the victim's place, in seconds from the kill; a spare was started before it."""
    pids = {mark["pid"] for mark in marks if mark["replica"] == VICTIM} - {kill["pid"]}
    way: dict[str, float] = {}
    for mark in marks:
        if mark["pid"] in pids and mark["what"] in ("imported", "connected", "restored"):
            way |= {"started": mark["started"] - kill["at"]} if "started" in mark else {}
            way[mark["what"]] = mark["at"] - kill["at"]
    return way


def summary(
    system: str, rounds: Sequence[dict[str, Any]], undisturbed: Mapping[str, float]
) -> dict[str, Any]:
    """Medians over the kills after which it went on. `undisturbed`: of the run that did not fail."""
    done = [measured for measured in rounds if "failed" not in measured]
    about: dict[str, Any] = {
        "system": system,
        "rounds": list(rounds),
        "undisturbed": undisturbed,
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
    ways = [measured["replacement_s"] for measured in done]
    about["replacement_s"] = {
        name: statistics.median(way[name] for way in ways)
        for name in ("started", "imported", "connected", "restored")
        if all(name in way for way in ways)
    }
    return about
