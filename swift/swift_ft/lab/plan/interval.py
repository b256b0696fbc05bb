"""How often to save a checkpoint, and whether the log pays: Young's and Daly's question with the log's own terms.

Failures come at random, one in `mtbf_s` on average. Without a log all work since the checkpoint is done again; with one
the lost group alone replays it, at `ratio` of its time, and the others lose nothing. An interval of `work_s` seconds of
work and `save_s` of saving then takes, failures during a recovery included (docs/planning.md derives it)::

    E = exp(down / mtbf) * (mtbf / ratio) * (exp(ratio * (work + save) / mtbf) - 1)

For ratio = 1 that is Daly's formula (Future Generation Computer Systems 22, 2006), and otherwise the same with the MTBF
mtbf / ratio: to the choice of an interval, a log that replays four times as fast is a job that fails a fourth as often.
`down_s`, what every recovery takes whatever the interval is, changes nothing about the choice.
"""

import math
from dataclasses import dataclass

NEWTON_STEPS_MAX = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What becomes of a job's time under one choice of groups."""

    step_s: float
    """With what logging adds to it."""
    save_s: float
    """For which a checkpoint holds training up."""
    down_s: float
    """Of a recovery, besides replay."""
    ratio: float
    """Time of a replayed step over `step_s`."""
    mtbf_s: float
    useful_step_s: float
    """Without a log."""

    def interval_s(self, steps: float) -> float:
        """Expected time for so many steps and a checkpoint."""
        return expected_s(steps * self.step_s, self.save_s, self.down_s, self.ratio, self.mtbf_s)

    def useful(self, steps: float) -> float:
        """The share of time that is training, 0 to 1."""
        return steps * self.useful_step_s / self.interval_s(steps)

    def best_steps(self, steps_max: float = math.inf) -> int:
        """The whole number of steps, at least 1, with the greatest useful share."""
        wanted = best_work_s(self.save_s, self.ratio, self.mtbf_s) / self.step_s
        wanted = max(1.0, min(wanted, steps_max))
        return max((math.floor(wanted), min(math.ceil(wanted), int(min(steps_max, 1e18)))), key=self.useful)


def expected_s(work_s: float, save_s: float, down_s: float, ratio: float, mtbf_s: float) -> float:
    """E above; infinite where it cannot be had any more."""
    try:
        growth = math.expm1(ratio * (work_s + save_s) / mtbf_s)
        return math.exp(down_s / mtbf_s) * (mtbf_s / ratio) * growth
    except OverflowError:
        return math.inf


def young_s(save_s: float, ratio: float, mtbf_s: float) -> float:
    """First order in save / mtbf (Young, CACM 17(9), 1974): sqrt(2 save mtbf / ratio)."""
    return math.sqrt(2 * save_s * mtbf_s / ratio)


def daly_s(save_s: float, ratio: float, mtbf_s: float) -> float:
    """Higher order (Daly 2006), for the MTBF mtbf / ratio."""
    mtbf_s /= ratio
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def best_work_s(save_s: float, ratio: float, mtbf_s: float) -> float:
    """Where E / work is least.

    dE/dwork = E / work, with x = ratio work / mtbf and c = ratio save / mtbf, is log(1 - x) + x + c = 0, which has one
    root in (0, 1) for c > 0. Newton's method from Young's x, kept between bounds that close in.
    """
    c = ratio * save_s / mtbf_s
    if c == 0:
        return 0.0
    low, high = 0.0, 1.0
    x = min(math.sqrt(2 * c), 0.9)
    for _ in range(NEWTON_STEPS_MAX):
        value = c - _above_line(x)
        if value > 0:
            low = x
        else:
            high = x
        following = x + value * (1 - x) / x  # the derivative is -x / (1 - x)
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - x) <= 1e-15 * x:
            break
        x = following
    return x * mtbf_s / ratio


def _above_line(x: float) -> float:
    """-log(1 - x) - x, without the cancellation of small x: their series."""
    if x > 0.01:
        return -math.log1p(-x) - x
    return sum(x**power / power for power in range(9, 1, -1))


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesBalance:
    """The log's bytes against those of the checkpoints that would shorten recovery as much.

    Everybody restoring a checkpoint that is K' steps apart is back as soon as with the log after

        down + (K' - 1) / 2 step + step / 2  =  recovery with the log

    so the log avoids K / K' - 1 of them in K steps.
    """

    log_bytes: int
    """K V: of one interval."""
    checkpoint_bytes: int
    """One checkpoint of all stages."""
    equal_interval_steps: float
    """K'; 0: no checkpoint is frequent enough."""
    avoided: float
    """Checkpoints; infinite if K' is 0."""

    @property
    def pays(self) -> bool:
        return self.log_bytes < self.checkpoint_bytes * self.avoided if self.checkpoint_bytes else False


def balance(
    *, steps: int, log_bytes: int, checkpoint_bytes: int, recovery_s: float, restore_s: float, step_s: float
) -> BytesBalance:
    """`restore_s`: everybody's recovery besides the steps that are done again, half a step of them included."""
    equal = max(0.0, 1 + 2 * (recovery_s - restore_s) / step_s)
    if equal < 1:  # not even one in every step would do
        return BytesBalance(
            log_bytes=log_bytes,
            checkpoint_bytes=checkpoint_bytes,
            equal_interval_steps=0.0,
            avoided=math.inf,
        )
    return BytesBalance(
        log_bytes=log_bytes,
        checkpoint_bytes=checkpoint_bytes,
        equal_interval_steps=equal,
        avoided=max(0.0, steps / equal - 1),
    )
