"""How long a replay takes, and with how many ranks it is shortest.

Formulas (4) to (6) of docs/planning.md, for the line of docs/replay.md. Neighbouring stages that replay together, or
one alone; d ranks each share their M microbatches. t: seconds of a stage for a microbatch; u: its update; G: bytes of
its weights, and as many of gradients; b: a bucket; V: bytes that it reads a step:

    step(d) = max(sum(t) + (ceil(M / d) - 1) max(t) + max(u) + line(d), max(V) / B_log)
    line(d) = 2 (max(G) + (d - 2) b) / B_link if d > 1, else 0

What is not known of a link is taken from LINK_BYTES_PER_S; a log of which hardly anything was read, as never waited
for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swift.recovery.groups import RecoveryGroups
from swift.recovery.measured import RankMeasured

LINK_BYTES_PER_S = 1e9
"""Between two ranks: what 10 Gbit/s have left."""
BUCKET_BYTES = 4 << 20
"""Of the line (`swift.runtime.shared_replay.gradient_chain`)."""
READ_BYTES_MIN = 8 << 20
"""Fewer bytes, and what they were waited for tells of the way to the log, not of what it gives."""
_EQUAL = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Of one stage, as it was measured while it trained."""

    microbatches: int
    microbatch_s: float
    """Forward and backward of one."""
    update_s: float = 0.0
    """What a step takes besides."""
    weight_bytes: int = 0
    read_bytes: int = 0
    """Out of the log, a step."""
    log_bytes_per_s: float = math.inf


def of_rank(stages: Sequence[StageCost]) -> StageCost:
    """Of one that runs several: it computes them one after the other, and updates them at once."""
    first, *more = stages
    return (
        replace(
            first,
            microbatch_s=sum(stage.microbatch_s for stage in stages),
            weight_bytes=sum(stage.weight_bytes for stage in stages),
            read_bytes=sum(stage.read_bytes for stage in stages),
        )
        if more
        else first
    )


def step_s(costs: Sequence[StageCost], workers: int = 1, link_bytes_per_s: float = LINK_BYTES_PER_S) -> float:
    """A step of neighbouring stages that replay together, each shared by so many ranks."""
    largest = -(-max(cost.microbatches for cost in costs) // workers)
    took = sum(cost.microbatch_s for cost in costs)
    took += (largest - 1) * max(cost.microbatch_s for cost in costs) + max(cost.update_s for cost in costs)
    if workers > 1:
        weights = max(cost.weight_bytes for cost in costs)
        took += 2 * (weights + (workers - 2) * min(BUCKET_BYTES, weights)) / link_bytes_per_s
    return max([took, *(cost.read_bytes / cost.log_bytes_per_s for cost in costs)])


def fewest(seconds: Mapping[tuple[int, ...], Sequence[float]], free: int) -> dict[tuple[int, ...], int]:
    """owners -> how many copies of them help; `seconds` of each: its replay with 0, 1, 2 … of them. A copy takes as
    many of the `free` ranks as there are owners.

    All wait for the replay that takes longest: it is made as short as it can be, and nobody helps who does not make it
    so. Helping that does not pay is not done.
    """
    for limit in sorted({option_s for options in seconds.values() for option_s in options}):
        wanted = {
            owners: next((n for n, option_s in enumerate(options) if option_s <= limit * _EQUAL), None)
            for owners, options in seconds.items()
        }
        chosen = {owners: count for owners, count in wanted.items() if count is not None}
        if len(chosen) == len(seconds) and sum(len(o) * count for o, count in chosen.items()) <= free:
            return chosen
    return dict.fromkeys(seconds, 0)


def costs_of(measured: Mapping[int, RankMeasured], groups: RecoveryGroups) -> dict[int, StageCost]:
    """stage -> what its replay costs, where it was measured."""
    rate = _read_rate(measured)
    arriving: dict[int, int] = {}
    for rank in measured.values():
        for stage in rank.stages:
            here = {other.stage for other in rank.stages}
            for sent in stage.sent:
                if sent.destination not in here and groups.crosses(stage.stage, sent.destination):
                    arriving[sent.destination] = arriving.get(sent.destination, 0) + sent.bytes
    return {
        stage.stage: StageCost(
            microbatches=rank.microbatches,
            microbatch_s=stage.forward_s + stage.backward_s,
            update_s=rank.update_s,
            weight_bytes=stage.gradient_bytes,
            read_bytes=arriving.get(stage.stage, 0),
            log_bytes_per_s=rate,
        )
        for rank in measured.values()
        for stage in rank.stages
        if rank.microbatches
    }


def _read_rate(measured: Mapping[int, RankMeasured]) -> float:
    """That replays have got out of the log: all their bytes over all their waits."""
    told = [
        (rank.log_read_bytes, rank.log_read_wait_s)
        for rank in measured.values()
        if rank.log_read_bytes is not None and rank.log_read_wait_s is not None
    ]
    size, waited_s = sum(size for size, _ in told), sum(waited for _, waited in told)
    return size / waited_s if size >= READ_BYTES_MIN and waited_s > 0 else math.inf
