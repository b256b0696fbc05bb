"""The table and the goals of `swift-ft bench recovery`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift.bench.peers.systems import INEXACT, SYSTEMS
from swift.bench.peers.trial import REPLICAS

GOAL_TORCHRUN = 10.0
"""Time lost under torchrun with DCP over swift's, at least."""
OURS = "swift"
HEAD = (
    f"{'':<28}{'detected':>10}{'next new step':>15}{'lost':>9}{'at most':>9}{'steps again':>13}{'with fewer':>12}"
    f"{'step':>9}{'over torchrun':>15}{'memory':>10}{'survivor':>11}{'same bits':>11}"
)


def row(case: Mapping[str, Any], base: Mapping[str, float] | None) -> str:
    """One system as a line of text. `base`: torchrun's run without a failure."""
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
    """How the process in the victim's place went, as a line of text."""
    words = [f"{name} {seconds:+.2f} s" for name, seconds in case["replacement_s"].items()]
    return f"{SYSTEMS[case['system']].words:<30}{', '.join(words) or '-'}"


def goals(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``what``, ``value`` and ``met`` of each; None: a system that it compares with is missing."""
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
    """As a line of text."""
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
