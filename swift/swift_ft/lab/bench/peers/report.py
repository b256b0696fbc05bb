"""Evaluation, table and goals of `swift-ft bench recovery`. Pure."""

import html
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from swift_ft.lab.bench.peers.systems import INEXACT, SYSTEMS
from swift_ft.lab.bench.peers.trial import PLACES, REPLICAS, SURVIVOR, VICTIM
from swift_ft.lab.chart import Scale

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
        "replacement_s": _way(marks, kill),
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


def _way(marks: Sequence[dict[str, Any]], kill: dict[str, Any]) -> dict[str, float]:
    """Returns the replacement process's milestones in seconds from the kill; negative for the start of a spare."""
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
    """Computes medians over the kills after which the system continued. `undisturbed`: the run without failure."""
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


# SVG of the time that each kill has cost: a row per system, a dot per kill. Pure.

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 640, 214, 22, 66, 30, 46
"""Pixels: width of the drawing, the margins that hold the labels, and the height of a row."""
FLOOR_S = 0.01
_STYLE = (
    "svg{background:#fff}text{font:15px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.dot{fill-opacity:.45}"
)
_COLOURS = {True: "#0969da", False: "#57606a"}
"""Colours of swift (True) and of all others."""


def draw_kills(document: Mapping[str, Any]) -> str:
    """Draws the document that `--json` writes: the systems that continued after a kill."""
    cases = [case for case in document["cases"] if "lost_s" in case]
    lost = {case["system"]: [r["lost_s"] for r in case["rounds"] if "lost_s" in r] for case in cases}
    every = [max(seconds, FLOOR_S) for each in lost.values() for seconds in each] or [FLOOR_S, 1.0]
    low = math.floor(math.log10(min(every)))
    high = max(low + 1, math.ceil(math.log10(max(every))))
    x = Scale(low, high, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * max(1, len(cases))
    shapes = _axis(low, high, x, bottom)
    for number, case in enumerate(cases):
        shapes += _row(case, lost[case["system"]], TOP + ROW * number + ROW / 2, x)
    words = f"a dot for each of {document['settings']['kills']} kills, a bar at the median"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" '
        f'aria-label="time lost by a kill, by system"><style>{_STYLE}</style>'
        f'<text class="title" x="4" y="22">Time that a kill costs</text>'
        f'<text class="words" x="4" y="45">{html.escape(words)}</text>{"".join(shapes)}</svg>\n'
    )


def _axis(low: int, high: int, x: Scale, bottom: float) -> list[str]:
    shapes = []
    for power in range(low, high + 1):
        at, seconds = x(power), 10.0**power
        word = f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
        shapes.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        shapes.append(f'<text x="{at:.1f}" y="{bottom + 22}" text-anchor="middle">{word}</text>')
    return shapes


def _row(case: Mapping[str, Any], lost: Sequence[float], y: float, x: Scale) -> list[str]:
    system = SYSTEMS[case["system"]]
    colour = _COLOURS[bool(system.strategy)]
    shapes = [f'<text x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end">{html.escape(system.words)}</text>']
    for seconds in lost:
        words = f"{system.words}: {seconds:.3g} s"
        shapes.append(
            f'<circle class="dot" cx="{x(math.log10(max(seconds, FLOOR_S))):.1f}" cy="{y:.1f}" r="5" fill="{colour}">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    at = x(math.log10(max(case["lost_s"], FLOOR_S)))
    shapes.append(
        f'<line class="median" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 10:.1f}" y2="{y + 10:.1f}" stroke="{colour}" '
        'stroke-width="3"/>'
    )
    return shapes


GOAL_TORCHRUN = 10.0
"""Lower limit of the time lost under torchrun with DCP over swift's."""
OURS = "swift"
HEAD = (
    f"{'':<28}{'detected':>10}{'next new step':>15}{'lost':>9}{'at most':>9}{'steps again':>13}{'with fewer':>12}"
    f"{'step':>9}{'over torchrun':>15}{'memory':>10}{'survivor':>11}{'same bits':>11}"
)


def row(case: Mapping[str, Any], base: Mapping[str, float] | None) -> str:
    """Formats one system as a line of text. `base`: torchrun's run without a failure."""
    front = f"{SYSTEMS[case['system']].words:<28}"
    if "missing" in case or "failed" in case:
        return front + str(case.get("missing") or case.get("failed"))
    quiet, of = case["undisturbed"], case["kills"]
    seen = "-" if case["detect_s"] is None else _time(case["detect_s"])
    over = "-" if base is None else f"{(quiet['step_s'] - base['step_s']) * 1e3:+.1f} ms"
    more = "-" if base is None else f"{quiet['peak_mib'] - base['peak_mib']:+.0f} MiB"
    if case["went_on"] < of:
        front = f"{front.rstrip()} ({case['went_on']} of {of} went on)  "
    return (
        f"{front}{seen:>10}{_time(case['next_step_s']):>15}{_time(case['lost_s']):>9}{_time(case['lost_max_s']):>9}"
        f"{case['steps_again']:>13g}{case['steps_with_fewer']:>12g}{quiet['step_s'] * 1e3:>6.1f} ms{over:>15}{more:>10}"
        f"{_of(case['survived'], of):>11}{_of(case['exact'], of):>11}"
    )


def way(case: Mapping[str, Any]) -> str:
    """Formats the milestones of the replacement process as a line of text."""
    words = [f"{name} {seconds:+.2f} s" for name, seconds in case["replacement_s"].items()]
    return f"{SYSTEMS[case['system']].words:<30}{', '.join(words) or '-'}"


def goals(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``what``, ``value`` and ``met`` of each goal; None if a system of the comparison is missing."""
    by = {case["system"]: case for case in cases if "lost_s" in case and case["went_on"] == case["kills"]}
    ours, torchrun = by.get(OURS), by.get("torchrun")
    ratio = None
    if ours is not None and torchrun is not None:
        ratio = torchrun["lost_s"] / max(ours["lost_s"], 1e-9)
    torchft = [
        case for name, case in by.items() if SYSTEMS[name].peer == "torchft" and not case["steps_again"]
    ]
    over = {
        alone: _over(ours, [case["lost_s"] for case in torchft if (case["system"] in INEXACT) is alone])
        for alone in (False, True)
    }
    swift = [case for case in cases if "kills" in case and SYSTEMS[case["system"]].strategy]
    alive = all(case["survived"] == case["kills"] for case in swift) if swift else None
    exact = [case for case in swift if case["system"] not in INEXACT]
    same = all(case["exact"] == case["kills"] for case in exact) if exact else None
    return [
        {
            "what": f"torchrun with DCP loses at least {GOAL_TORCHRUN:g} times as much time as swift",
            "value": ratio,
            "met": None if ratio is None else ratio >= GOAL_TORCHRUN,
        },
        *(
            {
                "what": f"swift over torchft's best that {words}, in time lost: at most 1",
                "value": over[alone],
                "met": None if (value := over[alone]) is None else value <= 1,
            }
            for alone, words in ((False, "leaves no batch out"), (True, "goes on with half of the batches"))
        ),
        {"what": "under swift the survivor keeps its process in all kills", "value": None, "met": alive},
        {"what": "under swift's exact strategies the final bits are the same", "value": None, "met": same},
    ]


def _over(ours: Mapping[str, Any] | None, theirs: Sequence[float]) -> float | None:
    return float(ours["lost_s"]) / min(theirs) if ours is not None and theirs else None


def goal(found: Mapping[str, Any]) -> str:
    """Formats a goal as a line of text."""
    how = {None: "not measured", True: "met", False: "missed"}[found["met"]]
    value = "" if found["value"] is None else f"{found['value']:.3g}, "
    return f"goal: {found['what']}: {value}{how}"


def intro(machine: str, torch: str, peers: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    named = "".join(f"; {name} {words}" for name, words in peers.items())
    steps = f"a step from {settings['first']} to {settings['last']} of {settings['steps']}"
    return (
        f"{machine}; torch {torch}{named}\n{REPLICAS} replicas, one dies in {steps}; a checkpoint every "
        f"{settings['every']} steps; medians of {settings['kills']} kills, at the same points for all (seed "
        f"{settings['seed']})\nstep and memory are those of a run without failures, whose steps do not wait "
        f"{settings['wait_ms']:g} ms"
    )


def _of(count: int, all_: int) -> str:
    return f"{count} of {all_}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"
