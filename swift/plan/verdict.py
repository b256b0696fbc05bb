"""Does the log pay, and how often is a checkpoint to be saved? docs/planning.md derives it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift.plan.interval import Pace, balance, daly_s, young_s
from swift.plan.model import CostModel, Cuts
from swift.plan.profile import Cap


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One choice of groups at its best interval."""

    cuts: Cuts
    steps: int
    """From checkpoint to checkpoint."""
    useful: float
    """The share of time that is training, 0 to 1."""
    limited_by_cap: bool
    """More steps would be better, and the cap does not allow them."""


def pays_bytes(model: CostModel, chosen: Cuts) -> dict[str, Any]:
    """The log's bytes against those of the checkpoints that it avoids."""
    profile = model.profile
    restore_s, step_s = model.means((), 0.0)
    balanced = balance(
        steps=profile.checkpoint_interval_steps,
        log_bytes=model.bytes_per_step(chosen) * profile.checkpoint_interval_steps,
        checkpoint_bytes=sum(profile.checkpoint_bytes),
        recovery_s=model.expected_recovery_s(chosen),
        restore_s=restore_s,
        step_s=step_s,
    )
    return {**asdict(balanced), "pays": balanced.pays}


def pace(model: CostModel, cuts: Cuts) -> Pace:
    """What the interval between checkpoints depends on, with these cuts; in seconds."""
    profile, step_s = model.profile, model.step_s + model.overhead_s(cuts)
    # Replay is counted from the failure on, not in whole steps: half a step more of it, which the rest had.
    down_s, replay_s = model.means(cuts, -0.5)
    save_s = profile.checkpoint_stall_s
    return Pace(
        step_s=step_s,
        save_s=model.save_s if save_s is None else save_s,
        down_s=max(0.0, down_s),
        ratio=replay_s / step_s,
        mtbf_s=model.mtbf_s,
        useful_step_s=model.step_s,
    )


def steps_max(model: CostModel, cuts: Cuts, cap: Cap | None) -> float:
    """The longest interval that keeps to the cap; below 1 if none does."""
    if cap is None:
        return math.inf
    if cap.kind == "storage_bytes":
        per_step = model.bytes_per_step(cuts)
        return cap.value // per_step if per_step else math.inf
    bounds = [model.means(cuts, 0.0)] if cap.kind == "recovery_s" else model.parts(cuts)
    # down + (K - 1) / 2 replay <= cap; an interval that meets it to the last bit is one.
    return min(math.floor(1 + 2 * (cap.value - down_s) / replay_s + 1e-9) for down_s, replay_s in bounds)


def option(model: CostModel, cuts: Cuts, cap: Cap | None) -> Option | None:
    """These cuts with their best interval, in steps. None: the cap leaves no interval at all."""
    most = steps_max(model, cuts, cap)
    if most < 1:
        return None
    time = pace(model, cuts)
    steps = time.best_steps(most)
    return Option(
        cuts=cuts,
        steps=steps,
        useful=time.useful(steps),
        limited_by_cap=steps == most and steps < time.best_steps(),
    )


def intervals(model: CostModel, chosen: Cuts, choices: Iterable[Cuts], cap: Cap | None) -> dict[str, Any]:
    """The best interval with the chosen groups, without a log, and with the best of `choices`.

    Groups are those that are worth having at the profile's own interval, with as many copies as there.
    """
    mine, alone = option(model, chosen, cap), option(model, (), cap)
    others = [option(model, cuts, cap) for cuts in choices]
    best = _best([alone, mine, *others])
    with_log, without = pace(model, chosen), pace(model, ())
    formula = (with_log.save_s, with_log.ratio, with_log.mtbf_s)
    now = model.profile.checkpoint_interval_steps
    return {
        "save_s": with_log.save_s,
        "replay_ratio": with_log.ratio,
        "young_s": young_s(*formula),
        "daly_s": daly_s(*formula),
        "now": {
            "steps": now,
            "useful": with_log.useful(now),
            "useful_without_log": without.useful(now),
        },
        **{
            name: None if interval is None else _shown(model, interval)
            for name, interval in (("chosen", mine), ("without_log", alone), ("best", best))
        },
        "log_pays": best is not None and best.cuts != (),
    }


def _shown(model: CostModel, option: Option) -> dict[str, Any]:
    return {
        "groups": len(option.cuts) + 1,
        "logged": [model.edges[cut] for cut in option.cuts],
        "steps": option.steps,
        "useful": option.useful,
        "limited_by_cap": option.limited_by_cap,
    }


def _best(options: Sequence[Option | None]) -> Option | None:
    """The first of those with the greatest useful share: what logs nothing stands first."""
    return max((option for option in options if option is not None), key=lambda o: o.useful, default=None)
