"""Checkpoint intervals, and whether logging pays off: Young's and Daly's question with the log's own terms.

Failures are random, one in `mtbf_s` on average. Without a log, all work since the checkpoint is repeated. With one,
only the lost group replays it, at `ratio` of its time; the others lose no work. The expected time of an interval with
`work_s` seconds of work and `save_s` of saving, failures during recovery included (docs/planning.md derives it)::

    E = exp(down / mtbf) * (mtbf / ratio) * (exp(ratio * (work + save) / mtbf) - 1)

For ratio = 1 that is Daly's formula (Future Generation Computer Systems 22, 2006); otherwise it is Daly's with the MTBF
mtbf / ratio. So a log that replays four times as fast acts on the interval like a failure rate a fourth as high.
`down_s` is the part of a recovery that does not depend on the interval; it does not affect the optimum.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Time model of a job under one choice of groups."""

    step_s: float
    """Time of a step, with the overhead of logging."""
    save_s: float
    """Time for which a checkpoint stalls training."""
    down_s: float
    """Time of a recovery without the replay."""
    ratio: float
    """Time of a replayed step over `step_s`."""
    mtbf_s: float
    useful_step_s: float
    """Time of a step without a log."""

    def useful(self, steps: float) -> float:
        """Returns the share of time that is training, 0 to 1."""
        interval_s = expected_s(steps * self.step_s, self.save_s, self.down_s, self.ratio, self.mtbf_s)
        return steps * self.useful_step_s / interval_s

    def best_steps(self, steps_max: float = math.inf) -> int:
        """Returns the number of steps, at least 1, with the greatest useful share."""
        wanted = best_work_s(self.save_s, self.ratio, self.mtbf_s) / self.step_s
        wanted = max(1.0, min(wanted, steps_max))
        return max((math.floor(wanted), min(math.ceil(wanted), int(min(steps_max, 1e18)))), key=self.useful)


def expected_s(work_s: float, save_s: float, down_s: float, ratio: float, mtbf_s: float) -> float:
    """Returns E as defined above; infinity if it overflows."""
    try:
        growth = math.expm1(ratio * (work_s + save_s) / mtbf_s)
        return math.exp(down_s / mtbf_s) * (mtbf_s / ratio) * growth
    except OverflowError:
        return math.inf


def best_work_s(save_s: float, ratio: float, mtbf_s: float) -> float:
    """Returns the work between checkpoints that minimizes E / work.

    With x = ratio work / mtbf and c = ratio save / mtbf, dE/dwork = E / work becomes log(1 - x) + x + c = 0. Its root
    in [0, 1] is 1 + W(-exp(-1 - c)), with Lambert's W. For small c, two terms of its series avoid cancellation.
    """
    c = ratio * save_s / mtbf_s
    if c < 1e-8:
        x = math.sqrt(2 * c) - 2 * c / 3
    else:
        from scipy.special import lambertw  # takes longer to import than all the rest of the command

        x = 1.0 + lambertw(-math.exp(-1 - c)).real
    return float(x) * mtbf_s / ratio
