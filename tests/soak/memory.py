"""Whether memory stays flat: a stated rule over samples of resident memory. Pure.

A process that is killed begins anew, and every process grows until its queues have been full once. So the slopes
are taken within the lives of a role's processes, each without its warm-up, and all of them together give one
median: the Theil-Sen line, which neither a restart nor a burst moves.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PAIR_S_MIN = 4.0
"""Pairs of samples that are closer than this say nothing but noise."""


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    pid: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When memory counts as flat."""

    warm_up_s: float = 30.0
    """Of each process: until its queues were full once, and the memory that it keeps for them was touched."""
    percent_per_minute_max: float = 3.0
    thirds_percent_max: float = 20.0
    """From the first to the last third of the run: what grows from life to life, such as what a server reads back."""
    observed_s_min: float = 60.0
    """So much of a role must be seen after warm-ups, all lives together, or nothing is said about it."""

    def words(self) -> str:
        return (
            f"flat: the median slope between samples of one process, its first {self.warm_up_s:g} s left out, is at "
            f"most {self.percent_per_minute_max:g} % of the role's median a minute, and the median of the last "
            f"third of the run is at most {self.thirds_percent_max:g} % above the first; "
            f"judged from {self.observed_s_min:g} s on"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One role's memory. ``flat`` is None where too little of it was seen."""

    role: str
    median_bytes: float
    percent_per_minute: float
    """Positive: it grows."""
    thirds_percent: float
    observed_s: float
    lives: int
    flat: bool | None


def judge(role: str, samples: Sequence[Sample], rule: Rule) -> Judged:
    """Whether the memory of one role is flat by this rule; `flat` None: too little was seen."""
    lives = warm_lives(samples, rule.warm_up_s)
    observed_s = sum(life[-1].at_s - life[0].at_s for life in lives)
    warm = [sample for life in lives for sample in life]
    median = statistics.median(sample.bytes for sample in warm) if warm else 0.0
    slopes = [slope for life in lives for slope in _slopes(life)]
    percent = 6000.0 * statistics.median(slopes) / median if slopes else 0.0
    thirds = _thirds_percent(warm)
    flat: bool | None = percent <= rule.percent_per_minute_max and thirds <= rule.thirds_percent_max
    if observed_s < rule.observed_s_min or not slopes:
        flat = None
    return Judged(
        role=role,
        median_bytes=median,
        percent_per_minute=percent,
        thirds_percent=thirds,
        observed_s=observed_s,
        lives=len({sample.pid for sample in samples}),
        flat=flat,
    )


def judge_all(samples: Mapping[str, Sequence[Sample]], rule: Rule) -> list[Judged]:
    return [judge(role, samples_of_role, rule) for role, samples_of_role in sorted(samples.items())]


def verdict(judged: Iterable[Judged]) -> bool | None:
    """False: some role grows. None: none does, but too little was seen of one."""
    answers = [role.flat for role in judged]
    if False in answers:
        return False
    return None if None in answers or not answers else True


def warm_lives(samples: Iterable[Sample], warm_up_s: float) -> list[list[Sample]]:
    """The samples of each process that is old enough, without its warm-up, oldest process first."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    warm = [[s for s in life if s.at_s >= life[0].at_s + warm_up_s] for life in lives.values()]
    return [life for life in warm if len(life) > 1]


def _slopes(life: Sequence[Sample]) -> list[float]:
    """Bytes a second, between all pairs that are far enough apart."""
    return [
        (later.bytes - earlier.bytes) / (later.at_s - earlier.at_s)
        for i, earlier in enumerate(life)
        for later in life[i + 1 :]
        if later.at_s - earlier.at_s >= PAIR_S_MIN
    ]


def _thirds_percent(warm: Sequence[Sample]) -> float:
    if len(warm) < 3:
        return 0.0
    third = len(warm) // 3
    in_order = sorted(warm, key=lambda sample: sample.at_s)
    first = statistics.median(sample.bytes for sample in in_order[:third])
    last = statistics.median(sample.bytes for sample in in_order[-third:])
    return 100.0 * (last / first - 1.0)
