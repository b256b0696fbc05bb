"""Merging neighbours one pair at a time: SWIFT's selective logging, the baseline (arXiv 2302.06173, and the authors'
planner, `merge_groups` in github.com/jasperzhong/swift).

Every machine is a group. While the log is too big, the pair of neighbours is merged for which the recovery time grows
least for the bytes that are saved:

    score = (R(merged) (p_a + p_b) - R(a) p_a - R(b) p_b) / V       p: probability that a failure is the group's

Two things are put right here: V counts both directions, where the authors' program counts activations alone, and p
counts the machines of the groups as they are, where theirs takes every group for one machine. The cap only says
where to stop, so there is one sequence of n choices.
"""

import numpy as np

from swift.plan.model import CostModel, Cuts


def merges(model: CostModel, *, additive: bool) -> list[Cuts]:
    """All choices on the way from every machine by itself to one group of all.

    `additive`: R as the paper estimates it, of one step, R(merged) = R(a) + R(b) + V / network bandwidth; else as this
    model has it. Either way what comes out is to be judged by the model.
    """
    n, network = model.n, model.profile.network_bytes_per_s
    begins = np.arange(n)
    ends = begins + 1
    table = model.replay_step_s if additive else model.recovery_s
    recovery = table[begins, ends]
    chance = model.probability[begins, ends]
    choices: list[Cuts] = [tuple(range(1, n))]
    while len(begins) > 1:
        size = model.edge_bytes[begins[1:]].astype(np.float64)
        if additive:
            merged = recovery[:-1] + recovery[1:] + (0.0 if network is None else size / network)
        else:
            merged = table[begins[:-1], ends[1:]]
        parts = recovery * chance
        score = (merged * (chance[:-1] + chance[1:]) - parts[:-1] - parts[1:]) / size
        pair = int(score.argmin())
        recovery[pair] = merged[pair]
        chance[pair] += chance[pair + 1]
        ends[pair] = ends[pair + 1]
        begins, ends = np.delete(begins, pair + 1), np.delete(ends, pair + 1)
        recovery, chance = np.delete(recovery, pair + 1), np.delete(chance, pair + 1)
        choices.append(tuple(begins[1:].tolist()))
    return choices
