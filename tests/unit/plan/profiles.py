"""Profiles for tests, and what they cost by the formulas of docs/planning.md, written down a second time."""

import itertools
import math
from typing import Any

from hypothesis import strategies as st

from swift_ft.lab.plan.profile import Profile


def profile(machines: int = 4, ranks: int = 1, **changes: Any) -> Profile:
    """Every stage takes 3 s for a microbatch, every boundary has 100 bytes each way, a read takes no time."""
    stages = machines * ranks
    fields: dict[str, Any] = {
        "name": "test",
        "microbatches": 4,
        "forward_s": (1.0,) * stages,
        "backward_s": (2.0,) * stages,
        "forward_bytes": (100,) * (stages - 1),
        "backward_bytes": (100,) * (stages - 1),
        "machine_of_stage": tuple(stage // ranks for stage in range(stages)),
        "log_write_bytes_per_s": 1e9,
        "log_read_bytes_per_s": 1e9,
        "checkpoint_interval_steps": 11,
        "checkpoint_bytes": (1000,) * stages,
        "checkpoint_bytes_per_s": 1000.0,
        "machine_mtbf_s": (1e6,) * machines,
    }
    return Profile(**{**fields, **changes})


@st.composite
def profiles(draw: st.DrawFn, machines_max: int = 6, same_sizes: bool | None = None) -> Profile:
    ranks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=machines_max))
    stages = sum(ranks)

    def each(values: st.SearchStrategy[Any], count: int = stages) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    same = draw(st.booleans()) if same_sizes is None else same_sizes
    sizes = st.sampled_from([1000, 2000]) if same else st.integers(1, 10**6)
    seconds = st.floats(0.01, 10.0)
    return Profile(
        name="drawn",
        microbatches=draw(st.integers(1, 9)),
        forward_s=each(seconds),
        backward_s=each(seconds),
        update_s=each(st.floats(0.0, 10.0)) if draw(st.booleans()) else None,
        forward_bytes=each(sizes, stages - 1),
        backward_bytes=each(sizes, stages - 1),
        other_bytes=draw(st.integers(0, 100)),
        machine_of_stage=tuple(m for m, count in enumerate(ranks) for _ in range(count)),
        log_write_bytes_per_s=draw(st.floats(10.0, 1e6)),
        log_read_bytes_per_s=draw(st.floats(10.0, 1e6)),
        log_copy_bytes_per_s=draw(st.none() | st.floats(10.0, 1e6)),
        network_bytes_per_s=draw(st.floats(10.0, 1e6)),
        checkpoint_interval_steps=draw(st.integers(1, 50)),
        checkpoint_bytes=each(st.integers(0, 10**5)),
        checkpoint_bytes_per_s=draw(st.floats(10.0, 1e6)),
        machine_mtbf_s=each(st.floats(1e3, 1e7), len(ranks)),
        fixed_s=draw(st.floats(0.0, 100.0)),
        copies_max=draw(st.integers(1, 4)),
        gradient_bytes=each(st.integers(0, 10**4)),
    )


def step_s(p: Profile) -> float:
    """(M + P - 1) t, for stages that differ: the pipeline fills once, then the slowest stage sets the pace."""
    times = [f + b for f, b in zip(p.forward_s, p.backward_s, strict=True)]
    return sum(times) + (p.microbatches - 1) * max(times) + max(p.update_s or [0.0])


def group_s(p: Profile, first: int, end: int) -> tuple[float, int]:
    """(expected recovery of the machines first to end - 1, the number of copies that replay)."""
    stages = [s for s, machine in enumerate(p.machine_of_stage) if first <= machine < end]
    times = [p.forward_s[s] + p.backward_s[s] for s in stages]
    from_left = p.forward_bytes[stages[0] - 1] if stages[0] > 0 else 0
    from_right = p.backward_bytes[stages[-1]] if stages[-1] < p.stages - 1 else 0
    read_s = (from_left + from_right) / p.log_read_bytes_per_s
    load_s = max(
        sum(p.checkpoint_bytes[s] for s in stages if p.machine_of_stage[s] == machine)
        / p.checkpoint_bytes_per_s
        for machine in range(first, end)
    )
    best = (math.inf, 0)
    for d in range(1, p.copies_max + 1):
        if d > (p.stages if len(stages) == 1 else 1):
            continue
        compute_s = sum(times) + (math.ceil(p.microbatches / d) - 1) * max(times)
        compute_s += max(p.update_s[s] for s in stages) if p.update_s else 0.0
        spread_s = 0.0
        if p.gradient_bytes is not None and p.network_bytes_per_s is not None and d > 1:
            compute_s += 2 * (d - 1) / d * max(p.gradient_bytes[s] for s in stages) / p.network_bytes_per_s
            spread_s = max(p.checkpoint_bytes[s] for s in stages) / p.network_bytes_per_s
        steps_s = (p.checkpoint_interval_steps - 1) / 2 * max(compute_s, read_s)
        total = p.fixed_s + load_s + spread_s + steps_s + step_s(p) / 2
        best = min(best, (total, d))
    return best


def choices(p: Profile) -> list[tuple[int, ...]]:
    machines = range(1, p.machines)
    return [cuts for count in range(p.machines) for cuts in itertools.combinations(machines, count)]


def edge_bytes(p: Profile, cut: int) -> int:
    boundary = p.machine_of_stage.index(cut) - 1
    return p.forward_bytes[boundary] + p.backward_bytes[boundary]


def costs(p: Profile, cuts: tuple[int, ...]) -> tuple[int, float]:
    """(bytes per step of the boundaries, expected recovery)."""
    rates = [1 / mtbf for mtbf in p.machine_mtbf_s]
    recovery = sum(
        sum(rates[first:end]) / sum(rates) * group_s(p, first, end)[0]
        for first, end in itertools.pairwise([0, *cuts, p.machines])
    )
    return sum(edge_bytes(p, cut) for cut in cuts), recovery


def overhead_s(p: Profile, cuts: tuple[int, ...]) -> float:
    """What the machine that logs most adds to a step."""
    sent = [0] * p.machines
    for cut in cuts:
        boundary = p.machine_of_stage.index(cut) - 1
        sent[cut - 1] += p.forward_bytes[boundary]
        sent[cut] += p.backward_bytes[boundary]
    held_s = max(sent) / p.log_copy_bytes_per_s if p.log_copy_bytes_per_s else 0.0
    return max(step_s(p) + held_s, max(sent) / p.log_write_bytes_per_s) - step_s(p)
